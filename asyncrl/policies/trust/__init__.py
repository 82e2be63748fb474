"""Which trajectories to believe: validation and logprob mismatch."""
