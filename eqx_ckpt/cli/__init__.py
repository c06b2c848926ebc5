"""The command line: each command is a door to a public function."""
