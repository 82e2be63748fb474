"""What a run would reach if bus, actors and Python took no time: the loop's rules on a clock of their own.

Discrete events over the pure parts of the real thing (Admission, Buffer's order and bound, Decoding, Timing, Lengths).
``pipeline.py`` sweeps splits with it, and reports how much of it the real loop reaches. That can be over 1 where groups
are dropped: a real source publishes one prompt after another, which thins the engines' batches, so that long answers
decode faster and fewer of them get too old.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.actors.rollout.generation_session import sample_seed
from asyncrl.config.run import Mode
from asyncrl.policies.staleness.admission import Admission
from benchmarks.simulated import PROMPT_TOKENS, Decoding, Finished, Lengths, Timing, version_spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run to simulate: ``steps`` optimizer steps, the first ``warmup`` of them not counted."""

    mode: Mode
    workers: int
    learner_machines: int
    groups_per_batch: int
    group_size: int
    max_staleness: int
    steps: int
    warmup: int
    seed: int
    is_colocated: bool = False
    eviction: Literal["", "wait", "drop"] = ""
    """Of async in the real loop; ideal runs drop nothing."""

    @property
    def bound(self) -> int:
        return {"sync": 0, "one_step_off": 1, "async": self.max_staleness}[self.mode]

    @property
    def slots(self) -> int:
        """The window, shared evenly."""
        return -(-(self.bound + 1) * self.groups_per_batch // self.workers)

    @property
    def admission(self) -> Admission:
        """Without an end: a run that runs dry in its last steps is not steady."""
        return Admission(
            mode=self.mode,
            groups_per_batch=self.groups_per_batch,
            max_staleness=self.bound,
            total_groups=10**9,
        )


GroupLengths = Callable[[int], list[int]]
"""Group id to the lengths of its answers."""


def group_lengths(lengths: Lengths, *, group_size: int, seed: int) -> GroupLengths:
    """What the real workers will draw, remembered."""

    def of(group_id: int) -> list[int]:
        return [lengths.of(sample_seed(seed, group_id, index, 0)) for index in range(group_size)]

    return functools.cache(of)


@dataclass(slots=True)
class _Engine:
    """``changes``: (position, version), as version_spans takes them."""

    decoding: Decoding
    version: int = 0
    changes: list[tuple[float, tuple[int, int]]] = field(default_factory=lambda: [(-1.0, (0, 0))])
    loading_until: float = math.inf
    groups: int = 0


@dataclass(slots=True)
class _Group:
    """``version``: the oldest that sampled a token of it, of what ended so far."""

    version: int
    missing: int
    tokens: int


@dataclass(slots=True)
class Ideal:
    """State of one run; ``tokens_per_second`` runs it."""

    plan: Plan
    timing: Timing
    lengths: GroupLengths
    now: float = 0.0
    published: int = 0
    lost: int = 0
    batches_taken: int = 0
    steps_done: int = 0
    train_end: float = math.inf
    training: int = 0
    engines: list[_Engine] = field(default_factory=list)
    queue: deque[tuple[int, int]] = field(default_factory=deque)  # (group id, min policy version)
    groups: dict[int, _Group] = field(default_factory=dict)
    buffer: dict[int, _Group] = field(default_factory=dict)

    def tokens_per_second(self) -> float:
        """Trained response tokens over the steps behind the warm-up."""
        self.engines = [_Engine(Decoding(self.timing)) for _ in range(self.plan.workers)]
        tokens, since = 0, 0.0
        self._move()
        while self.steps_done < self.plan.steps:
            self._to_next_event()
            if self.train_end <= self.now:
                tokens += self.training
                self._end_step()
                if self.steps_done == self.plan.warmup:
                    tokens, since = 0, self.now
            self._move()
        return tokens / (self.now - since)

    def _to_next_event(self) -> None:
        events = [min(engine.decoding.next_finish(), engine.loading_until) for engine in self.engines]
        self.now = min(self.train_end, *events)
        assert self.now < math.inf, "nothing will ever happen"
        for engine in self.engines:
            for ended in engine.decoding.advance(self.now):
                self._end_sequence(engine, ended)
            if engine.loading_until <= self.now:
                engine.loading_until, engine.decoding.is_paused = math.inf, False
                engine.changes.append((engine.decoding.position, (0, engine.version)))

    def _end_sequence(self, engine: _Engine, ended: Finished) -> None:
        group_id = ended.number // self.plan.group_size
        group = self.groups[group_id]
        oldest = version_spans(engine.changes, entered=ended.entered, length=ended.length)[0].policy_version
        group.version = min(group.version, oldest)
        group.missing -= 1
        if not group.missing:
            engine.groups -= 1
            self.buffer[group_id] = self.groups.pop(group_id)

    def _end_step(self) -> None:
        self.train_end = math.inf
        self.steps_done += 1
        if self.plan.mode == "async":
            for engine in self.engines:
                self._load(engine)

    def _load(self, engine: _Engine) -> None:
        engine.version = self.steps_done
        engine.decoding.is_paused, engine.loading_until = True, self.now + self.timing.load_seconds

    def _move(self) -> None:
        """Everything that takes no time: take a batch, admit prompts, hand them to workers."""
        stale = [i for i, group in self.buffer.items() if self.steps_done - group.version > self.plan.bound]
        for group_id in stale:
            del self.buffer[group_id]
        self.lost += len(stale)
        if self.train_end == math.inf and len(self.buffer) >= self.plan.groups_per_batch:
            oldest = sorted(self.buffer, key=lambda i: (self.buffer[i].version, i))[: self.plan.groups_per_batch]
            self.training = sum(self.buffer.pop(group_id).tokens for group_id in oldest)
            packed = self.training + PROMPT_TOKENS * self.plan.group_size * self.plan.groups_per_batch
            self.train_end = self.now + self.timing.train_step(packed, machines=self.plan.learner_machines)
            self.batches_taken += 1
        self._admit()
        while self.queue and self._place(*self.queue[0]):
            self.queue.popleft()

    def _admit(self) -> None:
        count = self.plan.admission.may_publish(
            published=self.published, lost=self.lost, batches_taken=self.batches_taken, steps_done=self.steps_done
        )
        for group_id in range(self.published, self.published + count):
            self.queue.append((group_id, self.steps_done))
        self.published += count

    def _place(self, group_id: int, min_version: int) -> bool:
        """On the worker with the fewest groups; one that must load first must be quiet."""
        for engine in sorted(self.engines, key=lambda engine: engine.groups):
            if engine.groups >= self.plan.slots:
                return False
            if engine.version < min_version:
                if engine.groups:
                    continue
                self._load(engine)
            engine.groups += 1
            self._start(engine, group_id)
            return True
        return False

    def _start(self, engine: _Engine, group_id: int) -> None:
        size, lengths = self.plan.group_size, self.lengths(group_id)
        self.groups[group_id] = _Group(self.plan.steps, size, sum(lengths))
        for index, length in enumerate(lengths):
            engine.decoding.add(group_id * size + index, length)
