"""Rollout functions: the built-in ones, the loader for user functions, and the trajectory builder."""
