"""An engine that runs a Hugging Face model in this process: for tests, demos, and models that no server supports.

One thread, ``engine-decode``, owns the decoder and the waiting requests. It takes commands from a queue: generate, load
weights, cancel, close. When idle, it blocks on the queue; otherwise it polls the queue between two tokens. Results
return to the event loop in one call per token. The thread ``engine-read`` reads weight files, so decoding pauses only
while weights are copied.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.config.adapter import RunConfig
from asyncrl.engines.adapter import EngineAdapter
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.engines.inprocess.decoder import Decoder, RunningSequence
from asyncrl.engines.inprocess.incoming_weights import read_weights, taken
from asyncrl.engines.port import EngineStats
from asyncrl.engines.stopping import StopReader
from asyncrl.engines.validation import check_prompt, check_sampling, check_stop_tokens
from asyncrl.engines.version_spans import Version
from asyncrl.errors import ConfigError, EngineDied, EngineError
from asyncrl.messages import SamplingParams, WeightVersion
from asyncrl.messages.routing import NO_EXPERTS, ExpertArray, unrouted_rows
from asyncrl.weights.port import LoadReport, Source

log = logging.getLogger(__name__)

T = TypeVar("T")

_PASSED_OVER_STEPS = 4
"""Prefills are batched. After this many decode steps even a single waiting request is prefilled."""
_MOST_THREADS = 4096
"""Upper limit of ``threads``; no machine has this many CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    max_batch_size: int = 64
    """Sequences decoded at once. With 1 the same seed and weights give the same tokens, bit for bit."""
    max_prefill_tokens: int = 8192
    """Prompt tokens prefilled in one pass, padding included; always at least one prompt."""
    threads: int = 0
    """CPU threads of the model; 0 uses torch's default. 1 is fastest for tiny models."""

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 0 <= self.threads <= _MOST_THREADS:
            raise ConfigError(f"threads must be in 0..{_MOST_THREADS}, got {self.threads}")


@dataclass(slots=True, eq=False)
class _Request:
    answer: RunningSequence
    future: asyncio.Future[Generation]
    passed_over: int = 0

    def __len__(self) -> int:
        return len(self.answer.logprobs)

    def so_far(self, begin: int = 0) -> Generation:
        """Return the answer from token ``begin`` on. The decode thread may be appending: tokens without logprobs
        do not count yet."""
        answer, end = self.answer, len(self)
        return Generation(
            tokens=np.array(answer.tokens[begin:end], dtype=np.int32),
            logprobs=np.array(answer.logprobs[begin:end], dtype=np.float32),
            version_spans=answer.spans.spans(end, begin=begin),
            finish_reason=answer.finish_reason,
            experts=_experts(answer, begin, end),
        )


def _experts(answer: RunningSequence, begin: int, end: int) -> ExpertArray:
    """Return the experts of tokens ``begin`` - 1 to ``end`` - 1; with ``begin`` = 0, of the prompt and the answer.

    The last token is marked unrouted, because the model has not processed it yet.
    """
    if begin >= end or not answer.experts:
        return NO_EXPERTS
    routed = answer.experts[begin:end]
    return np.concatenate([*routed, unrouted_rows(1, like=routed[0])])


@dataclass(slots=True, eq=False)
class _Cancel:
    request: _Request


@dataclass(slots=True, eq=False)
class _Load:
    tensors: Mapping[str, torch.Tensor]
    version: Version
    future: asyncio.Future[float]


@dataclass(slots=True, eq=False)
class _Close:
    pass


class InProcessEngine(EngineAdapter):
    """See Engine and Intake in the ports."""

    options_type = Options
    shares_gpus = True
    num_ranks = 1
    collectives = None

    @classmethod
    def tells_experts(cls, run: RunConfig) -> bool:
        return True

    def __init__(
        self,
        model_path: Path,
        *,
        device: str,
        dtype: str,
        version: Version,
        options: Options,
        tells_experts: bool = False,
    ) -> None:
        self._model_path = model_path
        self._device = device
        self._dtype = dtype
        self._first_version = version
        self._options = options
        self._tells_experts = tells_experts
        self._decoder: Decoder | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="engine-read")
        self._stops = StopReader(model_path, self._reader)
        self._loading = asyncio.Lock()
        self._orders: queue.SimpleQueue[_Request | _Cancel | _Load | _Close] = queue.SimpleQueue()
        self._end: BaseException | None = None
        self._tokens_generated = 0
        # Owned by the decode thread. Other threads only read lengths.
        self._waiting: deque[_Request] = deque()
        self._loads: deque[_Load] = deque()
        self._running: dict[RunningSequence, _Request] = {}

    async def start(self) -> None:
        """Load the model. Raises ConfigError."""
        self._loop = asyncio.get_running_loop()
        self._decoder = await self._loop.run_in_executor(self._reader, self._read_model)
        self._thread = threading.Thread(target=self._decode, name="engine-decode", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt_tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        decoder = self._alive()
        check_sampling(sampling)
        partial = PartialGeneration() if partial is None else partial
        uniforms = np.random.default_rng(seed % 2**64).random(sampling.max_new_tokens)[partial.num_tokens :].tolist()
        stop = await self._stops.strings(sampling)
        watch = None if stop is None else stop.watch(partial.prefix.tokens.tolist())
        prompt_tokens, sampling = partial.prefix.left_of(prompt_tokens, sampling)
        check_prompt(
            prompt_tokens,
            max_new_tokens=sampling.max_new_tokens,
            vocabulary_size=decoder.vocabulary_size,
            context_tokens=decoder.context_tokens,
        )
        check_stop_tokens(sampling, vocabulary_size=decoder.vocabulary_size)
        answer = RunningSequence(
            prompt=np.ascontiguousarray(prompt_tokens, dtype=np.int32),
            sampling=sampling,
            uniforms=uniforms,
            stop=watch,
        )
        request = _Request(answer, asyncio.get_running_loop().create_future())
        partial.follow(request)
        self._orders.put(request)
        try:
            self._alive()  # if the decode thread has exited, nothing will answer the request
            return partial.prefix.then(await request.future)
        finally:
            if not request.future.done() or request.future.cancelled():
                request.future.cancel()
                self._orders.put(_Cancel(request))

    async def release(self) -> None:
        memory = self._alive().memory
        await asyncio.get_running_loop().run_in_executor(self._reader, memory.leave)

    async def resume(self) -> None:
        memory = self._alive().memory
        await asyncio.get_running_loop().run_in_executor(self._reader, memory.come_back)

    async def load(self, weights: WeightVersion) -> LoadReport:
        decoder = self._alive()
        return await self._switch(weights.order, lambda: read_weights(weights, decoder))

    async def take(self, version: Version, source: Source, payload: bytes) -> LoadReport:
        """See Intake. If ``source`` raises, the old weights stay."""
        decoder = self._alive()
        return await self._switch(version, lambda: taken(source, payload, decoder))

    async def _switch(self, version: Version, read: Callable[[], Mapping[str, torch.Tensor]]) -> LoadReport:
        asked = time.monotonic()
        async with self._loading:
            loop = asyncio.get_running_loop()
            tensors = await loop.run_in_executor(self._reader, read)
            order = _Load(tensors, version, loop.create_future())
            self._orders.put(order)
            try:
                self._alive()
                pause_seconds = await order.future
            finally:
                order.future.cancel()
        return LoadReport(pause_seconds=pause_seconds, load_seconds=time.monotonic() - asked)

    @property
    def version(self) -> Version:
        return self._decoder.version if self._decoder else self._first_version

    @property
    def intake(self) -> InProcessEngine:
        return self

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            queued=len(self._waiting) + self._orders.qsize(),
            tokens_generated=self._tokens_generated,
            is_live=True,
        )

    async def close(self) -> None:
        self._orders.put(_Close())
        thread, self._thread = self._thread, None
        if thread:
            await asyncio.get_running_loop().run_in_executor(self._reader, thread.join)
        self._stops.close()
        self._reader.shutdown(wait=False)

    def _alive(self) -> Decoder:
        if self._end is not None:
            raise EngineDied(str(self._end)) from self._end
        if self._decoder is None:
            raise EngineDied("the in-process engine is not running: start() it first")
        return self._decoder

    # -- threads -------------------------------------------------------------------------------------------------------

    def _read_model(self) -> Decoder:
        return Decoder(
            self._model_path,
            device=self._device,
            dtype=self._dtype,
            version=self._first_version,
            tells_experts=self._tells_experts,
        )

    def _decode(self) -> None:
        """Run the decode thread. However it ends, it settles all waiting requests."""
        assert self._decoder is not None
        end = EngineDied("the in-process engine was closed")
        try:
            if self._options.threads:
                torch.set_num_threads(self._options.threads)
            while self._take_orders(self._decoder):
                self._swap(self._decoder)
                self._admit(self._decoder)
                self._step(self._decoder)
        except BaseException as error:
            log.exception("the decode thread died")
            end = EngineDied(f"the in-process engine died: {error!r}")
            end.__cause__ = error
        self._end = end  # set before the queue is emptied: later requests check it after they are queued
        while not self._orders.empty():
            self._sort(self._orders.get())
        failures = [_failure(request.future, end) for request in (*self._running.values(), *self._waiting)]
        self._tell([*failures, *(_failure(order.future, end) for order in self._loads)])

    def _take_orders(self, decoder: Decoder) -> bool:
        """Wait until there is work, then take all queued commands. Returns False when closed."""
        is_idle = not (self._running or self._waiting or self._loads)
        cancelled: set[RunningSequence] = set()
        while is_idle or not self._orders.empty():
            order = self._orders.get()
            is_idle = False
            if isinstance(order, _Close):
                return False
            if isinstance(order, _Cancel):
                cancelled.add(order.request.answer)
            self._sort(order)
        if cancelled:
            self._waiting = deque(request for request in self._waiting if request.answer not in cancelled)
            cancelled &= self._running.keys()
            decoder.remove(cancelled)
            for answer in cancelled:
                del self._running[answer]
        return True

    def _sort(self, order: _Request | _Cancel | _Load | _Close) -> None:
        if isinstance(order, _Request):
            self._waiting.append(order)
        elif isinstance(order, _Load):
            self._loads.append(order)

    def _swap(self, decoder: Decoder) -> None:
        """Apply queued weight loads."""
        while self._loads:
            order, began = self._loads[0], time.monotonic()
            if not order.future.done():  # not cancelled while it waited
                decoder.load(order.tensors, order.version)
                self._tell([_success(order.future, time.monotonic() - began)])
            self._loads.popleft()

    def _admit(self, decoder: Decoder) -> None:
        """Prefill the waiting requests that fit.

        Waits until they are a quarter of the running sequences, or the first was passed over often enough.
        """
        free, running = self._options.max_batch_size - len(self._running), len(self._running)
        if self._loads or not self._waiting or not free:
            return
        self._waiting[0].passed_over += 1
        if 4 * min(free, len(self._waiting)) < running and self._waiting[0].passed_over <= _PASSED_OVER_STEPS:
            return
        admitted: list[RunningSequence] = []
        longest = 0
        while self._waiting and len(admitted) < free:
            longest = max(longest, len(self._waiting[0].answer.prompt))
            if admitted and longest * (len(admitted) + 1) > self._options.max_prefill_tokens:
                break
            request = self._waiting.popleft()
            self._running[request.answer] = request
            admitted.append(request.answer)
        decoder.admit(admitted)
        self._tokens_generated += len(admitted)
        self._deliver(decoder)

    def _step(self, decoder: Decoder) -> None:
        if self._running:
            decoder.step()
            self._tokens_generated += len(self._running)
            self._deliver(decoder)

    def _deliver(self, decoder: Decoder) -> None:
        done = [answer for answer in self._running if answer.finish_reason]
        decoder.remove(set(done))
        self._tell([_result(self._running.pop(answer)) for answer in done])

    def _tell(self, deliveries: list[Callable[[], None]]) -> None:
        def deliver() -> None:
            for delivery in deliveries:
                delivery()

        assert self._loop is not None
        if deliveries and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(deliver)


def _result(request: _Request) -> Callable[[], None]:
    if not request.answer.is_finite:
        return _failure(request.future, EngineError("the model returned NaN logprobs: its weights are broken"))
    return _success(request.future, request.so_far())


def _success(future: asyncio.Future[T], result: T) -> Callable[[], None]:
    return lambda: None if future.done() else future.set_result(result)


def _failure(future: asyncio.Future[T], error: Exception) -> Callable[[], None]:
    return lambda: None if future.done() else future.set_exception(error)
