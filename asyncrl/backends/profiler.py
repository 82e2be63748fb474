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
from typing import Final, Protocol, TypeVar

import torch

T = TypeVar("T")

FOLDER: Final = "profile"
MOST_ALLOCATIONS: Final = 100_000
"""Allocations that a memory snapshot tells of."""

log = logging.getLogger("asyncrl.learner")


class Allocations(Protocol):
    """Who holds which memory, from ``record`` to ``stop``. Each may raise whatever its library raises."""

    def record(self) -> None: ...
    def dump(self, path: Path) -> None: ...
    def stop(self) -> None: ...


class OfGPU:
    """Allocations of torch's CUDA allocator: private names, which docs.pytorch.org tells people to call."""

    def record(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)

    def dump(self, path: Path) -> None:
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)


class StepProfiler:
    """Around each step."""

    def __init__(self, steps: Collection[int], folder: Path, *, allocations: Allocations | None = None) -> None:
        """
        steps        numbers of the steps to profile, from 1
        folder       the run's
        allocations  to take a snapshot of; None takes none
        """
        self._steps = frozenset(steps)
        self._folder = folder / FOLDER
        self._allocations = allocations

    def __call__(self, step: int, train: Callable[[], T]) -> T:
        """What ``train`` gives, step ``step``, and what it raises. Blocks."""
        if step not in self._steps:
            return train()
        path = self._folder / f"step-{step:06d}"
        with _memory(self._allocations, path.with_suffix(".pickle")), _trace(path.with_suffix(".json")):
            return train()


def step_profiler(steps: Collection[int], folder: Path) -> StepProfiler:
    """For this machine: with memory snapshots where there is a GPU."""
    return StepProfiler(steps, folder, allocations=OfGPU() if torch.cuda.is_available() else None)


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
def _memory(allocations: Allocations | None, path: Path) -> Iterator[None]:
    if allocations is None:
        yield
        return
    with _said("memory snapshot of", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        allocations.record()
    try:
        yield
    finally:
        with _said("memory snapshot of", path):
            allocations.dump(path)
        with _said("end of the memory snapshot of", path):  # it slows every later step
            allocations.stop()


@contextlib.contextmanager
def _said(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a profiler raises: an aid to people fails no step
        log.warning("no %s %s: %s: %s", what, path.stem, type(error).__name__, error)
