"""Compare the mismatch of trainer and engine in a mixture by the trainer's expert parallelism, with and without replay.

    python -m benchmarks.gpu.expert_parallel --json docs/results/gpu/expert_parallel.jsonl     two GPUs
    python -m benchmarks.gpu.expert_parallel --rehearse                                        tiny, on a CPU

A part of 30B-A3B with random weights and an output layer of its own. One SGLang engine samples --prompts answers of
--length tokens and says which experts took each token. Then one learner after another, with --expert-parallel ranks,
computes the logprobs of the same tokens in the same rows: with the engine's experts (replayed) and with its own.

own, replayed      |trainer - engine| in nats a token, mean and max
decisions, tokens  share of (token, layer) pairs that the trainer's router gives other experts than the engine's, and
                   share of tokens with such a pair; of the rows of the first rank
apart              |trainer - first trainer| in nats a token, with its own experts and with the engine's: what the
                   number of ranks alone changes
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation import Generation
from asyncrl.engines.inprocess import engine as inprocess
from asyncrl.engines.port import Engine
from asyncrl.engines.sglang import engine as sglang
from asyncrl.messages import SamplingParams
from asyncrl.messages.routing import NO_EXPERTS
from asyncrl.policies.batching.packing import MicroBatch, pack_for_ranks
from benchmarks.gpu.fleet import GPU_ARGUMENTS, has_gpu
from benchmarks.gpu.learner import make_model
from benchmarks.gpu.learner_step import Variant, backend
from benchmarks.gpu.modes import assignments
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.weights import on_gpu
from benchmarks.gpu.window import Row
from benchmarks.routing_replay import differing, distance, recorded_routing, sequences

Rows = Sequence[Sequence[MicroBatch]]
Logprobs = list[NDArray[np.float32]]

REHEARSAL: Final[Mapping[str, Any]] = {"shape": "tiny-moe", "prompts": 8, "length": 32}
SERVER: Final[Mapping[str, Any]] = {
    **GPU_ARGUMENTS,
    "disable-cuda-graph": True,
    "disable-prefill-cuda-graph": True,
    "mem-fraction-static": 0.6,
}
HEAD: Final = (
    "EP  own: mean       max  replayed: mean       max  decisions  tokens  apart: own  replayed: mean       max"
    "  seconds"
)


def line(row: Row) -> str:
    if "error" in row:
        return f"{row['expert_parallel']:2d}  FAILED: {row['error']}"
    own, replayed, apart = row["own"], row["replayed"], row["apart"]
    return (
        f"{row['expert_parallel']:2d}  {own['mean']:9.5f}  {own['max']:8.4f}  {replayed['mean']:14.5f}"
        f"  {replayed['max']:8.4f}  {row['decisions']:9.2%}  {row['tokens']:6.1%}  {apart['own']['mean']:10.5f}"
        f"  {apart['replayed']['mean']:14.5f}  {apart['replayed']['max']:8.4f}  {row['seconds']:7.1f}"
    )


def sampled(folder: Path, options: argparse.Namespace, log: Path) -> Rows:
    """Return the engine's answers as rows, one for each of the ranks of the largest learner."""
    generator = np.random.default_rng(0)
    vocabulary = SHAPES[options.shape].vocabulary
    prompts = [generator.integers(4, vocabulary, 64).astype(np.int32) for _ in range(options.prompts)]
    sampling = SamplingParams(max_new_tokens=options.length, ignore_eos=True)

    async def answers() -> list[Generation]:
        engine = made_engine(folder, options, log)
        with on_gpu(0):
            await engine.start()
        try:
            return await asyncio.gather(*(engine.generate(p, sampling, seed=n) for n, p in enumerate(prompts)))
        finally:
            await engine.close()

    made = sequences(prompts, asyncio.run(answers()))
    shares = pack_for_ranks(made, ranks=max(options.expert_parallel), max_tokens=sum(map(len, made)))
    return [[row] for share in shares for row in share]


def made_engine(folder: Path, options: argparse.Namespace, log: Path) -> Engine:
    common: dict[str, Any] = {"version": (0, 0), "reports_experts": True}
    if options.rehearse:
        settings = inprocess.Options(threads=1)
        return inprocess.InProcessEngine(folder, device="cpu", dtype="float32", options=settings, **common)
    arguments = sglang.Options(server_arguments={**SERVER, **options.engine})
    return sglang.SGLangEngine(
        folder, device="cuda", dtype="bfloat16", options=arguments, log_path=log / "engine.log", **common
    )


def computed(folder: Path, rows: Rows, *, ranks: int, options: argparse.Namespace) -> tuple[Row, Logprobs, Logprobs]:
    """Return a learner's numbers, and its logprobs of each row by its own experts and by the engine's."""
    each = len(rows) // ranks
    parts = [[batch for row in rows[rank * each : (rank + 1) * each] for batch in row] for rank in range(ranks)]
    free = [[dataclasses.replace(batch, experts=NO_EXPERTS) for batch in part] for part in parts]
    longest = max(len(batch.tokens) for (batch,) in rows)
    variant = Variant(shape=options.shape, tokens=longest, data_parallel=ranks, expert_parallel=ranks)
    device, dtype = ("cpu", "float32") if options.rehearse else ("cuda", "bfloat16")
    began = time.monotonic()
    with backend(variant, folder, device=device, dtype=dtype) as learner:
        with recorded_routing() as routed:
            own = [row for part in learner.forward(free) for row in part]
        replayed = [row for part in learner.forward(parts) for row in part]
    differs = np.concatenate(
        [differing({layer: found[n] for layer, found in routed.items()}, batch) for n, batch in enumerate(parts[0])]
    )
    batches = [batch for (batch,) in rows]
    row = {
        "expert_parallel": ranks,
        "own": joined(own, batches),
        "replayed": joined(replayed, batches),
        "decisions": float(differs.mean()),
        "tokens": float(differs.any(-1).mean()),
        "layers": sorted(routed),
        "sampled": sum(int(batch.response_mask.sum()) for batch in batches),
        "seconds": time.monotonic() - began,
    }
    return row, own, replayed


def joined(logprobs: Logprobs, batches: Sequence[MicroBatch]) -> dict[str, float]:
    """Return ``distance`` over all rows: means by tokens, the largest maximum."""
    each = [distance(row, batch) for row, batch in zip(logprobs, batches, strict=True)]
    weights = [int(batch.response_mask.sum()) for batch in batches]
    means = {name: float(np.average([one[name] for one in each], weights=weights)) for name in each[0]}
    return means | {"max": max(one["max"] for one in each)}


def apart(ours: Logprobs, theirs: Logprobs, batches: Sequence[MicroBatch]) -> dict[str, float]:
    """Return mean and max of |ours - theirs| in nats a token of the answers."""
    masks = [batch.response_mask for batch in batches]
    found = [np.abs(a - b)[mask] for a, b, mask in zip(ours, theirs, masks, strict=True)]
    return {"mean": float(np.concatenate(found).mean()), "max": float(np.concatenate(found).max())}


def measured(folder: Path, rows: Rows, options: argparse.Namespace) -> Iterator[Row]:
    batches = [batch for (batch,) in rows]
    first: tuple[Logprobs, Logprobs] | None = None
    for ranks in options.expert_parallel:
        try:
            row, own, replayed = computed(folder, rows, ranks=ranks, options=options)
        except Exception as error:
            yield {"expert_parallel": ranks, "error": f"{type(error).__name__}: {error}"}
            continue
        first = first or (own, replayed)
        yield row | {"apart": {"own": apart(own, first[0], batches), "replayed": apart(replayed, first[1], batches)}}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.expert_parallel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", choices=[name for name, shape in SHAPES.items() if shape.experts], default="30B-A3B:8")
    add("--model", type=Path, metavar="FOLDER", help="of that shape, from benchmarks.gpu.shapes (default: made)")
    add("--expert-parallel", nargs="+", type=int, default=[1, 2], metavar="RANKS", help="(default 1 2)")
    add("--prompts", type=int, default=64, help="(default 64)")
    add("--length", type=int, default=320, help="tokens of an answer (default 320)")
    add("--engine", nargs="+", default=[], metavar="OPTION=VALUE", help="options of the SGLang server")
    add("--json", type=Path, metavar="FILE", help="rows are added there, one object a line")
    add("--out", type=Path, metavar="FOLDER", help="for the server's log")
    add("--rehearse", action="store_true", help="tiny, on a CPU")
    options = parser.parse_args(given)
    if options.rehearse:
        parser.set_defaults(**REHEARSAL)
        options = parser.parse_args(given)
    options.engine = assignments(options.engine)
    is_whole = True
    with tempfile.TemporaryDirectory(dir="/dev/shm" if has_gpu() else None) as scratch:
        folder = options.model or Path(scratch, "model")
        if options.model is None:
            make_model(options.shape, folder, dtype="float32" if options.rehearse else "bfloat16")
        log = options.out or Path(scratch)
        log.mkdir(parents=True, exist_ok=True)
        rows = sampled(folder, options, log)
        print(HEAD, flush=True)
        for row in measured(folder, rows, options):
            row |= {"shape": options.shape, "command": command("benchmarks.gpu.expert_parallel", given), **machine()}
            print(line(row), flush=True)
            keep(row, options.json)
            is_whole = is_whole and "error" not in row
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
