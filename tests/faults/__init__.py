"""Tools that make a disk fail: see tests/test_faults_*.py for their use."""
