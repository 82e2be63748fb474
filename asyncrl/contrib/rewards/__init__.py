"""Graders of single benchmarks. A run file names them by their short names (asyncrl/rewards/load.py)."""
