"""Compare what engines load per version, on one GPU: the whole model in bfloat16, in 8 bits, or only adapters.

Reports for each kind: bytes, pause and seconds of a load while answers are in flight, answers with tokens of two
versions, and the mismatch between the trainer's logprobs and the engine's.

    python -m benchmarks.gpu.versions OUT.jsonl

The model has 264M random parameters. Three servers and a learner share the GPU, so times are longer than on an idle
one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from asyncrl.backends.megatron.backend import MegatronBackend
from asyncrl.backends.megatron.options import Options as LearnerOptions
from asyncrl.backends.optimizer_settings import Lora, OptimizerSettings
from asyncrl.config.learner import LoraSection
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.engines.generation import Generation
from asyncrl.engines.sglang.engine import Options, SGLangEngine
from asyncrl.messages import SamplingParams, WeightVersion
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching.packing import Document, MicroBatch, pack_for_ranks
from asyncrl.tensors import quantized_model
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.files import FilesChannel

PLACE: Final = Path("/dev/shm/versions")
START_SECONDS: Final = 540.0
"""For a server; it may have to compile kernels."""
PROMPT: Final = np.array([5, 9, 12, 7, 30, 8, 21, 33], dtype=np.int32)
IN_FLIGHT: Final = 32
LONG: Final = SamplingParams(max_new_tokens=1024, ignore_eos=True)
SHORT: Final = SamplingParams(max_new_tokens=256, ignore_eos=True)
RANK: Final = 16
ARGUMENTS: Final = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "mem-fraction-static": 0.45,
    "max-total-tokens": 65_536,
    "disable-prefill-cuda-graph": True,
    "cuda-graph-max-bs": IN_FLIGHT,
}


def model() -> Path:
    folder = make_tiny_model(
        PLACE / "model",
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        max_positions=4096,
        initializer_range=0.03,
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    weights = {name: one.bfloat16() for name, one in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def engine(folder: Path, kind: str, *, logs: Path = PLACE, **server_arguments: Any) -> SGLangEngine:
    return SGLangEngine(
        folder,
        device="cuda",
        dtype="bfloat16",
        version=(0, 0),
        options=Options(server_arguments=ARGUMENTS | server_arguments, start_seconds=START_SECONDS),
        log_path=logs / f"{kind}.log",
        lora=LoraSection(rank=RANK, publish="adapter") if kind == "adapter" else None,
        quantization=kind if kind in quantized_model.FORMATS else "",
        quantized=PLACE / f"model-{kind}",
    )


def learner(folder: Path, *, lora: Lora | None) -> MegatronBackend:
    return MegatronBackend(
        folder,
        algorithm=resolve(ALGORITHMS["grpo"]),
        optimizer=OptimizerSettings(lora=lora),
        temperature=1.0,
        device="cuda",
        dtype="bfloat16",
        threads=0,
        options=LearnerOptions(),
    )


def packed(answers: Sequence[Generation]) -> list[list[MicroBatch]]:
    documents = []
    for number, answer in enumerate(answers):
        tokens = np.concatenate([PROMPT, answer.tokens])
        mask = np.arange(len(tokens)) >= len(PROMPT)
        documents.append(
            Document(
                tokens=tokens,
                response_mask=mask,
                behavior_logprobs=np.concatenate([np.zeros(len(PROMPT), np.float32), answer.logprobs]),
                advantages=np.where(mask, (-1.0) ** number, 0).astype(np.float32),
                loss_weights=np.where(mask, 1 / (len(answers) * mask.sum()), 0).astype(np.float32),
                staleness=np.zeros(len(tokens), np.int32),
            )
        )
    return pack_for_ranks(documents, ranks=1, max_tokens=16_384)


def mismatch(backend: MegatronBackend, answers: Sequence[Generation]) -> dict[str, float]:
    """Return the mismatch, the trainer's logprobs minus the engine's, in nats per token."""
    shares = packed(answers)
    found = []
    for row, scores in zip(shares[0], backend.score(shares)[0], strict=True):
        found.append((scores - row.behavior_logprobs)[row.response_mask])
    difference = np.concatenate(found).astype(np.float64)
    return {
        "tokens": len(difference),
        "mean_difference": float(np.abs(difference).mean()),
        "max_difference": float(np.abs(difference).max()),
        "k3": float((np.exp(difference) - 1 - difference).mean()),
        "mean_logprob": float(np.mean(np.concatenate([answer.logprobs for answer in answers]))),
    }


async def answers(served: SGLangEngine, sampling: SamplingParams) -> list[Generation]:
    return await asyncio.gather(*(served.generate(PROMPT, sampling, seed=seed) for seed in range(IN_FLIGHT)))


async def loaded(served: SGLangEngine, versions: Sequence[WeightVersion]) -> dict[str, Any]:
    """Load versions with answers in flight; return the medians, and the versions of the answers' tokens."""
    running = asyncio.create_task(answers(served, LONG))
    await asyncio.sleep(0.3)
    reports = [await served.load(version) for version in versions]
    ended = await running
    return {
        "bytes": versions[-1].num_bytes,
        "pause_ms": [round(1000 * report.pause_seconds, 1) for report in reports],
        "load_ms": [round(1000 * report.load_seconds, 1) for report in reports],
        "answers": len(ended),
        "answers_of_two_versions": sum(len(answer.version_spans) > 1 for answer in ended),
    }


def published(kind: str, snapshots: Sequence[Snapshot], folder: Path) -> list[WeightVersion]:
    channel = FilesChannel(PLACE / "weights" / kind, keep=8, model_path=folder)
    return [
        channel.publish(snapshot, incarnation=0, policy_version=number)
        for number, snapshot in enumerate(snapshots, start=1)
    ]


async def measured(rows: list[dict[str, Any]]) -> None:
    folder = await asyncio.to_thread(model)
    quantized_model.model_folder(folder, PLACE / "model-fp8", "fp8")
    engines = {kind: engine(folder, kind) for kind in ("bf16", "fp8", "adapter")}
    began = time.monotonic()
    results = await asyncio.gather(*(one.start() for one in engines.values()), return_exceptions=True)
    up = {}
    for (kind, one), result in zip(engines.items(), results, strict=True):
        if isinstance(result, BaseException):
            rows.append({"kind": kind, "problem": str(result)[-1500:]})
        else:
            up[kind] = one
    print(f"{list(up)} up after {time.monotonic() - began:.0f} s", flush=True)
    try:
        await _whole(up, folder, rows)
        if "adapter" in up:
            await _adapters(up["adapter"], folder, rows)
    finally:
        await asyncio.gather(*(one.close() for one in engines.values()))


async def _whole(up: dict[str, SGLangEngine], folder: Path, rows: list[dict[str, Any]]) -> None:
    backend = learner(folder, lora=None)
    backend.start()
    try:
        first = await answers(next(iter(up.values())), SHORT)
        snapshots, seconds = [], []
        for _ in range(3):
            backend.step(packed(first), learning_rate=2e-6)
            snapshots.append(backend.export())
        quantized = []
        for snapshot in snapshots:
            began = time.monotonic()
            quantized.append(Snapshot.of(quantized_model.quantized(snapshot.tensors(), "fp8")))
            seconds.append(time.monotonic() - began)
        for kind, made in (("bf16", snapshots), ("fp8", quantized)):
            if kind in up:
                row: dict[str, Any] = {"kind": kind} | await loaded(up[kind], published(kind, made, folder))
                row |= mismatch(backend, await answers(up[kind], SHORT))
                row |= {"quantize_ms": [round(1000 * one, 1) for one in seconds]} if kind == "fp8" else {}
                rows.append(row)
                print(json.dumps(row), flush=True)
    finally:
        backend.close()


async def _adapters(served: SGLangEngine, folder: Path, rows: list[dict[str, Any]]) -> None:
    backend = learner(folder, lora=Lora(rank=RANK, alpha=32.0, modules=("all-linear",), is_merged=False))
    backend.start()
    try:
        first = await answers(served, SHORT)
        base = mismatch(backend, first)
        snapshots = []
        for _ in range(3):
            backend.step(packed(first), learning_rate=1e-3)
            snapshots.append(backend.export())
        moved = mismatch(backend, first)
        row = {"kind": "adapter"} | await loaded(served, published("adapter", snapshots, folder))
        row |= mismatch(backend, await answers(served, SHORT))
        row |= {"of_the_model_itself": base, "old_answers_under_new_adapters": moved}
        rows.append(row)
        print(json.dumps(row), flush=True)
    finally:
        backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.versions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("out", type=Path, metavar="OUT.jsonl", help="write one object a line")
    out: Path = parser.parse_args().out
    shutil.rmtree(PLACE, ignore_errors=True)
    rows: list[dict[str, Any]] = []
    try:
        asyncio.run(measured(rows))
    finally:
        machine = torch.cuda.get_device_name()
        out.write_text("".join(json.dumps(row | {"machine": machine}) + "\n" for row in rows))


if __name__ == "__main__":
    main()
