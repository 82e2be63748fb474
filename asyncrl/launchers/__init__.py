"""Adapters of the Launcher port: what starts the processes of a run."""
