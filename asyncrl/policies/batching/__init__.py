"""Trajectory groups to packed micro-batches."""
