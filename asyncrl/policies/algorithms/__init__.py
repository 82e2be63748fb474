"""Algorithms: combinations of advantage, loss, correction and aggregation."""
