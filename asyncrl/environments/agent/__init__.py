"""Agents: programs that call the rollout worker's endpoint, which records the sampled tokens for training."""
