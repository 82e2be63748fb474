"""Runs and configures nats-server."""
