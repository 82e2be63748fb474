"""Which device a section of the run file means."""

from __future__ import annotations

from asyncrl.errors import ConfigError


def resolve_device(name: str, *, section: str) -> str:
    """ "cpu" or "cuda"; "auto" takes the GPU if torch sees one. Raises ConfigError for "cuda" without a GPU."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        require_gpu(section)
    return name


def require_gpu(section: str) -> None:
    """Raises ConfigError if torch sees no GPU on this machine."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f'{section}: device = "cuda", but this machine has no GPU that torch sees; use "cpu" or "auto"'
        )
