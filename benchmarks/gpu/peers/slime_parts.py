"""What slime calls in an arm: answers of drawn lengths, a reward that costs nothing, and a line per step.

PEER_OUT is the folder of the engine's address, of steps.jsonl (a line when the trainer begins a batch: {time, step})
and of rollouts.jsonl (a line per batch: {time, step, parts}, tokens of each version of the weights).
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.gpu.lengths import Lengths
from benchmarks.gpu.peers.trained import OUT_VARIABLE

LENGTHS_VARIABLE: Final = "PEER_LENGTHS"
ADDRESS: Final = "address"
STEPS: Final = "steps.jsonl"
ROLLOUTS: Final = "rollouts.jsonl"


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """--custom-generate-function-path: slime's own request, with the length drawn for (seed, group, index)."""
    from slime.rollout.sglang_rollout import generate as of_slime
    from slime.utils.http_utils import get

    address = Path(os.environ[OUT_VARIABLE]) / ADDRESS
    if not address.exists():
        workers = await get(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/workers")
        address.write_text(workers["workers"][0]["url"])
    lengths = Lengths(**json.loads(os.environ[LENGTHS_VARIABLE]))
    index = sample.index % args.n_samples_per_prompt
    length = lengths.of(group_id=sample.group_index, index=index)
    before = sample.response_length
    sample = await of_slime(args, sample, {**sampling_params, "max_new_tokens": length, "ignore_eos": True})
    if sample.response_length > before:
        parts = sample.metadata.setdefault("parts", [])
        parts.append([sample.weight_versions[-1], sample.response_length - before])
    return sample


async def reward(args: Any, sample: Any, **_: Any) -> float:
    """--custom-rm-path: a number that depends on the answer's first tokens, as benchmarks.gpu.lengths:noise."""
    first = sample.tokens[-sample.response_length :][:16] if sample.response_length else []
    return zlib.crc32(np.array(first, np.int32).tobytes()) / 2**32


def begun(args: Any, rollout_id: int, rollout_data: Mapping[str, Any]) -> None:
    """--rollout-data-postprocess-path: the trainer has the batch."""
    _write(STEPS, {"step": rollout_id})


def collected(rollout_id: int, args: Any, samples: Sequence[Any], *_: Any) -> bool:
    """--custom-rollout-log-function-path: the batch is complete."""
    parts: Counter[str] = Counter()
    for sample in samples:
        for version, tokens in sample.metadata.get("parts", []):
            parts[version] += tokens
    _write(ROLLOUTS, {"step": rollout_id, "parts": dict(parts)})
    return False


def _write(name: str, row: Mapping[str, Any]) -> None:
    with (Path(os.environ[OUT_VARIABLE]) / name).open("a") as file:
        file.write(json.dumps({"time": time.time(), **row}) + "\n")
