"""Tools that make a disk fail: see the tests beside them."""
