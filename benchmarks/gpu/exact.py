"""Compare the learner's logprobs with SGLang's, with and without run.exact: their difference, and what exactness costs.

    python -m benchmarks.gpu.exact --json docs/results/gpu/exact.jsonl                      one GPU for both
    python -m benchmarks.gpu.exact --tensor-parallel 2 --json docs/results/gpu/exact.jsonl  the server on two
    python -m benchmarks.gpu.exact --rehearse                                               in one process, on a CPU

A server samples --answers answers of --length tokens to prompts of 20 to 300, some of them equal; the learner computes
their logprobs, takes a step, and the server samples again from the new weights. The model's weights are random, but
so large that its distributions are far from uniform (mean logprob about -2).

largest, mean     |learner - engine| in nats over all sampled tokens
equal             share of tokens whose logprobs are equal to the bit
engine, learner, step   tokens per second of sampling, of computing logprobs, and of a training step
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.backends.reference import Options, ReferenceBackend
from asyncrl.engines.inprocess import engine as inprocess
from asyncrl.engines.port import Engine
from asyncrl.engines.sglang import engine as sglang
from asyncrl.engines.sglang.options import EXACT
from asyncrl.messages import SamplingParams
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching.packing import TrainingSequence, pack_for_ranks
from asyncrl.weights.files import FilesChannel
from benchmarks.gpu.fleet import GPU_ARGUMENTS, has_gpu
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.shapes import SHAPES, make_model
from benchmarks.gpu.window import Row
from benchmarks.routing_replay import sequences

SERVER: Final = {
    **GPU_ARGUMENTS,
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "disable-prefill-cuda-graph": True,
    "max-running-requests": 256,
    "max-total-tokens": 160_000,
    "mem-fraction-static": 0.3,
}
REHEARSAL: Final = {"shape": "tiny", "answers": 8, "length": 16, "row": 512}
STEP_ANSWERS: Final = 24
HEAD: Final = "arm                     tokens    largest       mean      equal  engine tok/s  learner tok/s  step tok/s"


def line(row: Row) -> str:
    step = f"{row['step_tokens_per_second']:10,.0f}" if "step_tokens_per_second" in row else " " * 10
    return (
        f"{row['arm']:21s} {row['tokens']:8,d}  {row['largest']:9.2e}  {row['mean']:9.2e}  {row['equal']:9.4%}"
        f"  {row['engine_tokens_per_second']:12,.0f}  {row['learner_tokens_per_second']:13,.0f}  {step}"
    )


def make_decided_model(shape: str, folder: Path, *, dtype: str) -> None:
    """Write random weights whose layers matter and whose distributions are far from uniform."""
    make_model(SHAPES[shape], folder, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    for name, one in tensors.items():
        if one.ndim == 1:
            tensors[name] = (1 + 0.3 * torch.randn(one.shape, generator=generator)).to(one.dtype)
        else:
            tensors[name] = one * (10 if "embed" in name else 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class Bench:
    """One arm: a server and a learner of the same model."""

    def __init__(self, folder: Path, scratch: Path, options: argparse.Namespace, *, is_exact: bool) -> None:
        self._folder, self._scratch, self._options, self._is_exact = folder, scratch, options, is_exact
        self._device, self._dtype = ("cpu", "float32") if options.rehearse else ("cuda", "bfloat16")

    async def rows(self) -> list[Row]:
        options, name = self._options, "exact" if self._is_exact else "ordinary"
        engine = self._engine(name)
        await engine.start()
        learner = self._learner()
        learner.start()
        try:
            await self._sampled(engine, answers=8, length=16, seed=9)
            made, seconds = await self._sampled(engine, answers=options.answers, length=options.length, seed=1)
            first = {"arm": name, **self._compared(learner, made, seconds), **self._stepped(learner, made)}
            channel = FilesChannel(self._scratch / f"weights-{name}", keep=2, model_path=self._folder)
            await engine.load(channel.publish(learner.export(), incarnation=0, policy_version=1))
            made, seconds = await self._sampled(
                engine, answers=options.answers // 4, length=options.length // 2, seed=2
            )
            return [first, {"arm": f"{name}, after a step", **self._compared(learner, made, seconds)}]
        finally:
            learner.close()
            await engine.close()

    def _engine(self, name: str) -> Engine:
        common: dict[str, Any] = {"device": self._device, "dtype": self._dtype, "version": (0, 0)}
        if self._options.rehearse:
            return inprocess.InProcessEngine(
                self._folder, options=inprocess.Options(threads=1), is_exact=self._is_exact, **common
            )
        settings = sglang.Options(
            tensor_parallel=self._options.tensor_parallel,
            server_arguments={**SERVER, **(EXACT if self._is_exact else {})},
        )
        return sglang.SGLangEngine(
            self._folder, options=settings, log_path=self._scratch / f"server-{name}.log", **common
        )

    def _learner(self) -> ReferenceBackend:
        return ReferenceBackend(
            self._folder,
            options=Options(),
            algorithm=resolve(ALGORITHMS["grpo"]),
            optimizer=OptimizerSettings(),
            temperature=1.0,
            device=self._device,
            dtype=self._dtype,
            threads=1 if self._options.rehearse else 0,
            exact_ranks=self._options.tensor_parallel if self._is_exact else 0,
        )

    async def _sampled(
        self, engine: Engine, *, answers: int, length: int, seed: int
    ) -> tuple[list[TrainingSequence], float]:
        """Return answers, and the seconds they took. Of four prompts two are equal, as in a group."""
        generator = np.random.default_rng(seed)
        vocabulary = SHAPES[self._options.shape].vocabulary
        lengths = generator.integers(20, 300, answers)
        prompts = [generator.integers(4, vocabulary, size).astype(np.int32) for size in lengths]
        prompts = [prompts[n - 1] if n % 4 == 1 else one for n, one in enumerate(prompts)]
        sampling = SamplingParams(max_new_tokens=length, ignore_eos=True)
        began = time.monotonic()
        asked = (engine.generate(one, sampling, seed=seed * 10_000 + n) for n, one in enumerate(prompts))
        made = await asyncio.gather(*asked)
        return sequences(prompts, made), time.monotonic() - began

    def _compared(self, learner: ReferenceBackend, made: Sequence[TrainingSequence], seconds: float) -> Row:
        (rows,) = pack_for_ranks(made, ranks=1, max_tokens=self._options.row)
        learner.forward([rows[:1]])  # compiles
        began = time.monotonic()
        (found,) = learner.forward([rows])
        took = time.monotonic() - began
        apart = np.concatenate(
            [np.abs(values - row.behavior_logprobs)[row.response_mask] for row, values in zip(rows, found, strict=True)]
        )
        return {
            "tokens": int(apart.size),
            "largest": float(apart.max()),
            "mean": float(apart.mean()),
            "equal": float((apart == 0).mean()),
            "engine_tokens_per_second": apart.size / seconds,
            "learner_tokens_per_second": sum(len(one.tokens) for one in made) / took,
        }

    def _stepped(self, learner: ReferenceBackend, made: Sequence[TrainingSequence]) -> Row:
        learned = [_with_advantages(one) for one in made[:STEP_ANSWERS]]
        (rows,) = pack_for_ranks(learned, ranks=1, max_tokens=self._options.row)
        learner.step([rows[:1]], learning_rate=0.0)  # compiles
        began = time.monotonic()
        learner.step([rows], learning_rate=1e-4)
        return {"step_tokens_per_second": sum(len(one.tokens) for one in learned) / (time.monotonic() - began)}


def _with_advantages(one: TrainingSequence) -> TrainingSequence:
    mask = one.response_mask
    return dataclasses.replace(
        one,
        advantages=np.where(mask, np.sin(np.arange(len(mask))), 0).astype(np.float32),
        loss_weights=(mask / mask.sum()).astype(np.float32),
    )


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.exact",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="0.6B", help="(default 0.6B)")
    add("--arms", nargs="+", choices=("exact", "ordinary"), default=["exact", "ordinary"])
    add("--tensor-parallel", type=int, choices=(1, 2), default=1, help="GPUs of the server (default 1)")
    add("--answers", type=int, default=200, help="(default 200)")
    add("--length", type=int, default=512, help="tokens of an answer (default 512)")
    add("--row", type=int, default=4096, help="most tokens of a learner's row (default 4096)")
    add("--json", type=Path, metavar="FILE", help="rows are added there, one object a line")
    add("--rehearse", action="store_true", help="tiny, on a CPU")
    options = parser.parse_args(given)
    if options.rehearse:
        parser.set_defaults(**REHEARSAL)
        options = parser.parse_args(given)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if has_gpu() else None) as scratch:
        folder = Path(scratch, "model")
        make_decided_model(options.shape, folder, dtype="float32" if options.rehearse else "bfloat16")
        print(HEAD, flush=True)
        for arm in options.arms:
            for row in asyncio.run(Bench(folder, Path(scratch), options, is_exact=arm == "exact").rows()):
                row |= {
                    "shape": options.shape,
                    "tensor_parallel": options.tensor_parallel,
                    "command": command("benchmarks.gpu.exact", given),
                    **machine(),
                }
                print(line(row), flush=True)
                keep(row, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
