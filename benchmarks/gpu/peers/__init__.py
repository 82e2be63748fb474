"""asyncrl and a peer on the same two GPUs: one trains, one generates."""
