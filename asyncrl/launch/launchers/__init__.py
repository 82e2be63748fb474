"""Adapters of the Launcher port, which start the processes of a run."""
