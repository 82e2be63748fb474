"""Checkpoints without a learner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asyncrl.actors.learner import checkpoint
from asyncrl.policies.groups.saved import LearnerState


def write_checkpoint(
    directory: Path, state: LearnerState, *, save_backend: Callable[[Path], None], keep: int
) -> Path | None:
    unfinished = checkpoint.begin(directory, state, save_backend=save_backend)
    return checkpoint.finish(unfinished, finish_backend=lambda: {}, keep=keep)
