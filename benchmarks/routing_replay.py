"""Compare the mismatch of trainer and engine in a mixture of experts with the trainer's own and with replayed routing.

    python -m benchmarks.routing_replay --json docs/results/routing_replay.jsonl     SGLang and Megatron, on a CPU

A tiny random model (four layers, two of eight experts per token) samples 320 tokens. The trainer computes their
logprobs twice.

decisions, tokens     share of (token, layer) pairs that the trainer's own router sends to other experts than the
                      engine, and share of tokens with any such pair
own, replayed         |trainer - engine| in nats per token: mean and max; k3 of KL(engine || trainer)
outside               share of ratios outside [0.8, 1.25]
noise                 difference between the trainer's weights and the engine's, in standard deviations of each tensor;
                      stands for an engine that is a few versions behind
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray

from asyncrl.backends.megatron.backend import MegatronBackend
from asyncrl.backends.megatron.job import Job
from asyncrl.backends.megatron.job import Options as MegatronOptions
from asyncrl.backends.models import POLICY, AuxiliaryModel
from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.config.layout import Layout
from asyncrl.engines.generation import Generation
from asyncrl.engines.inprocess import engine as inprocess
from asyncrl.engines.port import Engine
from asyncrl.engines.sglang import engine as sglang
from asyncrl.messages import SamplingParams
from asyncrl.messages.routing import NO_EXPERTS, unrouted
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching.packing import MicroBatch, TrainingSequence
from tests.harness.families import make_tiny_family
from tests.harness.packing import pack

ARMS: Final = (
    ("float32", "float32", 0.0),
    ("bfloat16", "float32", 0.0),
    ("bfloat16", "bfloat16", 0.0),
    ("bfloat16", "bfloat16", 0.02),
)
"""Engine, trainer, noise."""
PROMPTS: Final = [np.arange(4 + n, 10 + 4 * n, dtype=np.int32) % 40 + 4 for n in range(8)]
SAMPLING: Final = SamplingParams(max_new_tokens=40, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="qwen3_moe", help="qwen3_moe, glm4_moe, deepseek_v3")
    parser.add_argument("--engine", choices=("sglang", "inprocess"), default="sglang")
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for row in rows(Path(scratch), options.architecture, options.engine):
            print(show(row), flush=True)
            if options.json is not None:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def rows(scratch: Path, architecture: str, engine: str) -> Iterator[dict[str, Any]]:
    folder = make_tiny_family(scratch / "model", architecture=architecture, num_layers=4, initializer_range=0.15)
    sampled = asyncio.run(_sampled(engine, folder, scratch))
    for of_engine, of_trainer, noise in ARMS:
        packed = sampled[of_engine]
        with _trainer(_noisy(folder, scratch / "noisy", noise) if noise else folder, of_trainer) as backend:
            with recorded_routing() as routed:
                own = backend.forward([[dataclasses.replace(packed, experts=NO_EXPERTS)]])[0][0]
            replayed = backend.forward([[packed]])[0][0]
        differs = differing({layer: found[0] for layer, found in routed.items()}, packed)
        yield {
            "architecture": architecture,
            "server": engine,
            "engine": of_engine,
            "trainer": of_trainer,
            "noise": noise,
            "sampled": int(packed.response_mask.sum()),
            "decisions": round(float(differs.mean()), 4),
            "tokens": round(float(differs.any(-1).mean()), 4),
            "own": distance(own, packed),
            "replayed": distance(replayed, packed),
        }


def show(row: dict[str, Any]) -> str:
    first = f"{row['engine']} / {row['trainer']}" + (f", noise {row['noise']}" if row["noise"] else "")
    parts = [
        f"{name}: mean {of['mean']:.1e}, max {of['max']:.3f}, k3 {of['k3']:.1e}, outside {of['outside']:.1%}"
        for name, of in (("own", row["own"]), ("replayed", row["replayed"]))
    ]
    return f"{first:32s} {row['decisions']:.1%} of decisions ({row['tokens']:.1%} of tokens)  " + "  ".join(parts)


def _engine(kind: str, folder: Path, dtype: str, scratch: Path) -> Engine:
    common: dict[str, Any] = {"device": "cpu", "dtype": dtype, "version": (0, 0), "reports_experts": True}
    if kind == "inprocess":
        return inprocess.InProcessEngine(folder, options=inprocess.Options(threads=1), **common)
    options = sglang.Options(server_arguments={"max-total-tokens": 20_000}, start_seconds=3600.0)
    return sglang.SGLangEngine(folder, options=options, log_path=scratch / f"{dtype}.log", **common)


async def _sampled(kind: str, folder: Path, scratch: Path) -> dict[str, MicroBatch]:
    """Return the sampled batches by the engine's dtype."""
    kinds = list(dict.fromkeys(of_engine for of_engine, _, _ in ARMS))
    answers = await asyncio.gather(*(_answers(_engine(kind, folder, dtype, scratch)) for dtype in kinds))
    return {
        kind: pack(sequences(PROMPTS, found), max_tokens=10_000)[0] for kind, found in zip(kinds, answers, strict=True)
    }


async def _answers(engine: Engine) -> list[Generation]:
    await engine.start()
    try:
        return await asyncio.gather(*(engine.generate(p, SAMPLING, seed=n) for n, p in enumerate(PROMPTS)))
    finally:
        await engine.close()


def sequences(prompts: Sequence[NDArray[np.int32]], answers: Sequence[Generation]) -> list[TrainingSequence]:
    """Return the answers as sequences with the engine's logprobs and experts, and nothing to learn."""
    made = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = np.concatenate([prompt, answer.tokens])
        mask = np.arange(len(tokens)) >= len(prompt)
        zeros = np.zeros(len(tokens), np.float32)
        made.append(
            TrainingSequence(
                tokens=tokens,
                response_mask=mask,
                behavior_logprobs=np.concatenate([zeros[: len(prompt)], answer.logprobs]),
                advantages=zeros,
                loss_weights=zeros,
                staleness=np.zeros(len(tokens), np.int32),
                experts=answer.experts,
            )
        )
    return made


@contextmanager
def _trainer(folder: Path, dtype: str) -> Iterator[MegatronBackend]:
    policy = AuxiliaryModel(path=folder, objective=resolve(ALGORITHMS["grpo"]), optimizer=OptimizerSettings())
    job = Job(
        models={POLICY: policy},
        temperature=1.0,
        device="cpu",
        dtype=dtype,
        threads=1,
        options=MegatronOptions(),
        layout=Layout(),
    )
    backend = MegatronBackend(job)
    try:
        backend.start()
        yield backend
    finally:
        backend.close()


@contextmanager
def recorded_routing() -> Iterator[dict[int, list[NDArray[np.bool_]]]]:
    """Record the routing of this process's forward passes in the context: layer, from 0 -> [tokens, experts] as chosen,
    one for each pass."""
    from megatron.core.transformer.moe.router import TopKRouter

    found: dict[int, list[NDArray[np.bool_]]] = {}

    def note(module: torch.nn.Module, _: Any, output: Any) -> None:
        if isinstance(module, TopKRouter):
            found.setdefault(module.layer_number - 1, []).append(output[1].bool().cpu().numpy())

    hook = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        yield found
    finally:
        hook.remove()


def differing(routed: Mapping[int, NDArray[np.bool_]], packed: MicroBatch) -> NDArray[np.bool_]:
    """Return where the routing differs: [tokens that the engine routed, layers with experts]."""
    is_told = (packed.experts[:, sorted(routed)] != unrouted(packed.experts)).all((1, 2))
    each = []
    for layer, chosen in sorted(routed.items()):
        of_engine = np.zeros_like(chosen)
        told = packed.experts[is_told, layer].astype(np.int64)
        of_engine[np.flatnonzero(is_told)[:, None], told] = True
        each.append((of_engine != chosen)[is_told].any(-1))
    return np.stack(each, -1)


def distance(logprobs: NDArray[np.float32], packed: MicroBatch) -> dict[str, float]:
    """Compare with the engine's logprobs: |difference| in nats a token, k3, share of ratios outside [0.8, 1.25]."""
    difference = (logprobs.astype(np.float64) - packed.behavior_logprobs)[packed.response_mask]
    ratio = np.exp(difference)
    return {
        "mean": float(np.abs(difference).mean()),
        "max": float(np.abs(difference).max()),
        "k3": float((ratio - 1 - difference).mean()),
        "outside": float(((ratio < 0.8) | (ratio > 1.25)).mean()),
    }


def _noisy(folder: Path, to: Path, noise: float) -> Path:
    to.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(5)
    weights = safetensors.torch.load_file(to / "model.safetensors")
    for name, weight in weights.items():
        spread = weight.std().nan_to_num() if weight.numel() > 1 else 0.0
        weights[name] = weight + noise * spread * torch.randn(weight.shape, generator=generator)
    safetensors.torch.save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


if __name__ == "__main__":
    main()
