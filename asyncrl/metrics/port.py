"""Interfaces of metric sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from asyncrl.policies.groups.sample import GroupSample
from asyncrl.policies.metric import Metric


class Sink(Protocol):
    """Destination of metrics.

    A sink that also has ``write_samples`` or ``alarm`` receives those (ShowsSamples, TakesAlarms).
    """

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Write a row. Raises OSError only if nothing of the row was written, so that the write can be retried."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class ShowsSamples(Protocol):
    def write_samples(self, step: int, samples: Sequence[GroupSample]) -> None:
        """Write decoded groups recorded since the last call (metrics.samples_per_step)."""
        ...


@runtime_checkable
class TakesAlarms(Protocol):
    def alarm(self, step: int, name: str, text: str) -> None:
        """Report an alarm that begins at this step."""
        ...
