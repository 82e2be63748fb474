"""One engine shared by all stages of a worker: its slots, its weights, and how busy it is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.rollout.slots import SampleSlots
from asyncrl.actors.rollout.weight_follower import WeightFollower
from asyncrl.actors.wait_tracker import EngineLiveness, WaitTracker
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.engines.port import Engine
from asyncrl.messages import SamplingParams, Wait
from asyncrl.policies.health.waits import BEAT_SECONDS


class SharedEngine:
    """The engine of one worker.

    slots           limits samples in progress over all stages that share them
    waits           wait tracker of the worker and its stages: one list for the process
    context_tokens  context length of its model in tokens: limit of a trajectory with its prompt
    request_tokens  tokens that a prompt and its answer may have together in a generation: at most context_tokens
    """

    def __init__(
        self,
        engine: Engine,
        *,
        follower: WeightFollower,
        max_running: int,
        context_tokens: int = 2**31,
        request_tokens: int = 2**31,
    ) -> None:
        self.engine = engine
        self.follower = follower
        self.gate = follower.gate
        self.context_tokens = context_tokens
        self.request_tokens = min(request_tokens, context_tokens)
        self.slots = SampleSlots(max_running)
        self.waits = WaitTracker()
        self._activity = Activity()
        self._liveness = EngineLiveness()

    @property
    def version(self) -> tuple[int, int]:
        """(incarnation, policy_version) of the current weights."""
        return self.engine.version

    async def sample(
        self, tokens: NDArray[np.int32], sampling: SamplingParams, *, seed: int, partial: PartialGeneration | None
    ) -> Generation:
        """Call Engine.generate and count its tokens. ``partial`` None: no tokens are known, and none are followed."""
        num_known = 0 if partial is None else len(partial.prefix.tokens)
        with self._activity.running(), self._liveness.expect():
            generation = await self.engine.generate(tokens, sampling, seed=seed, partial=partial)
        self._activity.tokens += max(0, len(generation.tokens) - num_known)
        return generation

    def present_waits(self, *, is_loading: bool) -> tuple[Wait, ...]:
        """Return the wait for the engine's next token, if one is due."""
        stats = self.engine.stats()
        return self._liveness.waits(stats, is_loading=is_loading or stats.is_away)

    def numbers(self) -> dict[str, float]:
        """Return gauges of the last seconds."""
        stats = self.engine.stats()
        tokens_per_second, idle_ratio = self._activity.rates()
        return {
            "rollout/tokens_per_second": tokens_per_second,
            "rollout/idle_ratio": idle_ratio,
            "rollout/running": stats.running,
            "rollout/queued": stats.queued,
        }


class Activity:
    """Measures how busy an engine was in the last window of at least ``window_seconds``."""

    def __init__(self, *, window_seconds: float = BEAT_SECONDS / 2, now: Callable[[], float] = time.monotonic) -> None:
        self._window_seconds = window_seconds
        self._now = now
        self._rates = (0.0, 1.0)
        self.tokens = 0
        self._read_tokens = 0
        self._read_at = now()
        self._running = 0
        self._busy_since = 0.0
        self._busy = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While open, the engine is busy."""
        if self._running == 0:
            self._busy_since = self._now()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._busy += self._now() - self._busy_since

    def rates(self) -> tuple[float, float]:
        """Return (tokens per second, share of time with nothing running) of the last window.

        Heartbeats and scrapes of Prometheus both read it. Neither must cut the other's window short.
        """
        now = self._now()
        elapsed = now - self._read_at
        if elapsed < self._window_seconds:
            return self._rates
        busy = self._busy
        if self._running:
            busy += now - self._busy_since
            self._busy_since = now
        tokens = self.tokens - self._read_tokens
        self._busy = 0.0
        self._read_at = now
        self._read_tokens = self.tokens
        self._rates = tokens / elapsed, min(1.0, max(0.0, 1.0 - busy / elapsed))
        return self._rates
