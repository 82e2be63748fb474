"""Adapters of the Backend port: what trains."""
