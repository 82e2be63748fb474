"""The work of a child of learner.py: measure the learner's step once, or compare layouts once."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypedDict

import numpy as np
import safetensors.torch
import torch

from asyncrl.backends import flops, huggingface
from asyncrl.backends.families.shape import VisionTower
from asyncrl.backends.megatron.backend import MegatronBackend
from asyncrl.backends.megatron.job import Job, Options
from asyncrl.backends.megatron.rank_group import RankInfo
from asyncrl.backends.models import POLICY, AuxiliaryModel
from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.config.layout import Layout
from asyncrl.config.learner import VISION_TOWER
from asyncrl.messages.images import ImageRef
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching.images import ImagePatches
from asyncrl.policies.batching.packing import MicroBatch, TrainingSequence, pack_for_ranks
from asyncrl.tensors.snapshot import PartWorker, Snapshot
from benchmarks.gpu.learner_profile import profiled

PEAKS: Final = (790e12, 989e12)
LEARNING_RATE: Final = 1e-6
TIMEOUT_SECONDS: Final = 120.0
METRICS: Final = ("loss", "grad_norm", "entropy", "offpolicy/ess")
"""Metrics of a step in which layouts should agree."""


class Sizes(TypedDict, total=False):
    """The sizes of a Variant's layout; each defaults to 1."""

    data_parallel: int
    tensor_parallel: int
    context_parallel: int
    pipeline_parallel: int
    expert_parallel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One measurement. Each copy of the model trains ``micro_batches`` rows per step.

    tokens  tokens of one packed row
    """

    shape: str
    tokens: int
    data_parallel: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    """Expert parallelism over the data-parallel ranks."""
    recompute: str = "none"
    micro_batches: int = 1
    length: int = 1024
    compile: bool = True
    offload: bool = False
    optimizer_device: str = "learner"
    gradients_dtype: str = "float32"
    overlap: bool = True
    """Tensor-parallel ranks exchange rows while they multiply."""
    distributed_optimizer: bool = True
    side: int = 0
    """Patches per side of the picture with which each sequence begins; 0: it has none."""
    trains_vision: bool = False

    @property
    def name(self) -> str:
        others = {"cp": self.context_parallel, "pp": self.pipeline_parallel, "ep": self.expert_parallel}
        layout = f"dp{self.data_parallel}tp{self.tensor_parallel}" + "".join(
            f"{word}{size}" for word, size in others.items() if size > 1
        )
        extras = [
            "" if self.compile else "eager",
            "" if self.distributed_optimizer else "replicated",
            "offload" if self.offload else "",
            "host-adamw" if self.optimizer_device == "cpu" else "",
            "grads16" if self.gradients_dtype == "bfloat16" else "",
            "overlap" if self.is_overlapped else "",
            f"side{self.side}" if self.side else "",
            "tower" if self.trains_vision else "",
        ]
        parts = [self.shape, f"{self.tokens}x{self.micro_batches}", layout, self.recompute, *filter(None, extras)]
        return "-".join(parts)

    @property
    def is_overlapped(self) -> bool:
        return self.overlap and self.tensor_parallel > 1

    @property
    def layout(self) -> Layout:
        """The layout as in a run file; tensor-parallel ranks share the row."""
        return Layout(
            ranks=self.data_parallel * self.tensor_parallel * self.context_parallel * self.pipeline_parallel,
            tensor=self.tensor_parallel,
            context=self.context_parallel,
            pipeline=self.pipeline_parallel,
            expert=self.expert_parallel,
            is_sequence_parallel=self.tensor_parallel > 1,
        )


def sequences(variant: Variant, *, vocabulary: int, seed: int) -> list[TrainingSequence]:
    """Return sequences for one row per micro-batch of each rank, a few per cent below what fits into these rows."""
    random = np.random.default_rng(seed)
    made = []
    rows = variant.micro_batches * variant.data_parallel
    spread = variant.length / 4 if variant.length < variant.tokens else 0.0  # full rows do not vary
    for _ in range(rows):
        left = int(variant.tokens * (random.uniform(0.98, 1.0) if rows == 1 else random.uniform(0.94, 0.96)))
        while left > 1:
            drawn = int(np.clip(random.normal(variant.length, spread), 2, 2 * variant.length))
            length = left if left - drawn < 2 else min(drawn, left)
            left -= length
            made.append(sequence(length, vocabulary=vocabulary, random=random))
    return made


def sequence(length: int, *, vocabulary: int, random: np.random.Generator) -> TrainingSequence:
    mask = np.arange(length) > 0
    return TrainingSequence(
        tokens=random.integers(0, vocabulary, length).astype(np.int32),
        response_mask=mask,
        behavior_logprobs=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
        advantages=np.where(mask, random.standard_normal(), 0).astype(np.float32),
        loss_weights=np.where(mask, 1 / 16_384, 0).astype(np.float32),
        staleness=np.zeros(length, np.int32),
    )


def with_pictures(batch: Sequence[TrainingSequence], side: int, *, vision: VisionTower) -> list[TrainingSequence]:
    """Return the sequences, each long enough with a picture of its own after its first token; all have equal pixels."""
    size = side * side // vision.merged
    pixels = np.random.default_rng(0).standard_normal((side * side, vision.patch_size)).astype(np.float32)
    made = []
    for number, one in enumerate(batch):
        if len(one) < size + 2:
            made.append(one)
            continue
        reference = ImageRef(digest=f"{number:064x}", grid=(1, side, side), start=1, num_tokens=size)
        mask = one.response_mask & (np.arange(len(one)) > size)
        made.append(dataclasses.replace(one, response_mask=mask, images=(ImagePatches(ref=reference, patches=pixels),)))
    return made


def shares(variant: Variant, batch: Sequence[TrainingSequence]) -> list[list[MicroBatch]]:
    return pack_for_ranks(batch, ranks=variant.data_parallel, max_tokens=variant.tokens)


def made(variant: Variant, folder: Path, *, device: str, dtype: str, info: RankInfo | None = None) -> MegatronBackend:
    """Return the backend, not started.  info: this process among its ranks if the other ranks are started separately"""
    settings = OptimizerSettings(freeze=() if variant.trains_vision else (VISION_TOWER,))
    policy = AuxiliaryModel(path=folder, objective=resolve(ALGORITHMS["grpo"]), optimizer=settings)
    job = Job(
        models={POLICY: policy},
        temperature=1.0,
        device=device,
        dtype=dtype,
        threads=0,
        options=Options(
            recompute=variant.recompute,  # type: ignore[arg-type]
            distributed_optimizer=variant.distributed_optimizer,
            offload_optimizer=variant.offload,
            optimizer_device=variant.optimizer_device,  # type: ignore[arg-type]
            gradients_dtype=variant.gradients_dtype,  # type: ignore[arg-type]
            overlap_tensor_parallel=variant.overlap,
            timeout_seconds=TIMEOUT_SECONDS,
        ),
        layout=variant.layout,
    )
    return MegatronBackend(job, info=info)


@contextlib.contextmanager
def backend(
    variant: Variant, folder: Path, *, device: str, dtype: str, info: RankInfo | None = None
) -> Iterator[MegatronBackend]:
    learner = made(variant, folder, device=device, dtype=dtype, info=info)
    try:
        learner.start()
        yield learner
    finally:
        learner.close()
        del learner
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def checkpointed(learner: MegatronBackend, share: Sequence[Sequence[MicroBatch]], folder: Path) -> dict[str, Any]:
    """Write a checkpoint that training waits for, and one concurrent with steps; return their seconds and the waits.

    The seconds of the first one include allocating host memory, which the second one reuses.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        first, second = Path(temporary, "first"), Path(temporary, "second")
        began = time.perf_counter()
        learner.save(first)
        waited = time.perf_counter() - began
        num_bytes = sum(path.stat().st_size for path in first.rglob("*") if path.is_file())
        began = time.perf_counter()
        learner.begin_save(second)
        pause = time.perf_counter() - began
        beside = []
        while learner.finish_save(second, wait=False) is None:
            begin = time.perf_counter()
            learner.step(share, learning_rate=LEARNING_RATE)
            beside.append(time.perf_counter() - begin)
        whole = time.perf_counter() - began
    return {
        "checkpoint_bytes": num_bytes,
        "checkpoint_waited_seconds": waited,
        "checkpoint_pause_seconds": pause,
        "checkpoint_beside_seconds": whole,
        "checkpoint_steps": len(beside),
        "checkpoint_step_seconds": float(np.median(beside)) if beside else 0.0,
    }


def measure(
    variant: Variant,
    folder: Path,
    *,
    device: str,
    warm_up: int,
    steps: int,
    profile: Path | None,
    checkpoints: Path | None,
    told: Callable[[str], None],
) -> dict[str, Any]:
    """Run ``warm_up`` steps, in which kernels are compiled and memory is allocated, then ``steps`` timed ones.

    checkpoints  folder for two checkpoints
    told         called with the name of each step that begins
    """
    torch.compiler.set_stance("default" if variant.compile else "force_eager")
    shape = huggingface.read_shape(folder)
    batches = [sequences(variant, vocabulary=shape.vocabulary_size, seed=seed) for seed in range(warm_up + steps)]
    if variant.side:
        assert shape.vision is not None, f"{variant.shape} reads no pictures"
        batches = [with_pictures(batch, variant.side, vision=shape.vision) for batch in batches]
    packed = [shares(variant, batch) for batch in batches]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with backend(variant, folder, device=device, dtype="bfloat16") as learner:
        started = time.perf_counter()
        warm_seconds, _ = timed(learner, packed[:warm_up], device=device, told=told)
        seconds, metrics = timed(learner, packed[warm_up:], device=device, told=told)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        begin = time.perf_counter()
        learner.export()
        exported = time.perf_counter() - begin
        phases: dict[str, Any] = {}
        if profile:
            again = partial(learner.step, packed[-1], learning_rate=LEARNING_RATE)
            phases |= profiled(again, name=variant.name, device=device, folder=profile)
        phases |= checkpointed(learner, packed[-1], checkpoints) if checkpoints else {}
    lengths = [[len(d) for d in batch] for batch in batches[warm_up:]]
    work = sum(flops.training_flops(shape, step) for step in lengths)
    grids = [one.ref.grid for batch in batches[warm_up:] for sequence in batch for one in sequence.images]
    if shape.vision:
        work += flops.vision_flops(shape.vision, grids, is_trained=variant.trains_vision)
    work /= sum(seconds)
    ranks = variant.layout.ranks
    return {
        **dataclasses.asdict(variant),
        "name": variant.name,
        "warm_up": warm_up,
        "steps": steps,
        "sequences": len(lengths[0]),
        "step_tokens": sum(lengths[0]),
        "step_pictures": len(grids) / steps,
        "step_seconds": float(np.median(seconds)),
        "slowest_seconds": max(seconds),
        "tokens_per_second": sum(map(sum, lengths)) / sum(seconds),
        "tokens_per_second_per_gpu": sum(map(sum, lengths)) / sum(seconds) / ranks,
        "mfu_790": work / ranks / PEAKS[0],
        "mfu_989": work / ranks / PEAKS[1],
        "mfu_790_without_attention": 6.0
        * flops.matrix_parameters(shape)
        * sum(map(sum, lengths))
        / sum(seconds)
        / ranks
        / PEAKS[0],
        "peak_gib": peak,
        "host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "host_update_seconds": metrics.get("learner/update_seconds", 0.0),
        "export_seconds": exported,
        "start_seconds": started - began,
        "warm_seconds": sum(warm_seconds),
        "loss": metrics["loss"],
        "entropy": metrics["entropy"],
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        **phases,
    }


def timed(
    learner: MegatronBackend,
    packed: Sequence[Sequence[Sequence[MicroBatch]]],
    *,
    device: str,
    told: Callable[[str], None],
) -> tuple[list[float], Mapping[str, float]]:
    """Run a step on each share. Return their seconds and the metrics of the last.

    A step lasts until the next one begins, and the last one until the device is idle.
    """
    begins: list[float] = []
    metrics: Mapping[str, float] = {}
    for number, share in enumerate(packed):
        told(f"step {number}")
        begins.append(time.perf_counter())
        metrics = learner.step(share, learning_rate=LEARNING_RATE).metrics
    if device == "cuda":
        torch.cuda.synchronize()
    return np.diff([*begins, time.perf_counter()]).tolist(), metrics


# -- agreement of layouts ----------------------------------------------------------------------------------------------


def agree(folder: Path, *, device: str, dtype: str, tokens: int, layouts: Sequence[Sizes]) -> dict[str, Any]:
    """Run three steps on the same sequences in each layout, and compare metrics and weights with the first layout.

    Each other layout then takes the last step again, from the checkpoint that the first layout wrote before it.
    """
    shape = huggingface.read_shape(folder)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        saved = Path(temporary, "saved")
        for layout in layouts:
            variant = Variant(shape="agree", tokens=tokens, length=256, **layout)
            same = dataclasses.replace(variant, data_parallel=2)  # the same number of sequences for every layout
            batches = [sequences(same, vocabulary=shape.vocabulary_size, seed=seed) for seed in range(3)]
            cut = [pack_for_ranks(batch, ranks=variant.data_parallel, max_tokens=tokens) for batch in batches]
            print(json.dumps({"begins": variant.name}), flush=True)
            with backend(variant, folder, device=device, dtype=dtype) as learner:
                before = cpu_weights(learner)
                metrics = []
                for share in cut:
                    if share is cut[-1] and not results:
                        learner.save(saved)
                    metrics.append(dict(learner.step(share, learning_rate=1e-3).metrics))
                after = resumed = cpu_weights(learner)
                if results:
                    learner.restore(saved)
                    learner.step(cut[-1], learning_rate=1e-3)
                    resumed = cpu_weights(learner)
            results.append({"layout": variant.name, "metrics": metrics, "weights": after, "resumed": resumed})
            moved = mean_distance(after, before)
    first = results[0]
    rows = []
    for other in results[1:]:
        worst = worst_metric(first["metrics"], other["metrics"])
        rows.append(
            {
                "layout": other["layout"],
                "worst_metric": worst[1],
                "worst_metric_relative": worst[0],
                "weights_largest": max(
                    float((other["weights"][n] - first["weights"][n]).abs().max()) for n in first["weights"]
                ),
                "weights_mean_over_moved": mean_distance(other["weights"], first["weights"]) / moved,
                "resumed_mean_over_moved": mean_distance(other["resumed"], first["weights"]) / moved,
            }
        )
    return {"agree": rows, "dtype": dtype, "moved_mean": moved, "grad_norm": [m["grad_norm"] for m in first["metrics"]]}


def worst_metric(first: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> tuple[float, str]:
    """Return the largest relative difference between metrics of the same steps, and the metric's name."""
    return max(
        (abs(b[name] - a[name]) / max(1e-6, abs(a[name])), name)
        for a, b in zip(first, other, strict=True)
        for name in METRICS
    )


class PartBytes(PartWorker):
    """A rank's part of the weights as the bytes of a safetensors file."""

    def __call__(self, snapshot: Snapshot, order: bytes) -> bytes:
        made: bytes = safetensors.torch.save(dict(snapshot.tensors()))
        return made


def cpu_weights(learner: MegatronBackend) -> dict[str, torch.Tensor]:
    """Return the weights of the whole model, from all ranks that export a part."""
    exported = learner.export()
    parts = exported.run_on_parts(PartBytes(), [b""] * (1 + len(exported.others)))
    return {name: tensor.float() for part in parts for name, tensor in safetensors.torch.load(part).items()}


def mean_distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    total = sum(float((first[name] - second[name]).abs().sum()) for name in first)
    return total / sum(tensor.numel() for tensor in first.values())
