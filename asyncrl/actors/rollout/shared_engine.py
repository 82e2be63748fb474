"""One engine shared by all stages of a worker: its slots, its weights, and how busy it is."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.activity import Activity
from asyncrl.actors.rollout.slots import SampleSlots
from asyncrl.actors.rollout.weight_follower import WeightFollower
from asyncrl.actors.wait_tracker import EngineLiveness, WaitTracker
from asyncrl.engines.generation import Generation, PartialGeneration, RequestReport
from asyncrl.engines.port import Engine
from asyncrl.images.store import ImageFile
from asyncrl.messages import SamplingParams, Wait

LAST_REQUESTS: Final = 256
"""Requests over which their times are averaged."""


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
        self._activity = Activity(num_sampled=self._num_sampled)
        self._liveness = EngineLiveness()
        self._tokens_answered = 0
        self._requests: deque[tuple[float, int, RequestReport]] = deque(maxlen=LAST_REQUESTS)
        """Of the last requests: seconds, prompt tokens, and what the engine says of them."""

    @property
    def version(self) -> tuple[int, int]:
        """(incarnation, policy_version) of the current weights."""
        return self.engine.version

    async def sample(
        self,
        tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None,
        images: Sequence[ImageFile] = (),
    ) -> Generation:
        """Call Engine.generate and count its tokens. ``partial`` None: no tokens are known, and none are followed."""
        num_known = 0 if partial is None else len(partial.prefix.tokens)
        began = time.monotonic()
        with self._activity.running(), self._liveness.expect():
            shown = {"images": images} if images else {}  # an engine of text need not know them
            generation = await self.engine.generate(tokens, sampling, seed=seed, partial=partial, **shown)
        self._requests.append((time.monotonic() - began, len(tokens), generation.report))
        self._tokens_answered += max(0, len(generation.tokens) - num_known)
        return generation

    def _num_sampled(self) -> int:
        """Return the number of tokens sampled so far: those of answers in progress too, if the engine counts them."""
        stats = self.engine.stats()
        return stats.tokens_generated if stats.is_live else self._tokens_answered

    def present_waits(self, *, is_loading: bool) -> tuple[Wait, ...]:
        """Return the wait for the engine's next token, if one is due."""
        stats = self.engine.stats()
        return self._liveness.waits(stats, is_loading=is_loading or stats.is_away)

    def numbers(self) -> dict[str, float]:
        """Return gauges of the last seconds, and counters from which a reader gets rates of any time."""
        stats = self.engine.stats()
        tokens_per_second, idle_ratio = self._activity.rates()
        return {
            **self._activity.counters(),
            "rollout/tokens_per_second": tokens_per_second,
            "rollout/idle_ratio": idle_ratio,
            "rollout/running": stats.running,
            "rollout/queued": stats.queued,
            **request_numbers(self._requests),
        }


def request_numbers(requests: Collection[tuple[float, int, RequestReport]]) -> dict[str, float]:
    """Return the gauges of an engine's last requests: (seconds, prompt tokens, report) each."""
    if not requests:
        return {}
    seconds, prompt, reports = zip(*requests, strict=True)
    queued = [one.queue_seconds for one in reports if one.queue_seconds is not None]
    until_first = [one.first_token_seconds for one in reports if one.first_token_seconds is not None]
    drafted = sum(one.drafted_tokens for one in reports)
    return {
        "rollout/request_seconds": sum(seconds) / len(seconds),
        "rollout/longest_request_seconds": max(seconds),
        "rollout/cached_prompt_ratio": sum(one.cached_tokens for one in reports) / max(1, sum(prompt)),
        **({"rollout/queue_seconds": sum(queued) / len(queued)} if queued else {}),
        **({"rollout/first_token_seconds": sum(until_first) / len(until_first)} if until_first else {}),
        **({"rollout/draft_acceptance": sum(one.accepted_tokens for one in reports) / drafted} if drafted else {}),
    }
