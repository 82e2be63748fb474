"""The Megatron-Core backend: rank 0 runs in the learner's process and leads the other ranks.

Cheap to import: ``start`` imports Megatron. rank.py implements the work of a rank, followers.py the other processes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from asyncrl.backends import flops, frozen, huggingface, lora, models
from asyncrl.backends.adapter import BackendAdapter, constructor_arguments
from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.megatron import joined_ranks, rank_store, refusals, shared_settings, torchrun
from asyncrl.backends.megatron.background_save import SavedModel
from asyncrl.backends.megatron.followers import ChildRanks, Followers
from asyncrl.backends.megatron.held_parts import RemotePart
from asyncrl.backends.megatron.options import Options
from asyncrl.backends.megatron.rank_commands import Command, Job, Left, Place, Scores, left_behind
from asyncrl.backends.megatron.rank_link import described
from asyncrl.backends.megatron.refusals import require_tensors_of_engines, require_trainable
from asyncrl.backends.models import POLICY, AuxiliaryModel
from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.backends.port import StepResult
from asyncrl.config.adapter import Layout, RunConfig
from asyncrl.errors import AsyncRLError, BackendError, ConfigError, StepFailed
from asyncrl.os_process import learner_secret
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.batching.packing import MicroBatch, of_one_length
from asyncrl.tensors.snapshot import Snapshot

if TYPE_CHECKING:
    from asyncrl.backends.megatron.rank import MegatronRank


class MegatronBackend(BackendAdapter):
    """Rank 0 runs in the caller's process. At most one instance per process, because Megatron's state is global.

    ``layout`` defines how ranks share the model; copies of the model train different data.
    """

    options_type = Options
    replays_experts = True
    shares_gpus = True

    @classmethod
    def build(cls, run: RunConfig, *, algorithm: Algorithm, auxiliary: Mapping[str, AuxiliaryModel]) -> MegatronBackend:
        return cls(
            **constructor_arguments(cls, run, algorithm=algorithm, auxiliary=auxiliary),
            layout=run.learner.layout,
            transformer=run.learner.megatron,
            quantization=run.weights.quantization,
            seat=cls._seat_here(run),
            common=shared_settings.shared_settings(run, options=cls.options(run)),
        )

    @classmethod
    def _seat_here(cls, run: RunConfig) -> torchrun.Seat | None:
        return torchrun.seat(ranks=run.learner.ranks, secret=learner_secret())

    @classmethod
    def rank_here(cls, run: RunConfig) -> int:
        found = cls._seat_here(run)
        return 0 if found is None else found.rank

    @classmethod
    def environments(cls, run: RunConfig, *, port: int) -> Sequence[Mapping[str, str]]:
        learner = run.learner
        return torchrun.environments(ranks=learner.ranks, machines=learner.machines, port=port)

    @classmethod
    def check_machine(cls, run: RunConfig) -> None:
        super().check_machine(run)
        if importlib.util.find_spec("megatron") is None:
            raise ConfigError(
                'learner.backend: "megatron" needs megatron-core, which is not installed; '
                'pip install asyncrl[megatron], or use "reference"'
            )
        if run.learner.megatron:
            from asyncrl.backends.megatron.transformer_config import refuse_options  # takes seconds

            job = Job(
                models={},
                temperature=run.rollout.temperature,
                device="cpu",
                dtype=run.model.dtype,
                threads=0,
                layout=run.learner.layout,
                is_distributed_optimizer=False,
                recompute=cls.options(run).recompute,
                is_offloading=False,
                transformer=run.learner.megatron,
            )
            for key, folder in run.model_paths.items():
                refuse_options(job, huggingface.read_shape(folder, where=key), where=key)

    @classmethod
    def check_algorithm(cls, run: RunConfig, algorithm: Algorithm) -> None:
        if cls.options(run).aux_loss_coefficient and algorithm.scales_gradients:
            raise ConfigError(
                "learner.options.aux_loss_coefficient: the gradients of a batch are divided by what is left after the "
                'correction (algorithm.denominator = "after", or self_norm), which would scale this loss as well; '
                "remove one of them"
            )

    @classmethod
    def check(cls, run: RunConfig) -> None:
        refusals.check(run, balances_experts=cls.options(run).aux_loss_coefficient > 0)
        frozen.check(run, are_fused=True)
        lora.check(run)

    def __init__(
        self,
        model_path: Path,
        *,
        algorithm: Algorithm,
        optimizer: OptimizerSettings,
        temperature: float,
        device: str,
        dtype: str,
        threads: int,
        options: Options,
        layout: Layout | None = None,
        transformer: Mapping[str, Any] | None = None,
        quantization: str = "",
        auxiliary: Mapping[str, AuxiliaryModel] | None = None,
        seat: torchrun.Seat | None = None,
        common: Mapping[str, object] | None = None,
    ) -> None:
        """
        transformer  extra fields of Megatron's TransformerConfig
        quantization format of exports (tensors/quantized_model.py); empty: the folder's dtype
        seat         place of this process if the other ranks are started externally and join
        common       settings by name that all ranks must share
        """
        layout = layout or Layout()
        policy = AuxiliaryModel(path=model_path, objective=algorithm, optimizer=optimizer)
        self._job = Job(
            models=models.with_policy(policy, auxiliary or {}),
            temperature=temperature,
            device=device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu",
            dtype=dtype,
            threads=threads,
            layout=layout,
            is_distributed_optimizer=options.distributed_optimizer and layout.data_parallel * layout.context > 1,
            recompute=options.recompute,
            is_offloading=options.offload_optimizer,
            overlaps_tensor_parallel=options.overlap_tensor_parallel,
            transformer=dict(transformer or {}),
            quantization=quantization,
            aux_loss_coefficient=options.aux_loss_coefficient,
        )
        self._timeout_seconds = options.timeout_seconds
        self._layout = layout
        self._seat = seat
        self._common = common or {}
        self._shape: ModelShape | None = None
        self._followers: Followers | None = None
        self._own: MegatronRank | None = None
        self._exports = 0
        self._left: list[Left] = []
        self._parts: weakref.WeakSet[RemotePart] = weakref.WeakSet()  # parts that are still in use

    def start(self) -> None:
        if dist.is_initialized():
            raise BackendError("torch.distributed is already initialised in this process; MegatronBackend must do it")
        shapes = {
            name: require_trainable(
                model.path, where=models.where(name), layout=self._layout, transformer=self._job.transformer
            )
            for name, model in self._job.models.items()
        }
        self._shape = shapes[POLICY]
        require_tensors_of_engines(self._job.models[POLICY].path, self._shape)
        seconds, ranks = self._timeout_seconds, self._layout.ranks
        store = rank_store.serve(is_local=self._seat is None, timeout_seconds=seconds)
        places = [
            Place(rank=rank, ranks=ranks, host=rank_store.HOST, port=store.port, timeout_seconds=seconds)
            for rank in range(ranks)
        ]
        if self._seat is not None:
            places[0] = dataclasses.replace(places[0], local_rank=self._seat.local_rank)
            common = self._shared(self._seat)
            self._followers = joined_ranks.gather(self._seat, common, port=store.port, timeout_seconds=seconds)
        elif ranks > 1:
            self._followers = ChildRanks(self._job, places[1:])
        from asyncrl.backends.megatron.rank import MegatronRank  # takes seconds, in parallel with the fork server

        if self._followers:
            self._followers.wait_until_ready()
        with self._explaining("start"):
            self._own = MegatronRank(self._job, places[0], store=store)

    def serve(self) -> None:
        if self._seat is None or self._seat.rank == 0:
            raise BackendError("this process is the learner; only its other ranks serve")
        joined_ranks.serve(self._job, self._seat, self._shared(self._seat), timeout_seconds=self._timeout_seconds)

    def _shared(self, seat: torchrun.Seat) -> dict[str, str]:
        """Return digests of what all ranks must share."""
        folders = {models.where(name): model.path for name, model in self._job.models.items()}
        return shared_settings.digests(seat.secret, self._common, folders)

    def step(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = POLICY
    ) -> StepResult:
        trained = {name: held for name, held in self._job.models.items() if held.is_trained}
        models.find(trained, model, doing="step")
        began = time.perf_counter()
        commands = self._commands("step", dp_shards, model=model, learning_rate=learning_rate)
        result: StepResult = self._together(commands)
        if model != POLICY:
            return result
        metrics = {**result.metrics, **self._speed(dp_shards, time.perf_counter() - began)}
        metrics |= left_behind(self._left)
        return StepResult(metrics=metrics, tokens={**result.tokens, **self._tokens_of_followers(commands)})

    def _tokens_of_followers(self, commands: Sequence[Command]) -> dict[int, NDArray[np.float32]]:
        ranks = [rank for rank in self._layout.scorers if rank and commands[rank].has_recorded]
        told = self._followers.scores(ranks) if self._followers else []
        return {number: row for one in told for number, row in zip(one.documents, one.rows, strict=True)}

    def _commands(
        self, name: str, dp_shards: Sequence[Sequence[MicroBatch]], *, model: str, learning_rate: float = 0.0
    ) -> list[Command]:
        """Return one command per rank. All ranks of a copy of the model get the same share."""
        copies = self._layout.data_parallel
        if len(dp_shards) != copies:
            raise BackendError(f"{copies} data-parallel learner ranks need as many shards, got {len(dp_shards)}")
        shares = dp_shards if self._layout.expert == 1 else of_one_length(dp_shards)
        batch_tokens = sum(row.num_tokens for shard in dp_shards for row in shard if not row.is_filler)
        return [
            Command(
                name=name,
                model=model,
                micro_batches=tuple(shares[self._layout.share(rank)]),
                batch_tokens=batch_tokens,
                learning_rate=learning_rate,
            )
            for rank in range(self._layout.ranks)
        ]

    def _speed(self, dp_shards: Sequence[Sequence[MicroBatch]], seconds: float) -> dict[str, float]:
        """Return the throughput of one step over all ranks; MFU only on a device whose peak is known."""
        lengths = np.concatenate(
            [np.diff(row.boundaries) for shard in dp_shards for row in shard] or [np.zeros(0, int)]
        )
        metrics = {"learner/step_tokens_per_second": float(lengths.sum()) / seconds}
        peak = flops.peak_flops(torch.cuda.get_device_name()) if self._job.device == "cuda" else None
        if peak and self._shape:
            settings = self._job.models[POLICY].optimizer
            has_adapters = settings is not None and settings.lora is not None
            work = flops.training_flops(self._shape, lengths.tolist(), has_adapters=has_adapters)
            metrics["learner/mfu"] = work / (seconds * peak * self._layout.ranks)
        return metrics

    def score(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, model: str = POLICY
    ) -> list[list[NDArray[np.float32]]]:
        models.find(self._job.models, model, doing="score")
        own: Scores = self._together(self._commands("score", dp_shards, model=model))
        answers = [own, *(self._followers.scores(range(1, self._layout.ranks)) if self._followers else [])]
        if problem := next((scores.problem for scores in answers if scores.problem), ""):
            raise self._failed("score", problem)
        return [
            list(answers[rank].rows[: len(share)]) for rank, share in zip(self._layout.scorers, dp_shards, strict=True)
        ]

    def export(self) -> Snapshot:
        self._exports += 1
        exporters = [rank for rank in range(self._layout.ranks) if self._layout.is_exporter(rank)]
        command = Command(name="export", export=self._exports, held=self._held())
        own: Snapshot = self._together([command if rank in exporters else None for rank in range(self._layout.ranks)])
        links = self._followers.parts if self._followers else {}
        others = tuple(RemotePart(links[rank], self._exports) for rank in exporters[1:])
        self._parts.update(others)
        return dataclasses.replace(own, others=others)

    def save(self, folder: Path) -> None:
        self.begin_save(folder)
        self.finish_save(folder, wait=True)

    def begin_save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)  # once, and before other ranks access it
        self._together([Command(name="save", folder=str(folder))] * self._layout.ranks)

    def finish_save(self, folder: Path, *, wait: bool) -> Mapping[Path, str] | None:
        command = Command(name="saved", folder=str(folder), waits=wait)
        files: Mapping[str, str] | None = self._together([command] * self._layout.ranks)
        return None if files is None else {Path(file): sha256 for file, sha256 in files.items()}

    def offload(self) -> None:
        own: Left = self._together([Command(name="offload", held=self._held())] * self._layout.ranks)
        # Who gets the GPUs next needs the memory of all of them, and a rank may end its first steps seconds after us.
        self._left = [own, *(self._followers.left() if self._followers else [])]

    def _held(self) -> tuple[int, ...]:
        """Return the exports whose parts the followers must keep."""
        return tuple(sorted({part.export for part in self._parts}))

    def onload(self) -> None:
        self._together([Command(name="onload")] * self._layout.ranks)

    def restore(self, folder: Path) -> None:
        trained = [name for name, model in self._job.models.items() if model.is_trained]
        models.require_saved(folder, trained)
        for name in trained:  # before followers get the command: a user's mistake would end them with a traceback
            saved = models.saved_in(folder, name)
            lora.require_base(saved, self._job.models[name], base=SavedModel(saved).base)
        self._started().require_restorable(folder)
        self._together([Command(name="restore", folder=str(folder))] * self._layout.ranks)

    def close(self) -> None:
        if self._followers:
            self._followers.close_links()
        if self._own:
            self._own.close()
            self._own = None
        if self._followers:
            self._followers.close()
            self._followers = None

    def _together(self, commands: Sequence[Command | None]) -> Any:
        """Run commands[i] on rank i unless it is None, and return rank 0's result. Rank 0 must have a command."""
        own = commands[0]
        assert own is not None
        if self._followers and self._own:
            self._followers.send(commands[1:])
        rank = self._started()
        with self._explaining(own.name), self._watched(own.name, rank):
            try:
                return rank.obey(own)
            except StepFailed as error:
                problems = [str(error), *(self._followers.problems() if self._followers else [])]
                raise self._failed(own.name, next(filter(None, problems), "")) from error

    def _watched(self, doing: str, rank: MegatronRank) -> AbstractContextManager[None]:
        if self._followers is None:
            return nullcontext()
        return self._followers.watched(doing, lambda: rank.rows_begun, seconds=self._timeout_seconds)

    def _failed(self, doing: str, problem: str) -> BackendError:
        """Return a StepFailed, after which all ranks are unchanged; a BackendError if a rank is gone."""
        if self._followers and (obituary := self._followers.obituary(within=0.0)):  # all of them have just answered
            return BackendError(f"{doing} failed on learner rank 0: {obituary}; {problem}")
        return StepFailed(problem)

    @contextmanager
    def _explaining(self, doing: str) -> Iterator[None]:
        """Turn torch's RuntimeError (lost peer, timeout, out of memory) into a BackendError that names the cause.

        Any other exception is converted as well, because it also leaves the ranks at different places.
        """
        try:
            yield
        except AsyncRLError:
            raise
        except Exception as error:
            others = self._followers.obituary() if self._followers else ""  # one of them may be the cause, or this one
            causes = "; ".join(filter(None, (others, described(error))))
            raise BackendError(f"{doing} failed on learner rank 0: {causes}") from error

    def _started(self) -> MegatronRank:
        if self._own is None:
            raise BackendError("the megatron backend is not started")
        return self._own
