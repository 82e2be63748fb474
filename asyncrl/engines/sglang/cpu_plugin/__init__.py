"""On PYTHONPATH of a CPU server, and of nothing else."""
