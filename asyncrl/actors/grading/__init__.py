"""Rewards in a process of their own: what a rollout worker asks, and the reward worker that answers."""
