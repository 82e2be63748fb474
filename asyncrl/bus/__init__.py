"""Adapters of the Bus port, and the nats-server that a run may start."""
