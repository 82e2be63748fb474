"""Faults of a run: how they are named, diagnosed and remedied."""
