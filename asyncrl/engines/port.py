"""The port of sampling engines. Adapters: engines/."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.images.store import ImageFile
from asyncrl.messages import SamplingParams, WeightVersion
from asyncrl.messages.control import ServerAddress
from asyncrl.weights.port import LoadReport, WeightUpdater


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """An engine's current load.

    running           sequences being decoded
    queued            sequences that wait for a slot
    context_tokens    tokens of the running sequences so far, prompts included; 0 if the engine does not know
    cache_tokens      tokens whose keys and values the engine has room for; 0 if it does not know
    tokens_generated  tokens since start
    is_live           tokens_generated rises with every token, not only with complete answers; if it stalls, the engine
                      has stalled
    is_away           the engine leaves the GPUs to another process for now; running and queued wait for them
    """

    running: int = 0
    queued: int = 0
    context_tokens: int = 0
    cache_tokens: int = 0
    tokens_generated: int = 0
    is_live: bool = False
    is_away: bool = False


class Engine(Protocol):
    """Samples from a model whose weights may change between two tokens."""

    async def start(self) -> None: ...

    async def generate(
        self,
        prompt_tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None = None,
        images: Sequence[ImageFile] = (),
    ) -> Generation:
        """Sample one answer. Many calls run concurrently; the engine batches them.

        With ``partial``, the answer starts with its prefix and can be observed as it grows. An engine may ignore it and
        start over: the result is correct, but the tokens sampled by a dead worker are lost.

        ``images`` are those that the prompt shows, in order; only an engine that ``reads_images`` gets any.

        Every token carries the version of the weights that sampled it. Engines that support it sample the same tokens
        for the same seed and weights. Evaluations also set top_p, top_k, and a temperature of 0. Raises EngineError
        (another engine may succeed), PromptError (no engine can answer) or EngineDied (this engine is unusable).
        """
        ...

    async def load(self, weights: WeightVersion) -> LoadReport:
        """Switch to newer weights. Generations in progress continue with them from the next token, on the keys and
        values that the old weights computed.

        Raises WeightsError if the new weights cannot be read. The engine then keeps the old weights; or ``version`` is
        below all others and the engine samples nothing until a load succeeds. The caller has verified the checksum
        (WeightChannel.verify).
        """
        ...

    @property
    def version(self) -> tuple[int, int]:
        """(incarnation, policy_version) of the current weights; below all others if the weights are incomplete."""
        ...

    @property
    def weight_updater(self) -> WeightUpdater | None:
        """Receives weights from another process's memory, after start; None if this engine only loads folders."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTo:
    """What a model's server has from its run.

    host         address of this machine at which the run's workers reach it
    log_path     file for its output
    directory    folder for its other files
    dtype        model.dtype
    has_metrics  whether Prometheus reads the run's metrics, and the server's with them
    """

    host: str
    log_path: Path
    directory: Path
    dtype: str
    has_metrics: bool = False


class ModelServer(Protocol):
    """The program that serves a frozen model ([servers.NAME]), over OpenAI's protocol.

    A class of your own takes (name, section, options, *, to: ServedTo). ``options`` is [servers.NAME.options] as its
    ``options_type``, or None if it has none.
    """

    async def start(self) -> ServerAddress:
        """Start it, and return where it is once it answers. Raises EngineDied, or ConfigError for what no restart
        mends."""
        ...

    async def answers(self) -> None:
        """Return once it has answered. Raises EngineError if it answers with an error."""
        ...

    async def wait(self) -> str:
        """Wait until it has ended. Return why, in one line."""
        ...

    async def close(self) -> None:
        """End it, and everything that it started."""
        ...


@runtime_checkable
class LimitsMemory(Protocol):
    """An engine that reserves GPU memory when it starts."""

    def limit_memory(self, num_bytes: int) -> None:
        """Take at most ``num_bytes`` when started: at least EngineAdapter.gpu_bytes."""
        ...


@runtime_checkable
class Pauses(Protocol):
    """An engine that can stop between two tokens, and go on later with the sequences that it has."""

    async def pause(self) -> None:
        """Sample nothing until ``unpause``. Weights may be loaded meanwhile. Raises EngineError."""
        ...

    async def unpause(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the machines of one engine meet.  host, port: its worker listens there;  worker: the worker's name"""

    host: str
    port: int
    worker: str


@runtime_checkable
class SpansMachines(Protocol):
    """An engine that may run over several machines (EngineAdapter.machines)."""

    def meet_at(self, meeting: Meeting) -> None:
        """Wait there for the other machines when started. For the worker's engine."""
        ...

    async def join(self, meeting: Meeting, *, seconds: float) -> str:
        """Be one of those other machines, and not start: run a part of the worker's engine until it ends.

        Return why it ended; "" if it was closed in order. Raises EngineDied if the worker cannot be reached within
        ``seconds``, ConfigError if it refuses this machine.
        """
        ...


@runtime_checkable
class HasServerMetrics(Protocol):
    """An engine, or the server of a frozen model, whose server has metrics of its own."""

    async def server_metrics(self) -> str:
        """Return them in Prometheus' text format; "" while there are none."""
        ...


@runtime_checkable
class SharesGpus(Protocol):
    """An engine that can move its memory off the GPUs. ``EngineAdapter.build`` sees to it with run.colocated."""

    async def release(self) -> None:
        """Free the GPUs; call it when nothing runs. Weights stay on the host; cached keys and values are dropped."""
        ...

    async def resume(self, *, has_cache: bool = True) -> None:
        """Return to the GPUs with the same weights. Raises EngineDied.

        has_cache  False: without the cache of keys and values, to load weights while the learner's old ones are still
                   there; a second call brings the cache. An engine whose cache is small may bring it at once
        """
        ...
