"""Kills processes of a run at chosen and random moments, and accounts for every prompt group afterwards."""
