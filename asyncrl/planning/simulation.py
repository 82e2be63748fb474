"""What a run would reach if bus, actors and Python took no time: the rules of the loop on a simulated clock.

A discrete-event simulation over the pure parts of a real run: Admission, the buffer's order and bound, the learner's
holds, Decoding, Timing. If groups are dropped, a real run may reach more. A real source publishes prompts one after
another, which makes the engines' batches smaller, so long answers decode faster and fewer of them become too old.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.run import Mode
from asyncrl.config.staleness import Discard
from asyncrl.messages import VersionSpan
from asyncrl.policies.groups.selection import Selection
from asyncrl.policies.staleness.admission import Admission
from asyncrl.policies.staleness.window import NeededWindow

# -- speeds of engine and learner --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Timings of one machine.

    seconds_per_token     a: reading the weights, once per decode step however many sequences run
    seconds_per_sequence  b: additional time of a decode step per running sequence
    seconds_per_context   c: additional time of a decode step per token of the running sequences, prompts included:
                          reading its keys and values
    capacity              sequences that run at once; further ones queue
    capacity_beside       the same of an engine on the learner's GPUs, whose cache is smaller; 0: as many
    load_seconds          pause of decoding while new weights are loaded
    train_tokens_per_second, train_seconds   an optimizer step of T tokens on m machines takes T / (m x rate) + constant
    decode_beside         factor of a decode step while the learner trains on the same GPUs
    train_beside          factor of an optimizer step with engines on the same GPUs
    """

    seconds_per_token: float
    seconds_per_sequence: float
    capacity: int
    load_seconds: float
    train_tokens_per_second: float
    train_seconds: float
    seconds_per_context: float = 0.0
    capacity_beside: int = 0
    decode_beside: float = 1.0
    train_beside: float = 1.0

    @property
    def beside(self) -> Timing:
        """The timing of an engine on the learner's GPUs."""
        return replace(self, capacity=self.capacity_beside or self.capacity)

    def decode_step(self, running: float, context: float = 0.0) -> float:
        return self.seconds_per_token + self.seconds_per_sequence * running + self.seconds_per_context * context

    def train_step(self, tokens: int, *, machines: int) -> float:
        return tokens / (machines * self.train_tokens_per_second) + self.train_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeReading:
    """A measurement of an engine: ``tokens`` in ``seconds``, including prefill, with ``running`` sequences on average.

    context  tokens of these in all, prompts included, on average; 0 if the engine does not know
    """

    running: float
    tokens: float
    seconds: float
    context: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReading:
    """A measurement of one optimizer step of the smallest learner on ``tokens``, including prompts."""

    tokens: int
    seconds: float


def fit_decode(readings: Iterable[DecodeReading]) -> tuple[float, float, float]:
    """Fit (a, b, c) of a decode step of a + b x running + c x context seconds, all >= 0.

    Least squares over the total seconds of each measurement, so long ones weigh more. The result is scaled so that all
    measurements together take as long as they did. Raises ValueError without a token.
    """
    given = [reading for reading in readings if reading.running > 0 and reading.seconds > 0]
    steps = np.array([reading.tokens / reading.running for reading in given])
    seconds = np.array([reading.seconds for reading in given])
    if not steps.sum() > 0:
        raise ValueError("the engine sampled no token")
    columns = np.array([(1.0, reading.running, reading.context) for reading in given]) * steps[:, None]
    found = _fit_positive(columns, seconds)
    a, b, c = (found * (seconds.sum() / (columns @ found).sum())).tolist()
    return a, b, c


def fit_training(readings: Iterable[TrainReading]) -> tuple[float, float]:
    """Fit (tokens per second, constant seconds) of an optimizer step to measurements at different ``tokens``.

    Raises ValueError without a token.
    """
    given = list(readings)
    if not given or not any(reading.tokens for reading in given):
        raise ValueError("the learner trained no token")
    tokens = np.array([float(reading.tokens) for reading in given])
    columns = np.stack([np.ones(len(given)), tokens], axis=1)
    constant, per_token = _fit_positive(columns, np.array([one.seconds for one in given])).tolist()
    if per_token <= 0:  # too short to separate the two: attribute all time to the tokens
        constant, per_token = 0.0, float(sum(one.seconds for one in given) / tokens.sum())
    return 1 / per_token, constant


def _fit_positive(columns: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least-squares fit of columns @ x = seconds with every x >= 0."""
    size = columns.max(axis=0)
    units = np.where(size > 0, size, 1.0)
    scaled = columns / units
    best, least = np.zeros(len(units)), math.inf
    for choice in itertools.product((True, False), repeat=len(units)):
        kept, found = list(choice), np.zeros(len(units))  # the others are 0
        found[kept] = np.linalg.lstsq(scaled[:, kept], seconds, rcond=None)[0]
        error = float(np.square(scaled @ found - seconds).sum())
        if (found >= 0).all() and error < least:
            best, least = found / units, error
    return best


# -- decoding ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished sequence.  entered: the engine's position (decode steps so far) when the sequence began"""

    number: int
    entered: float
    length: int


@dataclass(slots=True)
class Decoding:
    """The continuous batch of one engine, advanced from event to event; in between, all sequences decode equally fast,
    and steps become longer as their contexts grow.

    ``position`` counts decode steps. A sequence that enters at position p with length n finishes at p + n. It has
    ``prompt_tokens`` more. ``slowdown`` is the factor of a decode step at ``now``.
    """

    timing: Timing
    prompt_tokens: float = 0.0
    slowdown: float = 1.0
    now: float = 0.0
    position: float = 0.0
    busy_seconds: float = 0.0
    is_paused: bool = False
    _entered: float = 0.0  # sum over the running sequences
    _running: list[tuple[float, int, float, int]] = field(default_factory=list)  # (finish, number, entered, length)
    _waiting: deque[tuple[int, int]] = field(default_factory=deque)

    def add(self, number: int, length: int) -> None:
        """Add a sequence of ``length`` tokens at ``now``; it runs if a slot is free, else it waits for one."""
        if len(self._running) < self.timing.capacity:
            heapq.heappush(self._running, (self.position + length, number, self.position, length))
            self._entered += self.position
        else:
            self._waiting.append((number, length))

    def next_finish(self) -> float:
        """Return when the next sequence ends if nothing is added; infinity if none runs or decoding is paused."""
        if not self._running or self.is_paused:
            return math.inf
        steps = max(0.0, self._running[0][0] - self.position)
        first, growth = self._step()
        return self.now + steps * (first + growth * steps / 2)

    def advance(self, now: float) -> list[Finished]:
        """Decode until ``now``; return what has ended, in order. A slot that becomes free is filled at that moment."""
        ended: list[Finished] = []
        while (finish := self.next_finish()) <= now:
            self.busy_seconds += finish - self.now
            self.now, self.position = finish, max(self.position, self._running[0][0])
            _, number, entered, length = heapq.heappop(self._running)
            self._entered -= entered
            ended.append(Finished(number, entered, length))
            if self._waiting:
                self.add(*self._waiting.popleft())
        if self._running:
            self.busy_seconds += now - self.now
            if not self.is_paused:
                self.position += self._steps_in(now - self.now)
        self.now = now
        return ended

    def _step(self) -> tuple[float, float]:
        """Return the seconds of the next decode step, and by how much each one is longer than the one before."""
        running = len(self._running)
        context = running * (self.prompt_tokens + self.position) - self._entered
        first = self.slowdown * self.timing.decode_step(running, context)
        return first, self.slowdown * self.timing.seconds_per_context * running

    def _steps_in(self, seconds: float) -> float:
        """Return how many decode steps take ``seconds``: steps x first + steps^2 x growth / 2 = seconds, solved."""
        first, growth = self._step()
        return 2 * seconds / (first + math.sqrt(first * first + 2 * growth * seconds))

    def places(self) -> Iterator[tuple[int, float | None]]:
        """Yield each unfinished sequence with the position at which it began; None if it waits for a slot."""
        yield from ((number, entered) for _, number, entered, _ in self._running)
        yield from ((number, None) for number, _ in self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._waiting)


def version_spans(
    changes: Sequence[tuple[float, tuple[int, int]]], *, entered: float, length: int
) -> tuple[VersionSpan, ...]:
    """Return the version of each token. ``changes``: (position, version), rising, the first before ``entered``."""
    first = bisect_right(changes, entered, key=lambda change: change[0]) - 1
    starts: dict[int, tuple[int, int]] = {}
    for position, version in itertools.islice(changes, first, None):
        start = max(0, math.ceil(position - entered))
        if start >= length:
            break
        starts[start] = version
    return tuple(VersionSpan(start=s, incarnation=v[0], policy_version=v[1]) for s, v in starts.items())


# -- the loop ----------------------------------------------------------------------------------------------------------

_ENDLESS: Final = 10**9
"""Number of groups; a run that runs out of groups in its last steps is not in a steady state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run to simulate: ``steps`` optimizer steps, of which the first ``warmup`` are not counted.

    workers           engines
    beside            of these, engines on the learner's GPUs
    learner_machines  training copies of the model
    prompt_tokens     prompt tokens per answer, which are trained with it
    eviction          async only: with "wait", a full batch waits for groups that would become too old
    opens             staleness.admission
    discard           staleness.discard; every answer is one trajectory here, so "trajectories" equals "groups"
    kept              share of the groups that pass the filters
    """

    mode: Mode
    workers: int
    learner_machines: int
    groups_per_batch: int
    group_size: int
    max_staleness: int
    steps: int
    warmup: int
    seed: int
    prompt_tokens: float = 16
    eviction: Literal["", "wait", "drop"] = ""
    discard: Discard = "groups"
    opens: Literal["needed", "full"] = "needed"
    kept: float = 1.0
    beside: int = 0

    @property
    def bound(self) -> int:
        return {"sync": 0, "one_step_off": 1, "async": self.max_staleness}[self.mode]

    @property
    def slots(self) -> int:
        """Groups per worker: the window, shared evenly."""
        return -(-(self.bound + 1) * self.groups_per_batch // self.workers)

    @property
    def admission(self) -> Admission:
        return Admission(
            mode=self.mode,
            groups_per_batch=self.groups_per_batch,
            max_staleness=self.bound,
            total_groups=_ENDLESS,
        )

    @property
    def window(self) -> NeededWindow | None:
        """None: always full."""
        count = self.groups_per_batch
        if self.mode != "async" or self.opens == "full":
            return None
        return NeededWindow(groups_per_batch=count, largest=count * (self.bound + 1))


GroupLengths = Callable[[int], list[int]]
"""Maps a group id to the lengths of its answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Results of the steps after the warm-up.

    tokens_per_second  trained response tokens per second
    learner_busy       share of the time in which the learner trained
    engines_busy       share of the time in which an engine had work, mean over engines
    """

    tokens_per_second: float
    learner_busy: float
    engines_busy: float


@dataclass(slots=True)
class _Engine:
    """``changes``: (position, version), as in version_spans."""

    decoding: Decoding
    version: int = 0
    changes: list[tuple[float, tuple[int, int]]] = field(default_factory=lambda: [(-1.0, (0, 0))])
    loading_until: float = math.inf
    groups: int = 0
    next_event: float = math.inf


@dataclass(slots=True)
class _Group:
    """version: oldest version that sampled a token of the finished answers;  sampled: tokens by version"""

    version: int
    missing: int
    tokens: int
    sampled: Counter[int] = field(default_factory=Counter)

    def trained(self, oldest: int) -> int:
        """Return the number of tokens sampled by version ``oldest`` or newer ones."""
        return sum(count for version, count in self.sampled.items() if version >= oldest)


@dataclass(slots=True)
class Ideal:
    """The state of one simulated run; ``run`` simulates it."""

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
    training_seconds: float = 0.0
    trained_seconds: float = 0.0
    has_changed: bool = True
    has_held: bool = False
    window: NeededWindow | None = None
    engines: list[_Engine] = field(default_factory=list)
    queue: deque[tuple[int, int]] = field(default_factory=deque)  # (group id, min policy version)
    starts: dict[int, int] = field(default_factory=dict)  # group id -> version that admitted it, until it arrives
    groups: dict[int, _Group] = field(default_factory=dict)
    buffer: dict[int, _Group] = field(default_factory=dict)

    def tokens_per_second(self) -> float:
        return self.run().tokens_per_second

    def run(self) -> Reached:
        self.window = self.plan.window
        own, beside = self.plan.workers - self.plan.beside, self.plan.beside
        timings = [*itertools.repeat(self.timing.beside, beside), *itertools.repeat(self.timing, own)]
        self.engines = [_Engine(Decoding(timing, prompt_tokens=self.plan.prompt_tokens)) for timing in timings]
        tokens, since, trained_before, busy_before = 0, 0.0, 0.0, 0.0
        self._move()
        while self.steps_done < self.plan.steps:
            self._to_next_event()
            if self.train_end <= self.now:
                tokens += self.training
                self._end_step()
                if self.steps_done == self.plan.warmup:
                    tokens, since = 0, self.now
                    trained_before, busy_before = self.trained_seconds, self._busy_seconds()
            if self.has_changed:
                self._move()
        elapsed = self.now - since
        return Reached(
            tokens_per_second=tokens / elapsed,
            learner_busy=(self.trained_seconds - trained_before) / elapsed,
            engines_busy=(self._busy_seconds() - busy_before) / elapsed / len(self.engines),
        )

    def _busy_seconds(self) -> float:
        return sum(engine.decoding.busy_seconds for engine in self.engines)

    def _to_next_event(self) -> None:
        self.now = min(self.train_end, *(engine.next_event for engine in self.engines))
        assert self.now < math.inf, "nothing will ever happen"
        for engine in self.engines:
            if engine.next_event > self.now:
                continue
            self._advance(engine)
            if engine.loading_until <= self.now:
                engine.loading_until, engine.decoding.is_paused = math.inf, False
                engine.changes.append((engine.decoding.position, (0, engine.version)))
            self._foresee(engine)

    def _advance(self, engine: _Engine) -> None:
        """Decode until now. By rounding, a sequence may end here whose event was to come."""
        for ended in engine.decoding.advance(self.now):
            self._end_sequence(engine, ended)

    def _foresee(self, engine: _Engine) -> None:
        """Compute the engine's next event. Engines are skipped between their events, because fleets are large."""
        engine.next_event = min(engine.decoding.next_finish(), engine.loading_until)

    def _end_sequence(self, engine: _Engine, ended: Finished) -> None:
        group_id = ended.number // self.plan.group_size
        group = self.groups[group_id]
        spans = version_spans(engine.changes, entered=ended.entered, length=ended.length)
        for span, end in zip(spans, [*(span.start for span in spans[1:]), ended.length], strict=True):
            group.sampled[span.policy_version] += end - span.start
        group.version = min(group.version, spans[0].policy_version)
        group.missing -= 1
        if not group.missing:
            engine.groups -= 1
            del self.groups[group_id], self.starts[group_id]
            if self.plan.kept == 1 or random.Random(group_id).random() < self.plan.kept:
                self.buffer[group_id] = group
            else:
                self.lost += 1
            self.has_changed = True

    def _end_step(self) -> None:
        self.train_end = math.inf
        self._slow_down(1.0)
        self.trained_seconds += self.training_seconds
        self.steps_done += 1
        if self.window is not None:
            self.window.observe(finished=len(self.buffer), unfinished=len(self.starts), waited=self.has_held)
        self.has_held = False
        self.has_changed = True
        if self.plan.mode == "async":
            for engine in self.engines:
                self._load(engine)

    def _slow_down(self, factor: float) -> None:
        """Change the speed of the engines on the learner's GPUs, from now on."""
        for engine in self.engines[: self.plan.beside]:
            self._advance(engine)
            engine.decoding.slowdown = factor
            self._foresee(engine)

    def _load(self, engine: _Engine) -> None:
        self._advance(engine)  # with the previous weights
        engine.version = self.steps_done
        engine.decoding.is_paused, engine.loading_until = True, self.now + self.timing.load_seconds
        self._foresee(engine)

    def _move(self) -> None:
        """Do everything that takes no time: take a batch, admit prompts, hand them to workers."""
        self.has_changed = False
        limit, by_token = self.steps_done - self.plan.bound, self.plan.discard == "tokens"
        stale = [i for i, one in self.buffer.items() if (max(one.sampled) if by_token else one.version) < limit]
        for group_id in stale:
            del self.buffer[group_id]
        self.lost += len(stale)
        if self.train_end == math.inf and len(self.buffer) >= self.plan.groups_per_batch and not self._holds():
            oldest = sorted(self.buffer, key=lambda i: (self.buffer[i].version, i))[: self.plan.groups_per_batch]
            batch = [self.buffer.pop(group_id) for group_id in oldest]
            self.training = sum(group.trained(limit) if by_token else group.tokens for group in batch)
            prompts = round(self.plan.prompt_tokens * self.plan.group_size * self.plan.groups_per_batch)
            packed = sum(group.tokens for group in batch) + prompts
            self.training_seconds = self.timing.train_step(packed, machines=self.plan.learner_machines)
            if self.plan.beside:
                self.training_seconds *= self.timing.train_beside
                self._slow_down(self.timing.decode_beside)
            self.train_end = self.now + self.training_seconds
            self.batches_taken += 1
        self._admit()
        while self.queue and self._place(*self.queue[0]):
            self.queue.popleft()

    def _holds(self) -> bool:
        """Return whether a full batch waits for groups that would become too old."""
        if self.plan.eviction != "wait" or self.plan.mode != "async":
            return False
        rule, count = Selection(max_staleness=self.plan.bound), self.plan.groups_per_batch
        if not rule.late_starts(self.steps_done, self.starts.values(), count=count):
            return False
        begun = self._begun()
        late = rule.late_starts(self.steps_done, [begun.get(i, start) for i, start in self.starts.items()], count=count)
        self.has_held |= bool(late)
        return bool(late)

    def _begun(self) -> dict[int, int]:
        """Return group id -> oldest version that has sampled it, or may, for groups on an engine."""
        begun: dict[int, int] = {}
        for engine in self.engines:
            for number, entered in engine.decoding.places():
                group_id = number // self.plan.group_size
                version = engine.version
                if entered is not None:
                    version = version_spans(engine.changes, entered=entered, length=1)[0].policy_version
                begun[group_id] = min(version, begun.get(group_id, self.groups[group_id].version))
        return begun

    def _admit(self) -> None:
        count = self.plan.admission.may_publish(
            published=self.published,
            lost=self.lost,
            batches_taken=self.batches_taken,
            steps_done=self.steps_done,
            window=None if self.window is None else self.window.size,
        )
        for group_id in range(self.published, self.published + count):
            self.queue.append((group_id, self.steps_done))
            self.starts[group_id] = self.steps_done
        self.published += count

    def _place(self, group_id: int, min_version: int) -> bool:
        """Put the group on the worker with the fewest groups; a worker that must load weights first must be idle."""
        freest = min(self.engines, key=lambda engine: engine.groups)
        is_ready = freest.version >= min_version or not freest.groups
        for engine in (freest,) if is_ready else sorted(self.engines, key=lambda engine: engine.groups):
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
        self._advance(engine)
        for index, length in enumerate(lengths):
            engine.decoding.add(group_id * size + index, length)
        self._foresee(engine)
