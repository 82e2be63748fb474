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
from typing import Final, Protocol, TypeVar

import torch

T = TypeVar("T")

FOLDER: Final = "profile"
MOST_ALLOCATIONS: Final = 100_000
"""Most allocations that a memory snapshot records."""

log = logging.getLogger("asyncrl.learner")


class Allocations(Protocol):
    """Records memory allocations from ``record`` to ``stop``. Methods may raise any exception of the library."""

    def record(self) -> None: ...
    def dump(self, path: Path) -> None: ...
    def stop(self) -> None: ...


class OfGPU:
    """Records allocations of torch's CUDA allocator, through private functions that docs.pytorch.org recommends."""

    def record(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)

    def dump(self, path: Path) -> None:
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)


class StepProfiler:
    """Wraps training steps and profiles the chosen ones."""

    def __init__(self, steps: Collection[int], folder: Path, *, allocations: Allocations | None = None) -> None:
        """
        steps        numbers of the steps to profile, from 1
        folder       the run's folder
        allocations  source of memory snapshots; None takes none
        """
        self._steps = frozenset(steps)
        self._folder = folder / FOLDER
        self._allocations = allocations

    def __call__(self, step: int, train: Callable[[], T]) -> T:
        """Run step ``step`` by calling ``train``; returns its result and raises its errors. Blocks."""
        if step not in self._steps:
            return train()
        path = self._folder / f"step-{step:06d}"
        with _memory(self._allocations, path.with_suffix(".pickle")), _trace(path.with_suffix(".json")):
            return train()


def step_profiler(steps: Collection[int], folder: Path) -> StepProfiler:
    """Return a profiler for this machine, with memory snapshots if there is a GPU."""
    return StepProfiler(steps, folder, allocations=OfGPU() if torch.cuda.is_available() else None)


@contextlib.contextmanager
def _trace(path: Path) -> Iterator[None]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = None
    with _warn_on_error("profile of", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        profiler.start()
    try:
        yield
    finally:
        if profiler is not None:
            with _warn_on_error("profile of", path):
                profiler.stop()
                profiler.export_chrome_trace(str(path))
                log.info("profiled: %s", path)


@contextlib.contextmanager
def _memory(allocations: Allocations | None, path: Path) -> Iterator[None]:
    if allocations is None:
        yield
        return
    with _warn_on_error("memory snapshot of", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        allocations.record()
    try:
        yield
    finally:
        with _warn_on_error("memory snapshot of", path):
            allocations.dump(path)
        with _warn_on_error("end of the memory snapshot of", path):  # recording slows every later step
            allocations.stop()


@contextlib.contextmanager
def _warn_on_error(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # no profiler error may fail a step
        log.warning("no %s %s: %s: %s", what, path.stem, type(error).__name__, error)
