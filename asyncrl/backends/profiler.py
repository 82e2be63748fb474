"""Profiles chosen training steps: what ran when, and on a GPU who holds which memory.

    RUN_DIR/profile/step-000007.json     torch.profiler's trace, for ui.perfetto.dev or chrome://tracing
    RUN_DIR/profile/step-000007.pickle   on a GPU: snapshot of its memory, for docs.pytorch.org/memory_viz

Of the learner's first rank. A step that is profiled takes longer; what fails of the profiling fails no step.

Tests: tests/unit/backends/test_profiler.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final, TypeVar

import torch

T = TypeVar("T")

FOLDER: Final = "profile"
MOST_ALLOCATIONS: Final = 100_000
"""Allocations that a memory snapshot tells of."""

log = logging.getLogger("asyncrl.learner")


class StepProfiler:
    """``steps``: numbers of the steps to profile, from 1;  ``folder``: the run's"""

    def __init__(self, steps: Collection[int], folder: Path) -> None:
        self._steps = frozenset(steps)
        self._folder = folder / FOLDER

    def __call__(self, step: int, train: Callable[[], T]) -> T:
        """What ``train`` gives, step ``step``, and what it raises. Blocks."""
        if step not in self._steps:
            return train()
        path = self._folder / f"step-{step:06d}"
        with _memory(path.with_suffix(".pickle")), _trace(path.with_suffix(".json")):
            return train()


@contextlib.contextmanager
def _trace(path: Path) -> Iterator[None]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = None
    with _said("profile of", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        profiler.start()
    try:
        yield
    finally:
        if profiler is not None:
            with _said("profile of", path):
                profiler.stop()
                profiler.export_chrome_trace(str(path))
                log.info("profiled: %s", path)


@contextlib.contextmanager
def _memory(path: Path) -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    with _said("memory snapshot of", path):
        torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
    try:
        yield
    finally:
        with _said("memory snapshot of", path):
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)


@contextlib.contextmanager
def _said(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a profiler raises: an aid to people fails no step
        log.warning("no %s %s: %s: %s", what, path.stem, type(error).__name__, error)
