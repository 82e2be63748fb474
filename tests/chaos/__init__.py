"""Kills processes of a run at chosen and random moments, then accounts for every prompt group."""
