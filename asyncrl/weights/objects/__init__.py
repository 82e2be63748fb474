"""Weights in the bus's object store: full versions and deltas."""
