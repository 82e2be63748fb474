"""Read-only views of a run while it is running."""
