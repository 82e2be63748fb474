"""Which trajectories to trust: validation and logprob mismatch."""
