"""Profiles chosen training steps: a timeline of operations, and on a GPU a snapshot of memory allocations.

    RUN_DIR/profile/step-000007.json     torch.profiler's trace, for ui.perfetto.dev or chrome://tracing
    RUN_DIR/profile/step-000007.pickle   on a GPU: snapshot of its memory, for docs.pytorch.org/memory_viz

Only the learner's first rank is profiled. A profiled step takes longer. Errors of the profiler never fail a step.

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
"""Most allocations that a memory snapshot records."""

log = logging.getLogger("asyncrl.learner")


class StepProfiler:
    """Wraps training steps and profiles the chosen ones."""

    def __init__(self, steps: Collection[int], folder: Path) -> None:
        """``steps``: numbers of the steps to profile, from 1. ``folder``: the run's folder."""
        self._steps = frozenset(steps)
        self._folder = folder / FOLDER

    def __call__(self, step: int, train: Callable[[], T]) -> T:
        """Run step ``step`` by calling ``train``; returns its result and raises its errors. Blocks."""
        if step not in self._steps:
            return train()
        path = self._folder / f"step-{step:06d}"
        with contextlib.ExitStack() as stack:
            if torch.cuda.is_available():
                stack.enter_context(_record("memory snapshot", path.with_suffix(".pickle"), _record_memory))
            stack.enter_context(_record("profile", path.with_suffix(".json"), _record_operations))
            return train()


@contextlib.contextmanager
def _record(what: str, path: Path, start: Callable[[], Callable[[Path], None]]) -> Iterator[None]:
    """Start recording, and write to ``path`` what happened inside. ``start`` returns the function that writes it."""
    stop = None
    with _warn_on_error(what, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stop = start()
    try:
        yield
    finally:
        if stop is not None:
            with _warn_on_error(what, path):
                stop(path)


def _record_operations() -> Callable[[Path], None]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities, profile_memory=True)
    profiler.start()

    def stop(path: Path) -> None:
        profiler.stop()
        profiler.export_chrome_trace(str(path))
        log.info("profiled: %s", path)

    return stop


def _record_memory() -> Callable[[Path], None]:
    """Record torch's CUDA allocator, through private functions that docs.pytorch.org recommends."""
    torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)

    def stop(path: Path) -> None:
        try:
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)  # recording slows every later step

    return stop


@contextlib.contextmanager
def _warn_on_error(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # no profiler error may fail a step
        log.warning("no %s of %s: %s: %s", what, path.stem, type(error).__name__, error)
