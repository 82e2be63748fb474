"""Algorithms: advantage, loss, correction and aggregation put together."""
