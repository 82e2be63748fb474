"""What a sink of metrics is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from asyncrl.policies.batching.batch import Metric
from asyncrl.policies.groups.sample import GroupSample


class Sink(Protocol):
    """Where numbers go. One that also has ``write_samples`` or ``alarm`` gets those too (ShowsSamples, TakesAlarms)."""

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Raises OSError when nothing of the row was written: it may be written again."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class ShowsSamples(Protocol):
    def write_samples(self, step: int, samples: Sequence[GroupSample]) -> None:
        """Groups recorded since the last call, decoded (metrics.samples_per_step)."""
        ...


@runtime_checkable
class TakesAlarms(Protocol):
    def alarm(self, step: int, name: str, text: str) -> None:
        """An alarm goes on at this step."""
        ...
