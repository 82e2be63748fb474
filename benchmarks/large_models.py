"""What a step of 235B and 671B would take, by arithmetic from what was measured on small ones. Nothing of it was run.

    python -m benchmarks.large_models --json docs/results/large_models.jsonl

512 answers of 8,192 tokens; H200s, eight a machine with NVLink, and a NIC of --gigabytes (50) each between machines.

products    6 x active parameters and the attention, at the MFU of a mixture of 128 experts on one GPU (0.41 of 790
            TFLOP/s, docs/results/gpu/learner.jsonl), x 0.90 as two expert-parallel ranks kept, x 4/3 for recomputation
bubble      (stages - 1) / (rows + stages - 1) of 1F1B, rows of 16k tokens
all-to-all  bytes of tokens that experts on other machines get and give back: forward, backward, recomputed; nothing
            overlaps. The speed is the NIC's, not a measured one
feeding     rank 0's work, of docs/results/feeding.jsonl, and the bytes that leave it
weights     bf16, one part after the other from one NIC, at 0.85 of it as measured inside a machine: engines pause
load        matrices of single experts, copied one by one straight to their places: 0.028 ms each, as 30B-A3B's tensors
            (docs/results/gpu/weights.jsonl), after what is received in servers of more than two GPUs: engines pause
folder      files of all exporting ranks at a time, at 0.83 GB/s a rank, what one rank wrote of a dense 8B model
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrl.config.layout import Layout
from benchmarks.gpu.rows import command, keep

ANSWERS: Final = 512
ANSWER_TOKENS: Final = 8192
ROW_TOKENS: Final = 16_384
MACHINE_GPUS: Final = 8
MFU: Final = 0.410
PEAK_FLOPS: Final = 790e12
EXPERT_PARALLEL: Final = 0.90
RECOMPUTE: Final = 4 / 3
BROADCAST: Final = 0.85
RANK_DISK: Final = 0.83e9
MATRIX_SECONDS: Final = 0.533 / 18_867


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """parameters, active: numbers.  experts: of a layer.  attended: query heads x (size of a key + size of a value)"""

    name: str
    parameters: float
    active: float
    layers: int
    sparse_layers: int
    experts: int
    hidden: int
    choices: int
    attended: int
    expert_bytes: int
    layout: Layout


MODELS: Final = (
    Model(
        name="Qwen3-235B-A22B",
        parameters=235e9,
        active=22e9,
        layers=94,
        sparse_layers=94,
        experts=128,
        hidden=4096,
        choices=8,
        attended=64 * (128 + 128),
        expert_bytes=1,
        layout=Layout(ranks=128, tensor=4, pipeline=4, context=2, expert=16),
    ),
    Model(
        name="DeepSeek-V3",
        parameters=671e9,
        active=37e9,
        layers=61,
        sparse_layers=58,
        experts=256,
        hidden=7168,
        choices=8,
        attended=128 * (192 + 128),
        expert_bytes=2,
        layout=Layout(ranks=256, tensor=8, pipeline=8, expert=32),
    ),
)


def parts(model: Model, *, link: float) -> Iterator[tuple[str, float, str]]:
    """Yield (part, seconds, beside what it happens).  link: bytes a second of a NIC"""
    layout, tokens = model.layout, ANSWERS * ANSWER_TOKENS
    # A token attends to half of its answer; a product of two numbers is two operations, backward is twice forward.
    attention = 3 * 2 * (ANSWER_TOKENS / 2) * model.attended * model.layers
    flops = tokens * (6 * model.active + attention)
    products = RECOMPUTE * flops / (layout.ranks * PEAK_FLOPS * MFU * EXPERT_PARALLEL)
    yield "products", products, ""
    rows = tokens / layout.data_parallel / ROW_TOKENS
    yield "bubble", products * (layout.pipeline - 1) / rows, ""
    passes = 6  # there and back: forward, recomputed, backward
    exchanged = tokens * model.sparse_layers * passes * 2 * model.hidden * model.choices
    away = 1 - min(1, MACHINE_GPUS / layout.expert)
    yield "all-to-all", exchanged * away / layout.ranks / link, ""
    share = tokens / layout.data_parallel
    of_experts = tokens * model.sparse_layers * model.choices * model.expert_bytes
    blocks = layout.ranks // (layout.tensor * layout.context)
    yield "feeding", (blocks * share * 21 + of_experts) / link, "bytes alone"
    yield "weights", 2 * model.parameters / (link * BROADCAST), "engines pause, the learner goes on"
    yield "load", MATRIX_SECONDS * 3 * model.experts * model.sparse_layers, "engines pause, the learner goes on"
    yield "folder", 2 * model.parameters / layout.exporters / RANK_DISK, "beside the next steps"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=50.0, help="that a NIC carries a second (default 50)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows are added there")
    options = parser.parse_args(given)
    for model in MODELS:
        seconds: dict[str, Any] = {}
        print(f"{model.name}, {model.layout.ranks} GPUs")
        for part, of_part, beside in parts(model, link=1e9 * options.gigabytes):
            seconds[f"{part}_seconds"] = of_part
            print(f"  {part:10s}  {of_part:6.1f} s  {beside}")
        print(f"  slowest: {max(seconds, key=lambda name: seconds[name]).removesuffix('_seconds')}", flush=True)
        about = {"model": model.name, "gpus": model.layout.ranks, "gigabytes": options.gigabytes}
        keep(about | seconds | {"command": command("benchmarks.large_models")}, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
