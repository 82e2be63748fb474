"""Resolve the device named in a section of the run file."""

from __future__ import annotations

from asyncrl.errors import ConfigError


def resolve_device(name: str, *, section: str) -> str:
    """Return "cpu" or "cuda"; "auto" picks the GPU if torch sees one. Raises ConfigError for "cuda" without a GPU."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        require_gpu(section)
    return name


def require_gpu(section: str) -> None:
    """Raise ConfigError if torch sees no GPU on this machine."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f'{section}: device = "cuda", but this machine has no GPU that torch sees; use "cpu" or "auto"'
        )
