"""Weights through the bus's object store: whole versions and deltas."""
