"""Runs whose learner and engines share GPUs: in turns (run.colocated), or at the same time.

At the same time, an engine takes the memory that the learner leaves, and both start one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.gpu_turn import GpuTurn
from asyncrl.adapters import registry
from asyncrl.backends.port import Backend, KeepsToShare, Offloads
from asyncrl.config import RunConfig
from asyncrl.config.learner import SMALLER_ROWS
from asyncrl.config.toml_text import toml_text
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.engines.port import Engine, EngineStats, LimitsMemory, Pauses, SharesGpus
from asyncrl.errors import ConfigError, EngineDied, EngineError
from asyncrl.images.store import ImageFile
from asyncrl.launch.launchers.adapter import launcher_class
from asyncrl.messages import SamplingParams, WeightVersion
from asyncrl.tensors.device import read_gpu_memory
from asyncrl.weights.port import LoadReport, Source, WeightUpdater

LOCK_FILE = "gpus.lock"
STEP_FILE: Final = "step.lock"
QUIET_SECONDS: Final = 0.1
"""Idle time before the GPUs are released: the next prompt often arrives at once."""
AFTER_LOAD_SECONDS: Final = 2.0
"""The same after a load. The prompts that waited for it come next, and leaving for nothing costs seconds."""

KEPT_BYTES: Final = 3 * 2**30
"""Memory that a learner beside engines may keep over its estimate. It is of their workspace, which they rarely fill."""

log = logging.getLogger(__name__)


def check(run: RunConfig) -> None:
    """Raise ConfigError for settings that do not allow taking turns, or pausing."""
    if run.rollout.beside_learner == "pause" and not issubclass(registry.engine_class(run), Pauses):
        raise ConfigError(f'rollout.beside_learner: engine.kind = "{run.engine.kind}" cannot pause; use "sample"')
    if not run.run.colocated:
        return
    if run.run.mode == "async":
        raise ConfigError(
            'run.colocated: mode = "async" trains while it samples, and here they take turns; use mode = "sync" or '
            '"one_step_off", or remove it'
        )
    if run.learner.machines > 1 or launcher_class(run).places:
        raise ConfigError(
            "run.colocated: learner and engines take turns by a file of one machine; use learner.machines = 1 and "
            'launcher.kind = "local", or remove it'
        )
    for key, name, side, can_leave in (
        ("engine.kind", run.engine.kind, "engines", issubclass(registry.engine_class(run), SharesGpus)),
        ("learner.backend", run.learner.backend, "learner", issubclass(registry.backend_class(run), Offloads)),
    ):
        if not can_leave and run.run.offload in ("both", side):
            raise ConfigError(f'run.colocated: {key} = "{name}" cannot release its GPUs; use another, or remove it')


def start_turn(run: RunConfig) -> GpuTurn | None:
    """Return the lock under which the processes on a shared GPU start; None where no GPU is shared at the same time."""
    import torch  # takes seconds

    is_alone = (
        not torch.cuda.is_available() or run.run.colocated or run.learner.machines > 1 or launcher_class(run).places
    )
    return None if is_alone else GpuTurn(run.run_directory / LOCK_FILE, is_shared=False)


def step_turn(run: RunConfig, *, is_shared: bool) -> GpuTurn | None:
    """Return the lock that the learner holds during a step; None where no engine pauses for it."""
    return (
        GpuTurn(run.run_directory / STEP_FILE, is_shared=is_shared) if run.rollout.beside_learner == "pause" else None
    )


def is_at_once(run: RunConfig) -> bool:
    """Return whether an engine on the learner's GPU has memory there while the learner has its own."""
    return not run.run.colocated or run.run.offload != "both"


def limit_memory(run: RunConfig, engine: Engine, *, num_engines: int) -> None:
    """Give the engine its share of the memory that the learner leaves. Raises ConfigError if that is too little.

    num_engines  on this GPU
    """
    if isinstance(engine, LimitsMemory):
        share = engine_share(run, num_engines=num_engines)
        log.info(
            "beside the learner, which may need %.1f of %.1f GiB, there are %.1f for each engine (%d on this GPU)",
            *(_learner_bytes(run) / 2**30, read_gpu_memory().total / 2**30, share / 2**30, num_engines),
        )
        engine.limit_memory(share)


def limits_learner(run: RunConfig, workers: Iterable[str]) -> bool:
    """Return whether one of these workers, which are beside the learner, takes all that the learner is estimated to
    leave, and keeps it while the learner trains."""
    runs = (run.of_pool(run.pool_workers.get(name, "")) for name in workers)
    stays = not run.run.colocated or run.run.offload == "learner"
    return stays and any(registry.engine_class(its).gpu_bytes(its) for its in runs)


def limit_learner(run: RunConfig, backend: Backend) -> None:
    """Let a learner beside engines keep little more memory than it may need.

    Torch keeps what it has freed, in pieces that other rows do not fit into: 6 GiB more than the estimate at 8B, after
    which an engine found no room for the tensors of a load.
    """
    if isinstance(backend, KeepsToShare):
        backend.limit_memory(_learner_bytes(run) + KEPT_BYTES)


def engine_share(run: RunConfig, *, num_engines: int, gpu_bytes: int = 0) -> int:
    """Return the bytes of a GPU for each of its engines: equal shares of what the learner leaves there.

    gpu_bytes  of such a GPU, if it is not this machine's

    Raises ConfigError if that is less than an engine reserves at least (EngineAdapter.gpu_bytes), with the fastest
    smaller learner that would leave enough.
    """
    least = registry.engine_class(run).gpu_bytes(run)
    total = gpu_bytes or read_gpu_memory().total
    learner = _learner_bytes(run, total=total)
    share = (total - learner) // num_engines
    if not least or share >= least:
        return share
    fits = (words for words, smaller in _smaller(run) if _fits(smaller, num_engines=num_engines, total=total))
    remedies = [
        *itertools.islice(fits, 1),
        *(["fewer engines on this GPU"] if num_engines > 1 else []),
        "another GPU (rollout.gpus)",
        *(['run.offload = "both"'] if run.run.colocated else []),
        *(['turns (run.colocated = true with run.mode = "sync")'] if _fits_in_turns(run, total=total) else []),
    ]
    raise ConfigError(
        f"rollout.gpus: of {total / 2**30:.1f} GiB of a GPU the learner may need {learner / 2**30:.1f}, and "
        f"{num_engines} engine{'s' * (num_engines > 1)} on it {num_engines * least / 2**30:.1f} (estimated); use "
        + " or ".join(remedies)
    )


_STATES: Final[Sequence[Mapping[str, Any]]] = (
    {},
    {"options.offload_optimizer": True},
    {"options.optimizer_device": "cpu", "options.offload_optimizer": False},
    {"lora.publish": "adapter"},
    {"lora.rank": 32, "lora.publish": "adapter"},
)
"""Settings that leave less state on the GPU, the fastest first."""


def _smaller(run: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield the run with learners that need less, the fastest first, each after the words that say what differs."""
    own = {f"options.{key}": value for key, value in run.learner.options.items()}
    own["options.offload_optimizer"] = bool(own.get("options.offload_optimizer"))
    own |= {"micro_batch_tokens": run.learner.micro_batch_tokens, "lora.publish": run.learner.lora.publish}
    rows: dict[str, Any] = {"micro_batch_tokens": min(SMALLER_ROWS, run.learner.micro_batch_tokens)}
    full: dict[str, Any] = {"options.recompute": "full"}
    for state, passes in itertools.product(_STATES, ({}, rows, full, rows | full)):
        settings = {key: value for key, value in {**state, **passes}.items() if own.get(key) != value}
        if smaller := _with(run, settings):
            words = " and ".join(f"learner.{key} = {toml_text(value)}" for key, value in settings.items())
            drops = "lora.rank" in settings and (run.learner.freeze or run.learner.train_only)
            yield words + (" without freeze and train_only" if drops else ""), smaller


def _with(run: RunConfig, settings: Mapping[str, Any]) -> RunConfig | None:
    """Return the run with these settings of its learner; None if it cannot have them."""
    of_section: dict[str, dict[str, Any]] = {"": {}, "options": {}, "lora": {}}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        of_section[section][name] = value
    changes, lora = of_section[""], of_section["lora"]
    if lora:
        takes_adapters = all("adapters" in its(run).takes for its in (registry.engine_class, registry.channel_class))
        if run.weights.quantization or not takes_adapters or ("rank" in lora) == bool(run.learner.lora.rank):
            return None  # quantized versions are merged, and a rank is for runs without adapters
        changes |= {"lora": dataclasses.replace(run.learner.lora, **lora), "freeze": (), "train_only": ()}
    options = {**run.learner.options, **of_section["options"]}
    smaller = dataclasses.replace(run, learner=dataclasses.replace(run.learner, options=options, **changes))
    try:
        registry.backend_class(run).check(smaller)
    except ConfigError:
        return None
    return smaller


def _fits(run: RunConfig, *, num_engines: int, total: int) -> bool:
    """Return whether the engines find the memory that they reserve at least beside the learner."""
    try:
        left = total - _learner_bytes(run, total=total)
    except ConfigError:
        return False
    return left >= num_engines * registry.engine_class(run).gpu_bytes(run)


def _fits_in_turns(run: RunConfig, *, total: int) -> bool:
    """Return whether learner and engines that share their GPUs at the same time could take turns on them instead."""
    num_gpus = len(run.rollout.gpus) or registry.backend_class(run).num_gpus(run)
    if run.run.colocated or registry.engine_class(run).num_gpus(run) > num_gpus:
        return False
    try:
        in_turns = dataclasses.replace(run, run=dataclasses.replace(run.run, colocated=True, mode="sync"))
        check(in_turns)
        return _learner_bytes(in_turns, total=total) <= total
    except ConfigError:
        return False


def _learner_bytes(run: RunConfig, *, total: int = 0) -> int:
    return registry.backend_class(run).gpu_bytes(run, registry.algorithm(run), total=total)


def learner_turn(run: RunConfig) -> GpuTurn | None:
    """Return the learner's lock on the GPUs; None if it does not share them."""
    return GpuTurn(run.run_directory / LOCK_FILE, is_shared=False) if run.run.colocated else None


def engine(run: RunConfig, engine: Engine) -> Engine:
    """Wrap an engine so that it computes, and unless run.offload says otherwise has memory, only while the learner does
    not train."""
    turn = GpuTurn(run.run_directory / LOCK_FILE, is_shared=True)
    if run.run.offload == "learner":
        return TurnTakingEngine(engine, memory=_Stays(), turn=turn)
    assert isinstance(engine, SharesGpus)
    return TurnTakingEngine(engine, memory=engine, turn=turn)


class _Stays:
    """See SharesGpus: the memory of an engine that stays on the GPUs while it does not compute."""

    async def release(self) -> None:
        pass

    async def resume(self, *, has_cache: bool = True) -> None:
        pass


class TurnTakingEngine:
    """See Engine in engines/port.py.

    The engine leaves the GPUs before it returns its last pending answer, so a caller that has all answers finds the
    GPUs free, and it stays after a load for the answers. Weights in the learner's memory stay there while its model is
    away.
    """

    def __init__(self, engine: Engine, *, memory: SharesGpus, turn: GpuTurn) -> None:
        """memory: moves the engine's memory"""
        self._engine = engine
        self._memory = memory
        self._turn = turn
        self._users = 0
        self._used = asyncio.Event()
        self._switching = asyncio.Lock()
        self._is_away = False
        self._has_cache = True
        self._leaving = set[asyncio.Task[None]]()
        """Leave the GPUs after a load that nothing follows; one that is followed ends by itself."""

    async def start(self) -> None:
        await self._turn.acquire()
        await self._engine.start()
        await self._release()

    async def generate(
        self,
        prompt_tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None = None,
        images: Sequence[ImageFile] = (),
    ) -> Generation:
        shown = {"images": images} if images else {}
        async with self._on_gpus():
            return await self._engine.generate(prompt_tokens, sampling, seed=seed, partial=partial, **shown)

    async def load(self, weights: WeightVersion) -> LoadReport:
        async with self._on_gpus(needs_cache=False):
            return await self._engine.load(weights)

    @property
    def version(self) -> tuple[int, int]:
        return self._engine.version

    @property
    def weight_updater(self) -> WeightUpdater | None:
        return (
            None
            if self._engine.weight_updater is None
            else _UpdaterInTurn(self._engine.weight_updater, functools.partial(self._on_gpus, needs_cache=False))
        )

    def stats(self) -> EngineStats:
        stats = self._engine.stats()
        return dataclasses.replace(stats, queued=self._users, is_away=True) if self._is_away else stats

    async def close(self) -> None:
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await self._end()

    async def _end(self) -> None:
        await self._engine.close()
        self._turn.release()

    @contextlib.asynccontextmanager
    async def _on_gpus(self, *, needs_cache: bool = True) -> AsyncIterator[None]:
        """needs_cache: False for a load, which so has the memory of the cache beside the weights"""
        self._users += 1
        self._used.set()
        try:
            async with self._switching:
                await self._turn.acquire()
                if self._is_away or (needs_cache and not self._has_cache):
                    await self._memory.resume(has_cache=needs_cache)
                    self._is_away, self._has_cache = False, needs_cache
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._used.clear()
                if needs_cache:
                    await asyncio.shield(self._release_when_idle(QUIET_SECONDS))
                else:
                    leaving = asyncio.create_task(self._release_after_load())
                    self._leaving.add(leaving)
                    leaving.add_done_callback(self._leaving.discard)

    async def _release_when_idle(self, seconds: float) -> None:
        """Release the GPUs unless the engine is needed again within that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._used.wait()
                return
        async with self._switching:
            if not self._users:
                await self._release()

    async def _release_after_load(self) -> None:
        """waits for: the answers that the load was for    else: the engine leaves, or ends if it cannot"""
        try:
            await self._release_when_idle(AFTER_LOAD_SECONDS)
        except EngineDied as error:
            log.error("%s; it ends, and with it its turn", error)
            await self._end()

    async def _release(self) -> None:
        if not self._is_away:
            try:
                await self._memory.release()
            except EngineError as error:  # nothing may ask again, and the learner waits; the end frees the GPUs
                raise EngineDied(f"the engine does not leave the GPUs: {error}") from error
            self._is_away, self._has_cache = True, False
        self._turn.release()


class _UpdaterInTurn:
    """See WeightUpdater in weights/port.py. No broadcasts: NCCL needs both sides on the GPUs."""

    def __init__(
        self, updater: WeightUpdater, on_gpus: Callable[[], contextlib.AbstractAsyncContextManager[None]]
    ) -> None:
        self._updater = updater
        self._on_gpus = on_gpus

    @property
    def num_ranks(self) -> int:
        return self._updater.num_ranks

    @property
    def can_update(self) -> bool:
        return self._updater.can_update

    async def update(self, version: tuple[int, int], source: Source, payload: bytes) -> LoadReport:
        async with self._on_gpus():
            return await self._updater.update(version, source, payload)
