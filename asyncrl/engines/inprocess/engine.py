"""An engine that runs a Hugging Face model in this process: for tests, demos, and models that no server supports.

The event loop owns all requests. The task ``engine-decode`` runs one pass of the model after the other in the thread
``engine-decode``: the prefill of new requests, or tokens for every sequence. A load copies weights between two passes,
which the thread ``engine-read`` has read, so decoding pauses only for the copy.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray

from asyncrl.config.adapter import RunConfig
from asyncrl.config.checks import NonNegative, Positive
from asyncrl.engines.adapter import EngineAdapter
from asyncrl.engines.generation import Generation, PartialGeneration, RequestReport, Version
from asyncrl.engines.inprocess.decoder import Decoder, RunningSequence, check_attention
from asyncrl.engines.port import EngineStats
from asyncrl.engines.stopping import StopReader
from asyncrl.engines.validation import check_prompt, check_sampling, check_stop_tokens, check_weights
from asyncrl.errors import EngineDied, EngineError, ImageError, PromptError, WeightsError
from asyncrl.images.processor import ImageProcessor
from asyncrl.images.store import ImageFile
from asyncrl.messages import SamplingParams, WeightVersion
from asyncrl.messages.likeliest import join as join_likeliest
from asyncrl.messages.routing import NO_EXPERTS, ExpertArray, unrouted_rows
from asyncrl.messages.support import Support
from asyncrl.policies.batching.images import ImagePatches
from asyncrl.tensors import weight_files
from asyncrl.tensors.device import set_threads
from asyncrl.tensors.model_tensors import check_layout
from asyncrl.weights.port import LoadReport, Source

log = logging.getLogger(__name__)

_PATCH_BYTES = 2**28
"""Most bytes of patches that are kept. Those of one large photograph take 300 MB."""
_PREFILL_TOKENS = 8192
"""Prompt tokens prefilled in one pass, padding included; always at least one prompt."""
_PASSED_OVER_STEPS = 4
"""Prefills are batched. After this many decode steps even a single waiting request is prefilled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    max_batch_size: Positive[int] = 64
    """Sequences decoded at once. With 1 the same seed and weights give the same tokens, bit for bit."""
    threads: NonNegative[int] = 0
    """CPU threads of the model; 0: torch's default, at most a container's limit. 1 is fastest for tiny models."""


@dataclass(slots=True, eq=False)
class _Request:
    answer: RunningSequence
    future: asyncio.Future[Generation]
    asked: float
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
            support=Support.of(answer.support[begin:end]),
            likeliest=join_likeliest([(1, one) for one in answer.likeliest[begin:end]]),
            report=RequestReport(
                queue_seconds=answer.began and answer.began - self.asked,
                first_token_seconds=answer.first_sampled and answer.first_sampled - self.asked,
            ),
        )


def _experts(answer: RunningSequence, begin: int, end: int) -> ExpertArray:
    """Return the experts of tokens ``begin`` - 1 to ``end`` - 1; with ``begin`` = 0, of the prompt and the answer.

    The last token is marked unrouted, because the model has not processed it yet.
    """
    if begin >= end or not answer.experts:
        return NO_EXPERTS
    routed = answer.experts[begin:end]
    return np.concatenate([*routed, unrouted_rows(1, like=routed[0])])


class InProcessEngine(EngineAdapter):
    """See Engine and WeightUpdater in the ports."""

    options_type = Options
    reads_images = True
    num_ranks = 1

    @classmethod
    def check(cls, run: RunConfig) -> None:
        super().check(run)
        check_attention(Path(run.model.path))

    @classmethod
    def why_no_experts(cls, run: RunConfig) -> str:
        return ""

    def __init__(
        self,
        model_path: Path,
        *,
        device: str,
        dtype: str,
        version: Version,
        options: Options,
        reports_experts: bool = False,
        is_exact: bool = False,
    ) -> None:
        self._model_path = model_path
        self._device = device
        self._dtype = dtype
        self._first_version = version
        self._options = options
        self._reports_experts = reports_experts
        self._is_exact = is_exact
        self._decoder: Decoder | None = None
        self._processor: ImageProcessor | None = None
        self._patches: dict[str, NDArray[np.float32]] = {}
        """Of the last images; the samples of a group show the same."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="engine-read")
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="engine-decode", initializer=set_threads, initargs=(options.threads,)
        )
        self._task: asyncio.Task[None] | None = None
        self._stops = StopReader(model_path, self._reader)
        self._loading = asyncio.Lock()
        self._has_news = asyncio.Event()
        """Set when a request or a cancel comes, so that the pass in progress ends after its token."""
        self._end: Exception | None = None
        self._waiting: deque[_Request] = deque()
        self._running: dict[RunningSequence, _Request] = {}
        self._leaving: set[RunningSequence] = set()
        """Sequences that still have a row in the decoder but are finished or cancelled."""
        self._between_passes = asyncio.Lock()
        """Held during a pass, and while weights are copied."""
        self._is_load_waiting = False
        """Ends the pass in progress after its token."""

    async def start(self) -> None:
        """Load the model. Raises ConfigError."""
        self._decoder = await asyncio.get_running_loop().run_in_executor(self._reader, self._read_model)
        self._task = asyncio.create_task(self._decode(self._decoder), name="engine-decode")

    async def generate(
        self,
        prompt_tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None = None,
        images: Sequence[ImageFile] = (),
    ) -> Generation:
        decoder = self._alive()
        check_sampling(sampling)
        partial = PartialGeneration() if partial is None else partial
        uniforms = np.random.default_rng(seed % 2**64).random(sampling.max_new_tokens)[partial.num_tokens :].tolist()
        stop = await self._stops.strings(sampling)
        watch = None if stop is None else stop.watch(partial.prefix.tokens.tolist())
        prompt_tokens, sampling = partial.prefix.continue_from(prompt_tokens, sampling)
        check_prompt(
            prompt_tokens,
            max_new_tokens=sampling.max_new_tokens,
            vocabulary_size=decoder.vocabulary_size,
            context_tokens=decoder.context_tokens,
        )
        check_stop_tokens(sampling, vocabulary_size=decoder.vocabulary_size)
        patches = (
            await asyncio.get_running_loop().run_in_executor(self._reader, self._read_images, images) if images else ()
        )
        answer = RunningSequence(
            images=patches,
            prompt=np.ascontiguousarray(prompt_tokens, dtype=np.int32),
            sampling=sampling,
            uniforms=uniforms,
            stop=watch,
        )
        request = _Request(answer, asyncio.get_running_loop().create_future(), asked=time.monotonic())
        partial.follow(request)
        self._alive()  # the engine may have ended while the stop strings were read
        self._waiting.append(request)
        self._has_news.set()
        try:
            return partial.prefix.then(await request.future)
        finally:
            self._forget(request)

    def _read_images(self, images: Sequence[ImageFile]) -> tuple[ImagePatches, ...]:
        """Return the images as patches. Raises PromptError."""
        if self._processor is None:
            self._processor = ImageProcessor(self._model_path)
        found = []
        for one in images:
            if (known := self._patches.get(one.ref.digest)) is None:
                try:
                    known, grid = self._processor.patches(one.data)
                except ImageError as error:
                    raise PromptError(f"image {one.ref.digest[:12]}: {error}") from error
                if grid != one.ref.grid:
                    raise PromptError(
                        f"image {one.ref.digest[:12]} has the grid {grid} here, and {one.ref.grid} in its prompt: is "
                        "preprocessor_config.json another one?"
                    )
                self._patches[one.ref.digest] = known
                while sum(kept.nbytes for kept in self._patches.values()) > _PATCH_BYTES and len(self._patches) > 1:
                    del self._patches[next(iter(self._patches))]
            found.append(ImagePatches(ref=one.ref, patches=known))
        return tuple(found)

    def _forget(self, request: _Request) -> None:
        """Drop a request that is cancelled; does nothing if it has ended."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif self._running.pop(request.answer, None) is not None:
            self._leaving.add(request.answer)
            self._has_news.set()

    async def release(self) -> None:
        memory = self._alive().memory
        await asyncio.get_running_loop().run_in_executor(self._reader, memory.offload)

    async def resume(self, *, has_cache: bool = True) -> None:
        memory = self._alive().memory
        await asyncio.get_running_loop().run_in_executor(self._reader, memory.onload)

    async def load(self, weights: WeightVersion) -> LoadReport:
        decoder = self._alive()
        return await self._switch(weights.version, lambda: read_weights(weights, decoder))

    @property
    def can_update(self) -> bool:
        return True

    async def update(self, version: Version, source: Source, payload: bytes) -> LoadReport:
        """See WeightUpdater. If ``source`` raises, the old weights stay."""
        decoder = self._alive()
        return await self._switch(version, lambda: fetch_weights(source, payload, decoder))

    async def _switch(self, version: Version, read: Callable[[], Mapping[str, torch.Tensor]]) -> LoadReport:
        asked = time.monotonic()
        run, decoder = asyncio.get_running_loop().run_in_executor, self._alive()
        async with self._loading:
            tensors = await run(self._reader, read)
            self._is_load_waiting = True
            try:
                await self._between_passes.acquire()
            finally:
                self._is_load_waiting = False
            try:
                self._alive()
                began = time.monotonic()
                await run(self._thread, decoder.load, tensors, version)
                self._alive()
            finally:
                self._between_passes.release()
        now = time.monotonic()
        return LoadReport(pause_seconds=now - began, load_seconds=now - asked)

    @property
    def version(self) -> Version:
        return self._decoder.version if self._decoder else self._first_version

    @property
    def weight_updater(self) -> InProcessEngine:
        return self

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            queued=len(self._waiting),
            context_tokens=sum(answer.num_tokens for answer in self._running),
            tokens_generated=self._decoder.num_sampled if self._decoder else 0,
            is_live=True,
        )

    async def close(self) -> None:
        if self._task is not None:
            self._has_news.set()  # the pass in progress ends
            self._task.cancel()
            await asyncio.wait((self._task,))
        self._stops.close()
        self._reader.shutdown(wait=False)
        self._thread.shutdown(wait=False)

    def _alive(self) -> Decoder:
        if self._end is not None:
            raise EngineDied(str(self._end)) from self._end
        if self._decoder is None:
            raise EngineDied("the in-process engine is not running: start() it first")
        return self._decoder

    # -- decoding ------------------------------------------------------------------------------------------------------

    def _read_model(self) -> Decoder:
        return Decoder(
            self._model_path,
            device=self._device,
            dtype=self._dtype,
            version=self._first_version,
            reports_experts=self._reports_experts,
            is_exact=self._is_exact,
        )

    async def _decode(self, decoder: Decoder) -> None:
        """consumes: requests    waits for: one    woken by: ``generate``

        However it ends, it settles all requests.
        """
        end = EngineDied("the in-process engine was closed")
        try:
            while True:
                while not (self._running or self._waiting):
                    self._has_news.clear()
                    await self._has_news.wait()
                async with self._between_passes:
                    self._has_news.clear()
                    leaving, self._leaving = self._leaving, set()
                    admitted = self._choose()
                    await asyncio.get_running_loop().run_in_executor(
                        self._thread, self._pass, decoder, leaving, admitted
                    )
                self._deliver()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # of the model, such as too little memory
            log.exception("decoding failed")
            end = EngineDied(f"the in-process engine died: {error!r}")
            end.__cause__ = error
        finally:
            self._end = end
            for request in (*self._running.values(), *self._waiting):
                if not request.future.done():
                    request.future.set_exception(end)

    def _choose(self) -> list[RunningSequence]:
        """Return the waiting requests to prefill now: all that fit, once enough have gathered.

        Enough are a quarter of the running sequences, or one that was passed over _PASSED_OVER_STEPS times.
        """
        num_free = self._options.max_batch_size - len(self._running)
        if not self._waiting or not num_free:
            return []
        first = self._waiting[0]
        first.passed_over += 1
        is_few = 4 * min(num_free, len(self._waiting)) < len(self._running)
        if is_few and first.passed_over <= _PASSED_OVER_STEPS:
            return []
        chosen: list[RunningSequence] = []
        longest = 0
        while self._waiting and len(chosen) < num_free:
            longest = max(longest, len(self._waiting[0].answer.prompt))
            if chosen and longest * (len(chosen) + 1) > _PREFILL_TOKENS:
                break
            request = self._waiting.popleft()
            self._running[request.answer] = request
            chosen.append(request.answer)
        return chosen

    def _pass(self, decoder: Decoder, leaving: set[RunningSequence], admitted: list[RunningSequence]) -> None:
        """Prefill, or sample the next tokens of every sequence, in the decode thread.

        Decodes until a sequence is finished or there are news: a change of thread costs as much as a token of a tiny
        model.
        """
        decoder.remove(leaving)
        if admitted:
            began = time.monotonic()
            decoder.admit(admitted)
            for answer in admitted:
                answer.began, answer.first_sampled = began, time.monotonic()
            return
        while decoder.answers:
            self._step(decoder)
            if (
                self._is_load_waiting
                or self._has_news.is_set()
                or self._waiting
                or any(answer.finish_reason for answer in decoder.answers)
            ):
                return

    def _step(self, decoder: Decoder) -> None:
        decoder.step()

    def _deliver(self) -> None:
        """Answer the requests whose sequences are finished."""
        for answer in [answer for answer in self._running if answer.finish_reason]:
            request = self._running.pop(answer)
            self._leaving.add(answer)
            if request.future.done():
                continue
            if answer.is_finite:
                request.future.set_result(request.so_far())
            else:
                request.future.set_exception(EngineError("the model returned NaN logprobs: its weights are broken"))


def read_weights(weights: WeightVersion, decoder: Decoder) -> dict[str, torch.Tensor]:
    """Read all tensors of a version into memory and check them against the model. Raises WeightsError."""
    folder = check_weights(weights, expected=decoder.shapes, optional=decoder.optional_names)
    try:
        # Read instead of mmap: if a mapped file were truncated, the process would be killed.
        tensors: dict[str, torch.Tensor] = {}
        for path in weight_files.paths(folder):
            tensors |= safetensors.torch.load(path.read_bytes())
        tensors = {name: tensor for name, tensor in tensors.items() if name in decoder.shapes}  # no draft layers
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{folder}: {error}") from error
    return tensors


def fetch_weights(source: Source, payload: bytes, decoder: Decoder) -> dict[str, torch.Tensor]:
    """Return the tensors that ``source`` yields, checked against the model. Raises WeightsError."""
    where = f"weights from {source.__module__}"
    try:
        tensors = dict(source(payload, decoder.device))
    except WeightsError:
        raise
    except Exception as error:  # raised by the channel's code or its transport
        raise WeightsError(f"{where}: {type(error).__name__}: {error}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_layout(shapes, expected=decoder.shapes, optional=decoder.optional_names, where=where)
    return {name: tensor for name, tensor in tensors.items() if name in decoder.shapes}
