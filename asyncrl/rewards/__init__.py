"""Reward functions, which score rollouts."""
