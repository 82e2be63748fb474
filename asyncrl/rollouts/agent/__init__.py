"""Agents: programs that speak to an endpoint of the rollout worker, which records and trains what they sample there."""
