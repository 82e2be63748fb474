"""The reference backend: plain PyTorch, one process. Other backends are tested against it."""
