"""Chooses and builds the adapters that a run file names."""
