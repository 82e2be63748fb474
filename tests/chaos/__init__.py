"""Kills what a run is made of, at chosen and at random moments, and accounts for every prompt group afterwards."""
