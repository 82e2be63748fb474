"""Rollout functions: the built-in ones, the loader of a user's, and the builder of trajectories."""
