"""Restores, with the host memory and the devices that they need."""
