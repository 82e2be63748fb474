"""Checks before a run, its learner or a worker starts. Each problem is reported in one line."""
