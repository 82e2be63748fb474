"""A generation session: the engine calls of one sample.

A rollout function receives a session and calls it once per turn. The session decides what each call samples from: its
seed, its token budget, weights that are new enough, and saved tokens of an earlier attempt on another worker. Other
users of the engine (an evaluation, an endpoint that an agent talks to) open sessions in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.rollout.load_gate import VersionNeed
from asyncrl.actors.rollout.partial_rollouts import GroupProgress, Key
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.worker_images import SampleImages
from asyncrl.actors.wait_tracker import OpenWait
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.errors import PromptError
from asyncrl.messages import SamplingParams
from asyncrl.messages.control import ServerAddress
from asyncrl.messages.images import ImageRef
from asyncrl.messages.user_copies import read_only

_WAITS = {"rollout": "its rollout function", "harness": "its harness"}
SeedOfCall = Callable[[int], int]
"""Returns the seed of call 0, 1, 2, ...; larger numbers are calls that continue the same tokens as an earlier call."""


class GenerationSession:
    """One sample's ``Generate`` (environments/port.py)."""

    def __init__(
        self,
        engine: SharedEngine,
        *,
        sampling: SamplingParams,
        need: VersionNeed,
        seed: SeedOfCall,
        index: int = 0,
        progress: GroupProgress | None = None,
        own_seconds: float = 0.0,
        servers: Mapping[str, ServerAddress] = MappingProxyType({}),
        images: SampleImages | None = None,
    ) -> None:
        """
        need          the weights that a call may start on
        index         index of the sample in its group
        progress      progress of the group; None: nothing of it was or will be saved
        own_seconds   time limit of the rollout function outside its calls of this session; 0: no limit
        servers       the servers of [servers]
        images        images of the prompt and of its environment; None: nothing shows any
        """
        self._engine = engine
        self.servers = servers
        self.images = images
        self._sampling = sampling
        self._need = need
        self._seed = seed
        self._index = index
        self._progress = progress
        self._user_wait: OpenWait | None = None
        self._own_time = OwnTime(own_seconds)
        self.num_calls = 0
        self.num_tokens = 0
        """Tokens sampled in all calls, including tokens of earlier attempts."""
        self.first_version: int | None = None
        """Policy version of the first token, sampled or about to be; None: sampling has not begun."""

    @property
    def context_tokens(self) -> int:
        return min(self._sampling.max_context_tokens or self._engine.request_tokens, self._engine.request_tokens)

    @property
    def attempt(self) -> int:
        return 1 if self._progress is None else self._progress.num_tried

    @property
    def num_resumed(self) -> int:
        """How many of the first tokens were sampled by earlier attempts at the group."""
        return 0 if self._progress is None else self._progress.num_resumed(self._index)

    async def __call__(
        self,
        tokens: NDArray[np.int32],
        *,
        max_new_tokens: int | None = None,
        images: Sequence[ImageRef] | None = None,
    ) -> Generation:
        """See Generate. Raises EngineError, PromptError or EngineDied."""
        shown = () if self.images is None else self.images.shown(images, tokens=tokens)
        call, self.num_calls = self.num_calls, self.num_calls + 1
        sampling = self._sampling_after(len(tokens), max_new_tokens)
        if self._progress is None:
            generation = await self._sample(call, tokens, sampling, partial=None, images=shown)
        else:
            key, partial = self._progress.begin(self._index, tokens, sampling, images=shown)
            number = call if not key[2] else _repeat(key)
            generation = await self._resume(
                number, tokens, sampling, key=key, partial=partial, progress=self._progress, images=shown
            )
        self.num_tokens += len(generation.tokens)
        return replace(generation, tokens=read_only(generation.tokens), logprobs=read_only(generation.logprobs))

    def _sampling_after(self, num_tokens: int, max_new_tokens: int | None) -> SamplingParams:
        """Return how a call samples after ``num_tokens`` of context. Raises PromptError if these leave no token."""
        sampling = self._sampling if max_new_tokens is None else self._sampling.at_most(max_new_tokens)
        if not sampling.max_context_tokens:
            return sampling
        left = self.context_tokens - num_tokens
        if left < 1:
            raise PromptError(
                f"the context has {num_tokens} tokens, and max_context_tokens = {self.context_tokens} leaves none to "
                "answer with"
            )
        return sampling if left >= sampling.max_new_tokens else sampling.at_most(left)

    async def _resume(
        self,
        call: int,
        tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        key: Key,
        partial: PartialGeneration,
        progress: GroupProgress,
        images: Sequence[ImageRef],
    ) -> Generation:
        """Return this call's tokens of an earlier attempt, completed by the engine if they are not complete."""
        known = partial.prefix
        if known.version_spans:
            self._begin_at(min(span.policy_version for span in known.version_spans))
        if known.finish_reason:
            return known
        generation = await self._sample(
            call, tokens, sampling, partial=partial if progress.is_saved else None, images=images
        )
        progress.finish(key, partial, generation)
        return generation

    async def _sample(
        self,
        call: int,
        tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        partial: PartialGeneration | None,
        images: Sequence[ImageRef],
    ) -> Generation:
        files = await self.images.files(images) if self.images is not None and images else ()
        with self._own_time.pause(), self._pause_user_wait():
            async with self._engine.gate.sampling(self._need, waits=self._engine.waits):
                self._begin_at(self._engine.version[1])
                return await self._engine.sample(tokens, sampling, seed=self._seed(call), partial=partial, images=files)

    def _begin_at(self, policy_version: int) -> None:
        if self.first_version is None:
            self.first_version = policy_version
            if self._progress is not None:
                self._progress.note_version(policy_version)

    @contextlib.asynccontextmanager
    async def waiting(self, *, on: str = "rollout") -> AsyncIterator[None]:
        """While open, the worker waits for the rollout function, except while that waits for one of our answers.

        on: the part of a worker that is waited for (policies/health/waits.py); a rollout function that limits its
        samples' time itself is no reason to restart the worker.
        Raises TimeoutError, with ``is_out_of_time`` True, once the function has taken ``own_seconds``.
        """
        with self._engine.waits.waiting(_WAITS[on], on=on) as self._user_wait:
            async with self._own_time.limit():
                yield

    @property
    def is_out_of_time(self) -> bool:
        return self._own_time.is_over

    def _pause_user_wait(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._user_wait is None else self._engine.waits.pause(self._user_wait)


def _repeat(key: Key) -> int:
    """Return a number for a call that continues tokens again, to use instead of its index. If an earlier attempt called
    in another order, it may have used the index's seed with the same tokens."""
    _, digest, occurrence = key
    return int.from_bytes(digest[:8]) + (occurrence << 64)


def sample_seed(run_seed: int, group_id: int, index: int, call: int) -> int:
    """Return a 63-bit seed for one generation, the same on every worker and attempt."""
    return int(np.random.SeedSequence([run_seed, group_id, index, call]).generate_state(1, np.uint64)[0] >> 1)


class OwnTime:
    """A clock for one sample that pauses while its rollout function waits for one of our answers.

    Time in tools, environments and judges counts; a busy engine or a load of weights does not.
    """

    def __init__(self, seconds: float) -> None:
        """seconds: time limit; 0 for none"""
        self._seconds = seconds
        self._timeout: asyncio.Timeout | None = None
        self._left = seconds
        self._pauses = 0
        self._is_over = False

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Run the clock while open. Raises TimeoutError once it exceeds the limit."""
        if not self._seconds:
            yield
            return
        try:
            async with asyncio.timeout(self._seconds) as self._timeout:
                yield
        finally:
            self._is_over = self._timeout is not None and self._timeout.expired()
            self._timeout = None  # a call left running by its function is not timed

    @property
    def is_over(self) -> bool:
        """Whether this limit ended the sample."""
        return self._is_over

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Pause the clock while open; calls may overlap."""
        timeout, loop = self._timeout, asyncio.get_running_loop()
        if timeout is None:
            yield
            return
        self._pauses += 1
        if (end := timeout.when()) is not None:
            self._left = max(0.0, end - loop.time())
            timeout.reschedule(None)
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses and timeout is self._timeout and not timeout.expired():
                timeout.reschedule(loop.time() + self._left)
