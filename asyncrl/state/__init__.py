"""What a run keeps on disk: checkpoints and history."""
