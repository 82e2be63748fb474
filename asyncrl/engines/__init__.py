"""Adapters of the Engine port: what samples."""
