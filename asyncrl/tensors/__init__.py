"""Weights as bytes: snapshots, weight files and checkpoint files."""
