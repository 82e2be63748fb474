"""This folder is on PYTHONPATH of a CPU server only."""
