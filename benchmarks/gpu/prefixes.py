"""Measure what shared prefixes save: steps of the Megatron learner on the same batches, packed whole and shared.

    python -m benchmarks.gpu.prefixes --json FILE                      0.6B; prompts of 0.1k, 2k, 8k; agents
    python -m benchmarks.gpu.prefixes --shapes 0.6B 4B --recompute full
    python -m benchmarks.gpu.prefixes --layouts 1x1 1x2 cp2            as benchmarks.gpu.learner's
    python -m benchmarks.gpu.prefixes --device cpu --shapes tiny --scale 0.05 --tokens 1024    a rehearsal

Groups of eight samples with answers of 500 tokens in the mean (uniform between 250 and 750). An agent has a prompt of
2k tokens and eight turns: each turn is a trajectory of its own, an answer of 500 tokens after the history, of which the
history keeps the last 100 and a tool's 400 tokens. Four agents answer one prompt. Tokens are random. --scale multiplies
all lengths.

Both packings take turns, step by step, on one learner. A row says how many tokens the sequences have and how many are
computed, the seconds of a step either way (medians), peak memory, and by how much loss and gradient norm of the first
step differ. Where as many are computed as there are, sharing would cost more than it saves: both packings are the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.backends import huggingface
from asyncrl.policies.batching.packing import MicroBatch, TrainingSequence, pack_for_ranks
from benchmarks.gpu.learner import layout_of, make_model
from benchmarks.gpu.learner_step import LEARNING_RATE, Variant, backend
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.shapes import SHAPES

SAMPLES: Final = 8
ANSWER: Final = 500
TURNS: Final = 8
AGENTS: Final = 4
KEPT: Final = 100
OBSERVED: Final = 400
AGENT_PROMPT: Final = 2000

Case = Callable[[Callable[[float], NDArray[np.int32]], np.random.Generator], list[TrainingSequence]]
"""A function that makes the sequences of one prompt from a function that makes random tokens."""


def samples(prompt_tokens: int) -> Case:
    """Return a case: samples of one prompt."""

    def make(tokens: Callable[[float], NDArray[np.int32]], random: np.random.Generator) -> list[TrainingSequence]:
        prompt = tokens(prompt_tokens)
        return [sequence([prompt], tokens(random.uniform(0.5, 1.5) * ANSWER), random) for _ in range(SAMPLES)]

    return make


def agents(tokens: Callable[[float], NDArray[np.int32]], random: np.random.Generator) -> list[TrainingSequence]:
    """Return the turns of several agents that answer one prompt; what they thought leaves their histories."""
    prompt, made = tokens(AGENT_PROMPT), []
    for _ in range(AGENTS):
        history = [prompt]
        for _ in range(TURNS):
            answer = tokens(random.uniform(0.5, 1.5) * ANSWER)
            made.append(sequence(history, answer, random))
            history = [*history, answer[-min(len(answer), len(tokens(KEPT))) :], tokens(OBSERVED)]
    return made


CASES: Final[dict[str, Case]] = {
    "prompts of 0.1k": samples(100),
    "prompts of 2k": samples(2000),
    "prompts of 8k": samples(8000),
    "agents": agents,
}


def sequence(
    history: Sequence[NDArray[np.int32]], answer: NDArray[np.int32], random: np.random.Generator
) -> TrainingSequence:
    tokens = np.concatenate([*history, answer])
    mask = np.arange(len(tokens)) >= len(tokens) - len(answer)
    return TrainingSequence(
        tokens=tokens,
        response_mask=mask,
        behavior_logprobs=np.where(mask, -12, 0).astype(np.float32),
        advantages=np.where(mask, random.standard_normal(), 0).astype(np.float32),
        loss_weights=np.where(mask, 1 / 16_384, 0).astype(np.float32),
        staleness=np.zeros(len(tokens), np.int32),
    )


def batch(case: Case, *, prompts: int, scale: float, vocabulary: int, seed: int) -> list[TrainingSequence]:
    random = np.random.default_rng(seed)

    def tokens(count: float) -> NDArray[np.int32]:
        return random.integers(0, vocabulary, max(2, round(scale * count))).astype(np.int32)

    return [one for _ in range(prompts) for one in case(tokens, random)]


def measure(
    name: str, variant: Variant, folder: Path, *, device: str, dtype: str, prompts: int, scale: float, steps: int
) -> dict[str, Any]:
    """Run ``steps`` timed steps with either packing, after two of each in which kernels are compiled."""
    vocabulary = huggingface.read_shape(folder).vocabulary_size
    warm_up, ranks = 2, variant.data_parallel
    batches = [
        batch(CASES[name], prompts=prompts, scale=scale, vocabulary=vocabulary, seed=seed)
        for seed in range(warm_up + steps)
    ]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    peak, first, rows = dict[bool, float](), dict[bool, dict[str, float]](), dict[bool, list[MicroBatch]]()
    with backend(variant, folder, device=device, dtype=dtype) as learner:
        for number, sequences in enumerate(batches):
            for shares in (False, True) if number % 2 else (True, False):
                cut = pack_for_ranks(sequences, ranks=ranks, max_tokens=variant.tokens, shares_prefixes=shares)
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
                metrics = learner.step(cut, learning_rate=LEARNING_RATE if number else 0.0).metrics
                if device == "cuda":
                    torch.cuda.synchronize()
                seconds[shares].append(time.perf_counter() - began)
                peak[shares] = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
                if not number:  # nothing is learned yet: both see the same weights
                    first[shares], rows[shares] = dict(metrics), [row for share in cut for row in share]
    whole, shared = (statistics.median(seconds[shares][warm_up:]) for shares in (False, True))
    return {
        "case": name,
        "variant": variant.name,
        "scale": scale,
        "prompts": prompts,
        "sequences": len(batches[0]),
        "tokens": sum(map(len, batches[0])),
        "computed": sum(row.num_computed for row in rows[True]),
        "rows_whole": len(rows[False]),
        "rows_shared": len(rows[True]),
        "seconds_whole": whole,
        "seconds_shared": shared,
        "faster": whole / shared,
        "seconds_of_steps": {"whole": seconds[False][warm_up:], "shared": seconds[True][warm_up:]},
        "gib_whole": peak[False],
        "gib_shared": peak[True],
        "loss_differs": abs(first[True]["loss"] - first[False]["loss"]),
        "grad_norm_differs": abs(first[True]["grad_norm"] / first[False]["grad_norm"] - 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one object a line")
    parser.add_argument("--shapes", nargs="*", default=["0.6B"], choices=list(SHAPES))
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--layouts", nargs="*", default=["1x1"], help="data-parallel x tensor-parallel, or as tp2-cp2")
    parser.add_argument("--recompute", nargs="*", default=["none"], choices=["none", "selective", "full"])
    parser.add_argument("--tokens", type=int, default=16_384, help="computed tokens of a row")
    parser.add_argument("--prompts", type=int, default=4, help="of a step, for each copy of the model")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all lengths")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each packing")
    parser.add_argument("--dtype", default="", choices=["", "bfloat16", "float32"], help="bfloat16 on a GPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        task = json.loads(arguments.child)
        print(json.dumps(measure(variant=Variant(**task.pop("variant")), folder=Path(task.pop("folder")), **task)))
        return 0
    dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    print(HEADER)
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        for shape in arguments.shapes:
            folder = Path(temporary, shape.replace(":", "-"))
            make_model(shape, folder, dtype=dtype)
            for layout, recompute, case in itertools.product(
                map(layout_of, arguments.layouts), arguments.recompute, arguments.cases
            ):
                variant = {"shape": shape, "tokens": arguments.tokens, "recompute": recompute, **layout}
                task = {
                    "name": case,
                    "variant": variant,
                    "folder": str(folder),
                    "device": arguments.device,
                    "dtype": dtype,
                    "prompts": arguments.prompts * layout.get("data_parallel", 1),
                    "scale": arguments.scale,
                    "steps": arguments.steps,
                }
                failed += not show(task, arguments.json)
    return int(failed > 0)


HEADER: Final = (
    f"{'case':16} {'variant':28} {'tokens':>8} {'computed':>8} {'rows':>9} {'whole s':>8} {'shared s':>8} "
    f"{'faster':>6} {'GiB whole':>9} {'shared':>6} {'loss off':>8} {'norm off':>8}"
)


def show(task: dict[str, Any], path: Path | None) -> bool:
    """Measure in a child process, which leaves no memory behind. Return whether it succeeded."""
    words = [sys.executable, "-m", "benchmarks.gpu.prefixes", "--child", json.dumps(task)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"{task['name']:16} failed: the process ended with {done.returncode}", flush=True)
        return False
    row = json.loads(done.stdout.strip().splitlines()[-1])
    print(
        f"{row['case']:16} {row['variant']:28} {row['tokens']:8,} {row['computed']:8,} "
        f"{row['rows_whole']:4} {row['rows_shared']:4} {row['seconds_whole']:8.3f} {row['seconds_shared']:8.3f} "
        f"{row['faster']:6.2f} {row['gib_whole']:9.1f} {row['gib_shared']:6.1f} {row['loss_differs']:8.1e} "
        f"{row['grad_norm_differs']:8.1e}",
        flush=True,
    )
    keep(row | {"command": command("benchmarks.gpu.prefixes"), **machine()}, path)
    return True


if __name__ == "__main__":
    sys.exit(main())
