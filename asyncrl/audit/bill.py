"""What a run's GPUs were spent on, from its log, history and metrics, for `asyncrl bill`.

A worker's GPUs are shared at every instant by the groups that it was generating then, alike: with two groups in
progress for ten seconds on one GPU, each costs five GPU-seconds. Between its first and its last group, time without any
is "idle". The learner's step is shared by the groups that it trained, by their tokens; the time between steps is
"waiting". A server of a frozen model costs as much as it is up, which is "serving": what asked it is not recorded. A
process without a GPU counts as one. Tests: tests/unit/audit/test_bill.py.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from asyncrl.audit.recorded_groups import Fate, PromptFinder, prompt_id
from asyncrl.bus.port import Record
from asyncrl.errors import ConfigError
from asyncrl.messages import TrajectoryGroup
from asyncrl.messages.topics import group_id_of, sender_of

ROLLOUT: Final = "rollout"
LEARNER: Final = "learner"
IDLE: Final = "idle"
WAITING: Final = "waiting"
SERVING: Final = "serving"
SERVER: Final = "server"
ROLLED_BACK: Final = "rolled back"
FATE_NAMES: Final = {"dropped": "stale"}
AGAIN: Final = "sampled again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A group in progress on a worker.  began, ended: Unix seconds of the worker's clock, reward left out"""

    worker: str
    began: float
    ended: float
    fate: str
    task: str = ""
    prompt: str = ""
    tokens: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """GPU-seconds of one group, or of time that no group has.  actor: a worker, a server, or "learner" """

    actor: str
    role: str = ROLLOUT
    fate: str
    gpu_seconds: float
    task: str = ""
    prompt: str = ""
    tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Bill:
    """items: everything that was spent;  gains: evaluated metric -> (first, last)"""

    items: list[Item] = field(default_factory=list)
    gains: dict[str, tuple[float, float]] = field(default_factory=dict)
    groups_without_time: int = 0
    """Groups on the log that do not say how long they took: failed ones."""

    @property
    def gpu_seconds(self) -> float:
        return sum(one.gpu_seconds for one in self.items)

    @property
    def trained_tokens(self) -> int:
        return sum(one.tokens for one in self.items if one.fate == "trained" and one.role != LEARNER)

    def cost(self, prices: Mapping[str, float]) -> float:
        """Return the price of everything.  prices: of a GPU-hour, by actor, by role, or "" (all)

        Raises ConfigError for a price of nobody here.
        """
        known = {ROLLOUT, LEARNER, SERVER, *(one.actor for one in self.items)}
        for who in prices.keys() - known - {""}:
            raise ConfigError(f"--price {who}={prices[who]:g}: not on this bill; {', '.join(sorted(known))} are")
        return sum(one.gpu_seconds * price_of(one, prices) for one in self.items) / 3600

    def by(self, name: str) -> dict[Any, float]:
        """Return GPU-seconds by an attribute of the items, largest first."""
        found: dict[Any, float] = defaultdict(float)
        for one in self.items:
            found[getattr(one, name)] += one.gpu_seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def tokens_by(self, name: str) -> dict[Any, int]:
        """Return trained tokens by an attribute of the items."""
        found: Counter[Any] = Counter()
        for one in self.items:
            if one.fate == "trained" and one.role != LEARNER:
                found[getattr(one, name)] += one.tokens
        return dict(found)


def price_of(item: Item, prices: Mapping[str, float]) -> float:
    return prices.get(item.actor, prices.get(item.role, prices.get("", 0.0)))


def intervals_of(
    records: Iterable[Record[TrajectoryGroup]], fates: Mapping[int, Fate], *, finder: PromptFinder | None = None
) -> tuple[list[Interval], int]:
    """Return what the log says of each group, and the number of groups that say nothing of their time."""
    found: list[Interval] = []
    seen: set[int] = set()
    silent = 0
    for record in records:
        group, group_id = record.message, group_id_of(record.key)
        if group is None or group_id != group.group_id:
            continue
        if not group.began or not group.seconds:
            silent += 1
            continue
        fate = fates.get(group_id)
        is_it = fate is None or fate.sequence in (0, record.sequence)
        kind = AGAIN if group_id in seen or not is_it else "pending" if fate is None else fate.kind
        if is_it:
            seen.add(group_id)
        task = "" if finder is None else finder.task(finder.find(group)[1])
        found.append(
            Interval(
                worker=sender_of(record.key) or group.worker,
                began=group.began,
                ended=group.began + max(0.0, group.seconds - group.reward_seconds),
                fate=FATE_NAMES.get(kind, kind),
                task=task,
                prompt=prompt_id(group),
                tokens=sum(int(one.response_mask.sum()) for one in group.trajectories),
                step=0 if fate is None else fate.step,
            )
        )
    return found, silent


def engine_items(
    intervals: Sequence[Interval], *, gpus: float, own: Mapping[str, float] = MappingProxyType({})
) -> list[Item]:
    """Share the time of each worker's GPUs among its groups.  gpus: of a worker;  own: of those that have others"""
    found: list[Item] = []
    of_workers: dict[str, list[Interval]] = defaultdict(list)
    for one in intervals:
        of_workers[one.worker].append(one)
    for worker, ones in sorted(of_workers.items()):
        shares = [0.0] * len(ones)
        idle = 0.0
        # Example: A from 0 to 10, B from 5 to 15. A alone costs 5, then each costs 2.5, then B alone 5.
        changes = sorted([(one.began, place, 1) for place, one in enumerate(ones)])
        changes = sorted([*changes, *((one.ended, place, -1) for place, one in enumerate(ones))])
        running: set[int] = set()
        for (at, place, change), after in itertools.pairwise([*changes, (changes[-1][0], -1, 0)]):
            running.add(place) if change == 1 else running.discard(place)
            seconds = after[0] - at
            if not running:
                idle += seconds
            for number in running:
                shares[number] += seconds / len(running)
        found += [
            Item(
                actor=worker,
                fate=one.fate,
                gpu_seconds=share * own.get(worker, gpus),
                task=one.task,
                prompt=one.prompt,
                tokens=one.tokens,
            )
            for one, share in zip(ones, shares, strict=True)
        ]
        found.append(Item(actor=worker, fate=IDLE, gpu_seconds=idle * own.get(worker, gpus)))
    return found


def learner_items(
    rows: Mapping[tuple[int, int], Mapping[str, Any]],
    intervals: Sequence[Interval],
    *,
    present_steps: Mapping[int, int],
    gpus: float,
) -> list[Item]:
    """Share the learner's steps among the groups that they trained.

    rows  of metrics.jsonl by (incarnation, step);  present_steps: step -> incarnation that trained it for good
    """
    of_steps: dict[int, list[Interval]] = defaultdict(list)
    for one in intervals:
        if one.fate == "trained":
            of_steps[one.step].append(one)
    found: list[Item] = []
    for (incarnation, step), row in sorted(rows.items()):
        seconds, elapsed = (_number(row.get(f"learner/{name}_seconds")) for name in ("step", "elapsed"))
        if not elapsed:
            continue
        if present_steps.get(step) != incarnation:
            found.append(Item(actor=LEARNER, role=LEARNER, fate=ROLLED_BACK, gpu_seconds=elapsed * gpus))
            continue
        trained = of_steps.get(step, [])
        total = sum(one.tokens for one in trained)
        seconds = min(seconds, elapsed)
        found += [
            Item(
                actor=LEARNER,
                role=LEARNER,
                fate="trained",
                gpu_seconds=seconds * gpus * one.tokens / total,
                task=one.task,
                prompt=one.prompt,
                tokens=one.tokens,
            )
            for one in trained
            if total
        ]
        if not total:
            found.append(Item(actor=LEARNER, role=LEARNER, fate="trained", gpu_seconds=seconds * gpus))
        found.append(Item(actor=LEARNER, role=LEARNER, fate=WAITING, gpu_seconds=(elapsed - seconds) * gpus))
    return found


def server_items(rows: Mapping[tuple[int, int], Mapping[str, Any]], *, gpus: Mapping[str, int]) -> list[Item]:
    """Return what servers of frozen models cost while the learner was up.  gpus: by server; 0 counts as one"""
    seconds = sum(_number(row.get("learner/elapsed_seconds")) for row in rows.values())
    return [
        Item(actor=name, role=SERVER, fate=SERVING, gpu_seconds=seconds * (count or 1)) for name, count in gpus.items()
    ]


def gains_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return the first and last value of every mean of an evaluation; one that was evaluated once is left out."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            last = name.rpartition("/")[2]  # not mean@n/low, the lower end of its interval
            if name.startswith("evaluation/") and last.startswith("mean@") and isinstance(value, int | float):
                found[name].append(float(value))
    return {name: (values[0], values[-1]) for name, values in found.items() if len(values) > 1}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0
