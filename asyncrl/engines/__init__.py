"""Sampling engines: adapters of the Engine port."""
