"""Manifests, leaves, statistics and verification."""
