"""The Megatron-Core backend: rank 0 runs in the learner's process and sends every command to all ranks.

    step -> _run_on_shares -> MegatronRank.execute (each rank) -> TrainedModel.step -> forward_backward

Cheap to import: ``start`` imports Megatron. rank.py implements the work of a rank, rank_process.py the other processes,
rank_group.py what they tell each other.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from asyncrl.backends import flops, frozen, gpu_memory, huggingface, lora, models
from asyncrl.backends.adapter import BackendAdapter, optimizer_settings
from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.megatron import refusals, shared_settings
from asyncrl.backends.megatron.background_save import SavedModel, SavedPart, complete
from asyncrl.backends.megatron.feeding import Layers, Shares
from asyncrl.backends.megatron.hooks import load_hooks
from asyncrl.backends.megatron.job import Command, Done, ExpertLayers, Job, Options, Outputs
from asyncrl.backends.megatron.rank_group import (
    COMMAND,
    FOREVER,
    RESULT,
    RankGroup,
    RankInfo,
    describe,
    open_store,
    rank_environments,
    rank_from_environment,
)
from asyncrl.backends.megatron.rank_process import ChildRanks, serve
from asyncrl.backends.megatron.refusals import require_tensors_of_engines, require_trainable
from asyncrl.backends.megatron.remote_parts import RemotePart
from asyncrl.backends.models import POLICY, AuxiliaryModel
from asyncrl.backends.port import StepResult
from asyncrl.config.adapter import RunConfig
from asyncrl.errors import AsyncRLError, BackendError, CheckpointError, ConfigError
from asyncrl.messages import codec
from asyncrl.messages.routing import NO_EXPERTS
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.batching.packing import MicroBatch, of_one_length
from asyncrl.tensors import int4
from asyncrl.tensors.device import read_gpu_memory, read_host_memory, resolve_device
from asyncrl.tensors.snapshot import Snapshot

if TYPE_CHECKING:
    from asyncrl.backends.megatron.rank import MegatronRank


_MPS_LIMIT: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"

log = logging.getLogger("asyncrl.learner")


class MegatronBackend(BackendAdapter):
    """Rank 0 runs in the caller's process. At most one instance per process, because Megatron's state is global.

    ``layout`` defines how ranks share the model; copies of the model train different data.
    """

    options_type = Options
    replays_experts = True

    @classmethod
    def build(cls, run: RunConfig, *, algorithm: Algorithm, auxiliary: Mapping[str, AuxiliaryModel]) -> MegatronBackend:
        policy = AuxiliaryModel(path=Path(run.model.path), objective=algorithm, optimizer=optimizer_settings(run))
        settings = shared_settings.shared_settings(run, options=cls.options(run))
        job = cls.make_job(run, models.with_policy(policy, auxiliary), needs_logits=algorithm.needs_logits)
        return cls(job, info=cls._rank_info(run), settings=settings)

    @classmethod
    def make_job(cls, run: RunConfig, models: Mapping[str, AuxiliaryModel], *, needs_logits: bool = False) -> Job:
        return Job(
            models=models,
            temperature=run.rollout.temperature,
            device=resolve_device(run.learner.device, section="learner"),
            dtype=run.model.dtype,
            threads=run.learner.threads,
            layout=run.learner.layout,
            options=cls.options(run),
            transformer=run.learner.megatron,
            quantization=run.weights.quantization,
            takes_turns=run.run.colocated,
            exports_to=cls._exports_to(run, needs_logits=needs_logits),
            family=huggingface.load_family(run.model.family),
        )

    @classmethod
    def _rank_info(cls, run: RunConfig) -> RankInfo | None:
        return rank_from_environment(ranks=run.learner.ranks, timeout_seconds=cls.options(run).timeout_seconds)

    @classmethod
    def memory(cls, run: RunConfig, algorithm: Algorithm, *, gpu_bytes: int = 0) -> Sequence[gpu_memory.Phase]:
        if run.learner.device == "cpu":
            return ()
        if gpu_bytes:
            cls._refuse(run, total=gpu_bytes, needs_logits=algorithm.needs_logits)
        elif resolve_device(run.learner.device, section="learner") == "cpu":
            return ()
        return gpu_memory.phases(run, cls._memory_plan(run, needs_logits=algorithm.needs_logits, total=gpu_bytes))

    @classmethod
    def gpu_bytes(cls, run: RunConfig, algorithm: Algorithm, *, total: int = 0) -> int:
        return gpu_memory.learner_bytes(run, cls._memory_plan(run, needs_logits=algorithm.needs_logits, total=total))

    @classmethod
    def _exports_to(cls, run: RunConfig, *, needs_logits: bool, total: int = 0) -> gpu_memory.ExportsTo:
        """Return where a version is copied: on the device unless its GPU is known to be too small.

        total  bytes of that GPU; 0: of this machine's
        """
        options: Options = cls.options(run)
        if options.exports != "auto":
            return options.exports
        try:
            if not total and resolve_device(run.learner.device, section="learner") == "cpu":
                return "device"
            total = total or read_gpu_memory().total
        except ConfigError:
            return "device"
        plan = cls._memory_plan(run, needs_logits=needs_logits, exports_to="device")
        return "host" if gpu_memory.describe_shortage(run, plan, total=total) else "device"

    @classmethod
    def _memory_plan(
        cls, run: RunConfig, *, needs_logits: bool, total: int = 0, exports_to: gpu_memory.ExportsTo | None = None
    ) -> gpu_memory.MemoryPlan:
        """exports_to: None: as the run's learner will do on a GPU of ``total`` bytes, see ``_exports_to``"""
        options: Options = cls.options(run)
        is_stateless = run.learner.reset_optimizer and run.learner.steps_per_batch == 1
        width = gpu_memory.MOMENT_BYTES // (2 if options.moments_dtype == "bfloat16" else 1)
        return gpu_memory.MemoryPlan(
            recomputes_all=options.recompute == "full",
            offloads_moments=options.offload_optimizer,
            updates_on_host=options.optimizer_device == "cpu",
            moment_bytes=0 if is_stateless else width,
            shares_prefixes=run.learner.shared_prefixes != "off" and not cls.why_no_shared_prefixes(run),
            needs_logits=needs_logits,
            exports_to=exports_to or cls._exports_to(run, needs_logits=needs_logits, total=total),
        )

    @classmethod
    def rank_here(cls, run: RunConfig) -> int:
        info = cls._rank_info(run)
        return 0 if info is None else info.rank

    @classmethod
    def environments(cls, run: RunConfig, *, port: int) -> Sequence[Mapping[str, str]]:
        return rank_environments(ranks=run.learner.ranks, machines=run.learner.machines, port=port)

    @classmethod
    def check_machine(cls, run: RunConfig) -> None:
        super().check_machine(run)
        if importlib.util.find_spec("megatron") is None:
            raise ConfigError(
                'learner.backend: "megatron" needs megatron-core, which is not installed; '
                'pip install asyncrl[megatron], or use "reference"'
            )
        if (limit := os.environ.get(_MPS_LIMIT, "100")) != "100":
            log.warning(
                "%s is %s: with some limits cuBLAS returns wrong products; unset it for the learner", _MPS_LIMIT, limit
            )
        if run.learner.megatron or run.own_megatron:
            from asyncrl.backends.megatron.transformer_config import refuse_options  # takes seconds

            job = cls.make_job(run, models={})
            for key, folder in refusals.folders(run).items():
                shape = huggingface.read_shape(folder, where=key, own=job.family)
                refuse_options(job, shape, where=key, own=run.own_megatron.get(key, {}))
        if resolve_device(run.learner.device, section="learner") == "cuda":
            try:
                total = read_gpu_memory().total
            except ConfigError:  # the driver's tool is not there: nothing is known, so nothing is refused
                return
            cls._refuse(run, total=total)
            gpu_memory.refuse_host(run, cls._leanest_plan(run), total=read_host_memory())

    @classmethod
    def _refuse(cls, run: RunConfig, *, total: int, needs_logits: bool = False) -> None:
        """Raise ConfigError for what cannot fit GPUs of ``total`` bytes, and warn of what may not."""
        plan = cls._leanest_plan(run, needs_logits=needs_logits)
        gpu_memory.refuse(run, plan, total=total, is_possible=functools.partial(refusals.is_trainable, run))
        if shortage := gpu_memory.describe_shortage(run, plan, total=total):
            log.warning("%s", shortage)

    @classmethod
    def _leanest_plan(cls, run: RunConfig, *, needs_logits: bool = False) -> gpu_memory.MemoryPlan:
        """Return the plan of a run whose versions are on the host, unless they must be on the device."""
        exports_to: gpu_memory.ExportsTo = "device" if cls.options(run).exports == "device" else "host"
        return cls._memory_plan(run, needs_logits=needs_logits, exports_to=exports_to)

    @classmethod
    def check_algorithm(cls, run: RunConfig, algorithm: Algorithm) -> None:
        options: Options = cls.options(run)
        if options.replay_own_routing and not algorithm.keeps_prox:
            raise ConfigError(
                "learner.options.replay_own_routing: several optimizer steps on a batch of rollouts replay the pass "
                "before them, and this run has none; use learner.steps_per_batch > 1, or remove it"
            )
        for name in ("aux_loss_coefficient", "draft_coefficient"):
            if getattr(options, name) and algorithm.scales_gradients:
                raise ConfigError(
                    f"learner.options.{name}: the gradients of a batch are divided by what is left after the "
                    'correction (algorithm.denominator = "after", or self_norm), which would scale this loss as well; '
                    "remove one of them"
                )

    @classmethod
    def why_no_shared_prefixes(cls, run: RunConfig) -> str:
        return refusals.why_no_shared_prefixes(run, trains_drafts=cls.options(run).draft_coefficient > 0)

    @classmethod
    def check(cls, run: RunConfig) -> None:
        options: Options = cls.options(run)
        load_hooks(options.hooks)
        if options.replay_own_routing:
            refusals.require_routers(run)
        if options.draft_coefficient:
            refusals.require_draft_layers(run)
        if options.optimizer_device == "cpu" and run.model.dtype == "float32":
            raise ConfigError(
                'learner.options.optimizer_device: with model.dtype = "float32" the weights on the device are the main '
                "weights, and only moments can leave it; use offload_optimizer, or bfloat16"
            )
        refusals.check(
            run,
            balances_experts=options.aux_loss_coefficient > 0,
            recomputes_all=options.recompute == "full",
            rounds_experts=options.fake_quantization == "auto" and run.weights.quantization in int4.GROUPS,
        )
        frozen.check(run, are_fused=True)
        lora.check(run)

    def __init__(self, job: Job, *, info: RankInfo | None = None, settings: Mapping[str, object] | None = None) -> None:
        """
        info      this process among its ranks, if each of them is started separately
        settings  settings by name that all ranks must share
        """
        self._job = job
        self._layout = job.layout
        self._info = info or RankInfo(ranks=job.layout.ranks, timeout_seconds=job.options.timeout_seconds)
        self._settings = settings or {}
        self._shape: ModelShape | None = None
        self._group: RankGroup | None = None
        self._children: ChildRanks | None = None
        self._rank: MegatronRank | None = None
        self._expert_layers: list[Layers] = [None] * job.layout.pipeline  # by stage
        self._exports = 0
        self._offload_metrics: dict[str, float] = {}
        self._parts: weakref.WeakSet[RemotePart] = weakref.WeakSet()  # parts that are still in use

    def limit_memory(self, num_bytes: int) -> None:
        """See KeepsToShare in backends/port.py."""
        self._job = dataclasses.replace(self._job, gpu_bytes=num_bytes)

    def start(self) -> None:
        if dist.is_initialized():
            raise BackendError("torch.distributed is already initialised in this process; MegatronBackend must do it")
        shapes = {
            name: require_trainable(
                model.path,
                where=models.where(name),
                layout=self._layout,
                transformer={**self._job.transformer, **model.megatron},
                own=self._job.family,
            )
            for name, model in self._job.models.items()
        }
        self._shape = shapes[POLICY]
        require_tensors_of_engines(self._job.models[POLICY].path, self._shape)
        store = open_store(self._info)
        if self._info.ranks > 1:
            is_alone = not self._info.host
            if is_alone:
                self._children = ChildRanks(self._job, dataclasses.replace(self._info, port=store.port))
            self._group = RankGroup(
                store,
                self._info,
                settings={} if is_alone else self._digests(),
                why_ended=self._children.why_ended if self._children else lambda rank, within: "",
                end=self._children.kill_and_exit if self._children else os._exit,
            )
        from asyncrl.backends.megatron.rank import MegatronRank  # takes seconds, in parallel with the other ranks

        with self._explain("start"):
            self._rank = MegatronRank(self._job, self._info, store=store)
        if self._layout.pipeline > 1:
            held = self._run_on_all_ranks(Command(name="expert_layers"), ExpertLayers)
            self._expert_layers = [one.layers for one in held[:: self._layout.ranks // self._layout.pipeline]]

    def serve(self) -> None:
        if self._info.rank == 0:
            raise BackendError("this process is the learner; only its other ranks serve")
        serve(self._job, self._info, settings=self._digests())

    def _digests(self) -> dict[str, str]:
        """Return digests of what all ranks must share."""
        folders = {models.where(name): model.path for name, model in self._job.models.items()}
        return shared_settings.digests(self._settings, folders)

    def step(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = POLICY
    ) -> StepResult:
        models.find(self._job.trained, model, doing="step")
        began = time.perf_counter()
        command = Command(name="step", model=model, learning_rate=learning_rate)
        results = self._run_on_shares(command, dp_shards, StepResult)
        metrics, tokens = results[0].metrics, {key: row for one in results for key, row in one.tokens.items()}
        if model == POLICY:
            speed = self._speed(dp_shards, time.perf_counter() - began)
            metrics = {**metrics, **speed, **self._offload_metrics}
        return StepResult(metrics=metrics, tokens=tokens)

    def refresh_reference(self) -> None:
        self._run_on_all_ranks(Command(name="refresh_reference"))

    def reset_optimizer(self) -> None:
        self._run_on_all_ranks(Command(name="reset_optimizer"))

    def _run_on_shares(self, command: Command, dp_shards: Sequence[Sequence[MicroBatch]], result: type) -> list[Any]:
        """Execute a command on all ranks, each with its share. All ranks of a copy of the model get the same one."""
        copies = self._layout.data_parallel
        if len(dp_shards) != copies:
            raise BackendError(f"{copies} data-parallel learner ranks need as many shards, got {len(dp_shards)}")
        shards = dp_shards if self._layout.expert * self._layout.expert_tensor == 1 else of_one_length(dp_shards)
        if command.model != POLICY:  # the engine ran no other model
            shards = [[dataclasses.replace(row, experts=NO_EXPERTS) for row in shard] for shard in shards]
        batch_tokens = sum(row.num_tokens for shard in dp_shards for row in shard if not row.is_filler)
        command = dataclasses.replace(command, batch_tokens=batch_tokens)
        shares = Shares(shards, self._layout, self._expert_layers, of_machine=self._info.local_ranks)
        return self._run_on_all_ranks(
            [
                dataclasses.replace(command, feed=shares.feed(rank))
                if rank
                else dataclasses.replace(command, micro_batches=shares.own)
                for rank in range(self._layout.ranks)
            ],
            result,
            shares=shares,
        )

    def _speed(self, dp_shards: Sequence[Sequence[MicroBatch]], seconds: float) -> dict[str, float]:
        """Return the throughput of one step over all ranks; MFU only on a device whose peak is known."""
        rows = [row for shard in dp_shards for row in shard]
        lengths = np.concatenate([np.diff(row.boundaries) for row in rows] or [np.zeros(0, int)])
        metrics = {"learner/step_tokens_per_second": float(lengths.sum()) / seconds}
        peak = flops.peak_flops(torch.cuda.get_device_name()) if self._job.device == "cuda" else None
        if peak and self._shape:
            settings = self._job.models[POLICY].optimizer
            has_adapters = settings is not None and settings.lora is not None
            shared = np.concatenate([row.shared for row in rows] or [np.zeros(0, int)])
            whole, saved = (
                flops.training_flops(self._shape, of.tolist(), has_adapters=has_adapters) for of in (lengths, shared)
            )
            work = whole - saved  # what a sequence shares is a sequence that is not computed
            if vision := self._shape.vision:
                grids = [grid for row in rows for grid in row.images.grids.tolist()]
                is_trained = settings is not None and frozen.trains(settings, vision.prefix)
                work += flops.vision_flops(vision, grids, is_trained=is_trained)
            metrics["learner/mfu"] = work / (seconds * peak * self._layout.ranks)
        return metrics

    def forward(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, model: str = POLICY
    ) -> list[list[NDArray[np.float32]]]:
        models.find(self._job.models, model, doing="forward")
        return self._forward(dp_shards, model=model)

    def _forward(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, model: str, records: bool = False
    ) -> list[list[NDArray[np.float32]]]:
        results = self._run_on_shares(Command(name="forward", model=model, records=records), dp_shards, Outputs)
        return [
            list(results[rank].rows[: len(share)])
            for rank, share in zip(self._layout.output_ranks, dp_shards, strict=True)
        ]

    @property
    def records_routing(self) -> bool:
        return self._job.options.replay_own_routing

    def forward_recorded(self, dp_shards: Sequence[Sequence[MicroBatch]]) -> list[list[NDArray[np.float32]]]:
        return self._forward(dp_shards, model=POLICY, records=True)

    def export(self) -> Snapshot:
        self._exports += 1
        exporters = [rank for rank in range(self._layout.ranks) if self._layout.is_exporter(rank)]
        command = Command(name="export", export=self._exports, held=self._held())
        own, *_ = self._run_on_all_ranks([command if rank in exporters else None for rank in range(self._layout.ranks)])
        others = tuple(RemotePart(self._group, rank, self._exports) for rank in exporters[1:] if self._group)
        self._parts.update(others)
        exported: Snapshot = dataclasses.replace(own, others=others)
        return exported

    def _held(self) -> tuple[int, ...]:
        """Return the exports whose parts the other ranks must keep."""
        return tuple(sorted({part.export for part in self._parts}))

    def save(self, folder: Path) -> None:
        self.begin_save(folder)
        self.finish_save(folder, wait=True)

    def begin_save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)  # once, and before other ranks access it
        self._run_on_all_ranks(Command(name="save", folder=str(folder)))

    def finish_save(self, folder: Path, *, wait: bool) -> Mapping[Path, str] | None:
        parts = self._run_on_all_ranks(Command(name="finish_save", folder=str(folder), waits=wait), SavedPart)
        if not all(part.is_done for part in parts):
            return None
        for rank, part in enumerate(parts):
            if part.problem:
                cause = OSError(part.errno, os.strerror(part.errno)) if part.errno else None
                raise CheckpointError(f"{folder}: learner rank {rank} cannot write its part: {part.problem}") from cause
        hashed: dict[Path, str] = {}
        for name, files in zip(self._job.saved, zip(*(part.files for part in parts), strict=True), strict=True):
            saved = models.saved_in(folder, name)
            hashed |= {saved / file: sha256 for file, sha256 in complete(saved, files).items()}
        return hashed

    def offload(self) -> None:
        # Who gets the GPUs next needs the memory of all of them, so the answers of all ranks are awaited.
        reports = self._run_on_all_ranks(Command(name="offload", held=self._held()), StepResult)
        self._offload_metrics = {name: value for report in reports for name, value in report.metrics.items()}

    def onload(self) -> None:
        self._run_on_all_ranks(Command(name="onload"))

    def restore(self, folder: Path) -> None:
        models.require_saved(folder, self._job.saved)
        for name, model in self._job.saved.items():  # before any rank gets the command: an error there ends all
            saved = models.saved_in(folder, name)
            lora.require_base(saved, model, base=SavedModel(saved).base)
        self._started().require_restorable(folder)
        self._run_on_all_ranks(Command(name="restore", folder=str(folder)))

    def close(self) -> None:
        if self._group:
            self._group.close()
            self._group = None
        if self._rank:
            self._rank.close()
            self._rank = None
        if self._children:
            self._children.close()
            self._children = None

    def _run_on_all_ranks(
        self, commands: Command | Sequence[Command | None], result: type = Done, *, shares: Shares | None = None
    ) -> list[Any]:
        """Execute a command on all ranks, or commands[i] on rank i unless it is None. Returns their results.

        result  type of the other ranks' results
        shares  what follows the commands

        Raises BackendError that names a rank which is gone or has failed: all ranks then end. An error of a lone rank
        is raised as it is.
        """
        if isinstance(commands, Command):
            commands = [commands] * self._layout.ranks
        rank, group, own = self._started(), self._group, commands[0]
        assert own is not None
        others = [(number, command) for number, command in enumerate(commands) if command is not None and number]
        with self._explain(own.name):
            if group is None:
                return [rank.execute(own)]
            for number, command in others:
                group.send(codec.encode(command), number, COMMAND)
            if shares is not None:
                shares.send(group)
            results = [rank.execute(own)]
            timeout = FOREVER if own.waits else self._info.timeout  # for a disk
            answers = [group.receive(number, RESULT, timeout=timeout) for number, _ in others]
            return [*results, *(codec.decode(answer, result) for answer in answers)]

    @contextmanager
    def _explain(self, doing: str) -> Iterator[None]:
        """Turn an error that leaves ranks at different places into a BackendError that names the cause."""
        try:
            yield
        except AsyncRLError:
            raise
        except Exception as error:
            if self._group is None and doing in ("step", "forward"):
                raise  # nothing has changed
            lost = self._group.lost() if self._group else ""  # torch knows only that a connection broke
            causes = "; ".join(filter(None, (lost, describe(error))))
            raise BackendError(f"{doing} failed on learner rank 0: {causes}") from error

    def _started(self) -> MegatronRank:
        if self._rank is None:
            raise BackendError("the megatron backend is not started")
        return self._rank
