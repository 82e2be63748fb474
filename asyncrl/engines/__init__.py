"""Sampling engines: implementations of the Engine port."""
