"""Check engines whose weights are quantized, on one GPU or two: are the weights after an update those of the learner?

    python -m benchmarks.gpu.quantized OUT.jsonl                   bf16, fp8 and int4
    python -m benchmarks.gpu.quantized OUT.jsonl --kinds int4      int4 alone

Each engine starts on version 0 and loads version 1 from a folder, with answers in flight; int4 then receives version 2
through the nccl channel's collectives. One GPU cannot hold both ends of an NCCL group: there they go over gloo. With a
second GPU, engines are on it, and NCCL is used. Versions differ by a step at a large learning rate.

trainer    the learner's logprobs minus the engine's for fresh answers: mean, max in nats
own        the same, where the learner has the engine's own weights in bfloat16: what remains is the kernels' rounding
previous   as "trainer", where the learner still has the version before: "own" is far smaller, unless the load failed

Exit code 1 unless it is for every engine, and for a stage that does not end in time. The model is the one of
benchmarks.gpu.versions. On a new machine, SGLang compiles the kernels of int4 while its server starts.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from asyncrl.engines.generation import Generation
from asyncrl.engines.sglang.engine import SGLangEngine
from asyncrl.tensors import fp8, int4, quantized_model
from asyncrl.tensors.snapshot import Bucket, Snapshot
from asyncrl.weights.collective import CollectiveReceiver
from asyncrl.weights.files import add_companions
from asyncrl.weights.nccl import Sender
from benchmarks.gpu.rows import machine
from benchmarks.gpu.versions import (
    LONG,
    PLACE,
    SHORT,
    START_SECONDS,
    answers,
    engine,
    learner,
    loaded,
    mismatch,
    model,
    packed,
)
from benchmarks.gpu.versions import published as published_versions

KINDS: Final = ("bf16", "fp8", "int4")
LEARNING_RATE: Final = 1e-3
"""Moves a weight by about a tenth of a step of int4."""
ENDS: Final = (int4.PACKED, "_scale", "_shape", fp8.scale_of(""))
"""What the names of the tensors of a quantized matrix end in."""
SEPARATION: Final = 2.0
"""The least factor between "previous" and "own"."""
_LIMIT_SECONDS: Final = 120.0
_LOG_LINES: Final = 20


class Stages:
    """Prints each stage when it begins, after the seconds so far. A stage without an end is the end of the process.

    That also ends the servers (reaper.py). Nothing else ends a thread that waits inside NCCL.
    """

    def __init__(self, logs: Path, *, limit_seconds: float) -> None:
        self.logs = logs
        self._limit = limit_seconds
        self._began = time.monotonic()
        self._timer: threading.Timer | None = None

    def begin(self, stage: str, *, limit_seconds: float = 0.0) -> None:
        if self._timer is not None:
            self._timer.cancel()
        print(f"{time.monotonic() - self._began:6.1f} s  {stage}", flush=True)
        seconds = limit_seconds or self._limit
        self._timer = threading.Timer(seconds, self._give_up, (stage, seconds))
        self._timer.daemon = True
        self._timer.start()

    def _give_up(self, stage: str, seconds: float) -> None:
        for log in sorted(self.logs.glob("*.log")):
            print(f"end of {log}:", *log.read_text(errors="replace").splitlines()[-_LOG_LINES:], sep="\n", flush=True)
        faulthandler.dump_traceback()
        print(f"no end of this stage within {seconds:.0f} s: {stage}", flush=True)
        os._exit(1)


@dataclass
class Sample:
    """Answers of an engine that has version ``number``, and the row of its load."""

    kind: str
    number: int
    answers: Sequence[Generation]
    row: dict[str, Any]


def dequantized(snapshot: Snapshot) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model in bfloat16, under their own names."""
    given = dict(snapshot.tensors())
    while given:
        name, one = next(iter(given.items()))
        base = next((name.removesuffix(end) for end in ENDS if name.endswith(end)), name)
        parts = {end: given.pop(base + end) for end in ("", *ENDS) if base + end in given}
        if int4.PACKED in parts:
            yield base, int4.dequantize(parts[int4.PACKED], parts["_scale"])
        elif len(parts) == 2:
            yield base, fp8.dequantize(parts[""], parts[fp8.scale_of("")])
        else:
            yield base, one


def folder_of(snapshot: Snapshot, *, name: str, model_path: Path) -> Path:
    """Write the weights of an engine to a folder in bfloat16."""
    folder = PLACE / name
    folder.mkdir()
    add_companions(folder, model_path)
    weights = {name: one.cpu().contiguous() for name, one in dequantized(snapshot)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def in_formats(snapshots: Sequence[Snapshot], kinds: Sequence[str]) -> tuple[dict[str, list[Snapshot]], dict[str, Any]]:
    """Return the versions in the format of each kind, and the milliseconds that it took."""
    made: dict[str, list[Snapshot]] = {}
    taken: dict[str, Any] = {}
    for kind in kinds:
        if kind not in quantized_model.FORMATS:
            made[kind] = list(snapshots)
            continue
        made[kind], seconds = [], []
        for snapshot in snapshots:
            began = time.monotonic()
            made[kind].append(Snapshot.of(quantized_model.quantized(snapshot.tensors(), kind)))
            seconds.append(time.monotonic() - began)
        taken[kind] = {"quantize_ms": [round(1000 * one, 1) for one in seconds]}
    return made, taken


async def received(served: SGLangEngine, snapshot: Snapshot, *, version: int, has_own_gpu: bool) -> dict[str, Any]:
    """Send a version to an engine with answers in flight."""
    assert served.intake is not None
    if not has_own_gpu:
        buckets = tuple(Bucket(entries=one.entries, data=one.data.cpu()) for one in snapshot.buckets)
        snapshot = Snapshot(buckets=buckets)
    sender = Sender("127.0.0.1")
    sender.hold(snapshot, incarnation=0, policy_version=version)
    receiver = CollectiveReceiver(served.intake.collectives, engine="engine", num_ranks=1)
    meeting = sender.begin(receiver.request)
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(meeting.send))
        group.create_task(receiver.join(meeting.offer))
    running = asyncio.create_task(answers(served, LONG))
    await asyncio.sleep(0.3)
    transfer = sender.begin(receiver.request)
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(transfer.send))
        receiving = group.create_task(receiver.receive(transfer.offer))
    report, ended = receiving.result(), await running
    await receiver.leave()
    return {
        "way": "nccl" if has_own_gpu else "gloo",
        "bytes": snapshot.num_bytes,
        "pause_ms": [round(1000 * report.pause_seconds, 1)],
        "answers": len(ended),
        "answers_of_two_versions": sum(len(answer.version_spans) > 1 for answer in ended),
    }


async def sampled(
    up: Mapping[str, SGLangEngine],
    made: Mapping[str, Sequence[Snapshot]],
    folder: Path,
    stages: Stages,
    *,
    has_own_gpu: bool,
) -> list[Sample]:
    found = []
    for kind, served in up.items():
        stages.begin(f"{kind}: version 1 is published, and loaded with answers in flight")
        first = published_versions(kind, made[kind][1:2], folder)
        row = {"kind": kind, "way": "folder"} | await loaded(served, first)
        stages.begin(f"{kind}: answers of version 1")
        found.append(Sample(kind, 1, await answers(served, SHORT), row))
        if kind == "int4":
            stages.begin(f"{kind}: version 2 is sent over {'nccl' if has_own_gpu else 'gloo'}, with answers in flight")
            row = {"kind": kind} | await received(served, made[kind][2], version=2, has_own_gpu=has_own_gpu)
            stages.begin(f"{kind}: answers of version 2")
            found.append(Sample(kind, 2, await answers(served, SHORT), row))
    return found


async def measured(kinds: Sequence[str], rows: list[dict[str, Any]], stages: Stages) -> None:
    has_own_gpu = torch.cuda.device_count() > 1
    stages.begin("folders of the model")
    folder = await asyncio.to_thread(model)
    for kind in kinds:
        if kind in quantized_model.FORMATS:
            quantized_model.model_folder(folder, PLACE / f"model-{kind}", kind)
    place = {"base-gpu-id": 1} if has_own_gpu else {}
    up = {kind: engine(folder, kind, logs=stages.logs, **place) for kind in kinds}
    stages.begin(f"servers of {', '.join(kinds)} start", limit_seconds=START_SECONDS + _LIMIT_SECONDS)
    try:
        async with asyncio.TaskGroup() as group:
            for one in up.values():
                group.create_task(one.start())
        stages.begin("the learner starts")
        trained = learner(folder, lora=None)
        trained.start()
        try:
            stages.begin(f"{kinds[0]}: answers of version 0")
            first = await answers(up[kinds[0]], SHORT)
            snapshots = [trained.export()]
            for number in (1, 2):
                stages.begin(f"step {number} of the learner")
                trained.step(packed(first), learning_rate=LEARNING_RATE)
                snapshots.append(trained.export())
            stages.begin("versions are quantized")
            made, taken = in_formats(snapshots, kinds)
            samples = await sampled(up, made, folder, stages, has_own_gpu=has_own_gpu)
        except Exception:
            traceback.print_exc()  # asyncio.run raises it after its threads have ended, and one may wait inside NCCL
            raise
        finally:
            trained.close()
    finally:
        stages.begin("servers end")
        await asyncio.gather(*(one.close() for one in up.values()))
    for sample in samples:
        sample.row |= taken.get(sample.kind, {})
    compare(samples, made | {"trainer": snapshots}, folder, stages)
    for sample in samples:
        sample.row["is_right"] = sample.row["previous"][0] > SEPARATION * sample.row["own"][0]
        rows.append(sample.row)
        print(json.dumps(sample.row), flush=True)


def compare(
    samples: Sequence[Sample], versions: Mapping[str, Sequence[Snapshot]], model_path: Path, stages: Stages
) -> None:
    """Add the differences of each sample's logprobs from those of three sets of weights to its row."""
    wanted: dict[tuple[str, int], list[tuple[str, Sample]]] = {}
    for sample in samples:
        own = "trainer" if sample.kind == "bf16" else sample.kind
        for what, kind, number in (
            ("trainer", "trainer", sample.number),
            ("own", own, sample.number),
            ("previous", "trainer", sample.number - 1),
        ):
            wanted.setdefault((kind, number), []).append((what, sample))
    for (kind, number), of_samples in wanted.items():
        stages.begin(f"logprobs of the learner with version {number} of {kind}")
        folder = folder_of(versions[kind][number], name=f"{kind}-{number}", model_path=model_path)
        scorer = learner(folder, lora=None)
        scorer.start()
        try:
            for what, sample in of_samples:
                told = mismatch(scorer, sample.answers)
                sample.row[what] = [round(told["mean_difference"], 4), round(told["max_difference"], 3)]
                sample.row["tokens"] = told["tokens"]
                if what == "trainer":
                    sample.row["k3"] = told["k3"]
        finally:
            scorer.close()
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.quantized", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("out", type=Path, metavar="OUT.jsonl", help="write one object a line")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--logs", type=Path, default=PLACE, metavar="FOLDER", help="keep the servers' logs there")
    parser.add_argument("--limit-seconds", type=float, default=_LIMIT_SECONDS, help="for a stage, once servers are up")
    options = parser.parse_args()
    os.environ["NCCL_CUMEM_ENABLE"] = "0"  # as adapters/registry.py does
    shutil.rmtree(PLACE, ignore_errors=True)
    rows: list[dict[str, Any]] = []
    try:
        asyncio.run(measured(options.kinds, rows, Stages(options.logs, limit_seconds=options.limit_seconds)))
    finally:
        options.out.write_text("".join(json.dumps(row | machine()) + "\n" for row in rows))
        shutil.rmtree(PLACE, ignore_errors=True)
    return 0 if rows and all(row["is_right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
