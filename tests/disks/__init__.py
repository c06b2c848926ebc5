"""Disks that several processes share, simulated."""
