"""Audit: account for every prompt group of a run."""
