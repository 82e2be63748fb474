"""Faults of a run: their names, diagnosis and remedies."""
