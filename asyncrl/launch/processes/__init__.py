"""The processes of a run: how each is started, and how the launcher keeps them running."""
