"""The files of a run on disk: checkpoints and history."""
