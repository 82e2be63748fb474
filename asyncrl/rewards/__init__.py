"""Reward functions: what judges a trajectory."""
