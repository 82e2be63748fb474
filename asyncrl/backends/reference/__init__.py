"""The reference backend: plain PyTorch, one process; other backends are tested against it."""
