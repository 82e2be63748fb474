"""Runs of real processes and the faults injected into them."""
