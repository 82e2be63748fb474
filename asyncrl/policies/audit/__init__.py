"""Accounts for every prompt group of a run."""
