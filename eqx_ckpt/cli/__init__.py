"""The command line: each command calls a public function."""
