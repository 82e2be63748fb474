"""The processes of a run: what each is started with, and how the launcher keeps them up."""
