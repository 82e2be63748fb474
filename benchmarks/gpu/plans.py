"""The arms of a comparison, their GPUs, and their order. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from asyncrl.config.run import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """mode, load, settings  keys of the run file; an empty load is the mode's default"""

    mode: Mode
    load: str = ""
    is_colocated: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)


KINDS: Final[Mapping[str, Kind]] = {
    "async": Kind(mode="async", load="in_flight"),
    "sync_colocated": Kind(mode="sync", is_colocated=True),
    "one_step_off": Kind(mode="one_step_off"),
    "async_drain": Kind(mode="async", load="drain"),
    "sync": Kind(mode="sync"),
    "async_drop": Kind(mode="async", load="in_flight", settings={"staleness.eviction": "drop"}),
}
"""In the order in which they run. If time runs out, the least important arms are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One arm: ``learners`` ranks on the first GPUs, ``workers`` engines on the last ones."""

    arm: str
    gpus: int
    learners: int
    workers: int

    @property
    def kind(self) -> Kind:
        return KINDS[self.arm]

    @property
    def is_colocated(self) -> bool:
        return self.kind.is_colocated

    @property
    def split(self) -> str:
        return f"{self.gpus}" if self.is_colocated else f"{self.learners}+{self.workers}"

    @property
    def learner_gpus(self) -> tuple[int, ...]:
        return tuple(range(self.learners))

    @property
    def engine_gpus(self) -> tuple[int, ...]:
        return tuple(range(self.gpus - self.workers, self.gpus))

    def max_staleness(self, bound_of_async: int) -> int:
        return {"sync": 0, "one_step_off": 1, "async": bound_of_async}[self.kind.mode]

    def warmup(self, bound_of_async: int) -> int:
        """Return the steps until the window was filled once."""
        return self.max_staleness(bound_of_async) + 1

    def running(self, groups_per_batch: int, group_size: int, *, of_async: int) -> int:
        """Return the samples that one worker has in progress.

        With a barrier, it is an even share of the batch, because all would wait for a worker with more.
        """
        even = math.ceil(groups_per_batch / self.workers) * group_size
        return of_async if self.kind.mode == "async" else even


def plans(arms: Sequence[str], *, splits: Sequence[str], gpus: int) -> list[Plan]:
    """Return all ``arms`` at the first split, then the arms that are not colocated at the others. Raises ValueError."""
    found = [parse_arm(f"{arm}@{splits[0] if splits else _half(gpus)}", gpus=gpus) for arm in KINDS if arm in arms]
    for split in splits[1:]:
        found += [
            parse_arm(f"{arm}@{split}", gpus=gpus)
            for arm, kind in KINDS.items()
            if arm in arms and not kind.is_colocated
        ]
    return found


def parse_arm(text: str, *, gpus: int) -> Plan:
    """Parse ARM@L+W, or ARM for a colocated arm. Raises ValueError."""
    arm, _, split = text.partition("@")
    if arm not in KINDS:
        raise ValueError(f"{text!r}: no such arm; there are {', '.join(KINDS)}")
    if KINDS[arm].is_colocated:
        return Plan(arm=arm, gpus=gpus, learners=gpus, workers=gpus)
    learners, _, workers = split.partition("+")
    if not (learners.isdigit() and workers.isdigit() and int(learners) and int(workers)):
        raise ValueError(f"{text!r}: the split must be L+W, such as {arm}@{_half(gpus)}")
    if int(learners) + int(workers) > gpus:
        raise ValueError(f"{text!r}: {split} are more than {gpus} GPUs")
    return Plan(arm=arm, gpus=gpus, learners=int(learners), workers=int(workers))


def _half(gpus: int) -> str:
    return f"{gpus // 2}+{gpus - gpus // 2}"
