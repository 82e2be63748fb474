"""Measure loading new weights into an engine at full load: the engine's pause and the learner's stall, by transport.

    python -m benchmarks.gpu.weights --shapes 0.6B 4B --json FILE          GPU 0 is the learner's, GPU 1 the engine's
    python -m benchmarks.gpu.weights --transports shm shm-sglang           our reading of files, and SGLang's own
    python -m benchmarks.gpu.weights --transports nccl nccl-sglang         our receiving of buckets, and SGLang's own
    python -m benchmarks.gpu.weights --transports nccl --ranks 1 2 --bare  one rank, then two; and a bare broadcast

The engine always has --requests answers in progress. The learner is a separate process, as in a run. Its GPU multiplies
matrices all the time (unless --idle), to show how much a transfer slows down training. Each transport does --loads
updates, or --folder-loads (the first is a warm-up and is reported separately). With --kill, the server is then killed
during a transfer, and the learner must go on.

pause    seconds from the pause request until the server continues; it samples no token except in the first few
         milliseconds
export   the snapshot on the learner's GPU: its stall for one publish
publish  seconds until the folder is written and hashed, concurrently with the next step (files only)
slower   slowdown of the matrix products during transfers, as a share of their time before
straight tensors that each load but the first copied to known places (destinations.py); 0: SGLang's load_weights
empty    pause of an update that loads nothing: the server only finishes the steps that it has begun
bare     a broadcast of the same bytes in the same buckets between two otherwise idle processes (bare.py), while the
         engine is still empty: its seconds over those of the whole pause, and over those that the pause takes longer
         than an empty one
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.engines.sglang.engine import Options
from asyncrl.errors import WeightsError
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest
from asyncrl.tensors.snapshot import BUCKET_BYTES
from asyncrl.weights.nccl_channel import CollectiveReceiver
from asyncrl.weights.port import LoadReport
from benchmarks.gpu import bare
from benchmarks.gpu.arm import visible_devices
from benchmarks.gpu.fleet import GPU_ARGUMENTS, has_gpu
from benchmarks.gpu.learner_side import LearnerSide, learner_side
from benchmarks.gpu.modes import assignments
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.shapes import SHAPES, make_model
from benchmarks.gpu.timed_engine import TimedEngine, full_load

TRANSPORTS: Final = ("nccl", "nccl-sglang", "shm", "disk", "shm-sglang", "disk-sglang")
NCCL: Final = TRANSPORTS[:2]

_PATIENCE_SECONDS: Final = 5.0


async def send(receiver: CollectiveReceiver, learner: LearnerSide) -> LoadReport:
    """Do one transfer, as WeightFollower and WeightSender do."""
    async with asyncio.TaskGroup() as group:

        async def ask(request: TransferRequest) -> TransferOffer:
            offer = await asyncio.to_thread(learner.begin, request)
            group.create_task(asyncio.to_thread(learner.sent))
            return offer

        await receiver.join(ask)
    async with asyncio.TaskGroup() as group:
        return await receiver.receive(ask)


class Bench:
    """The benchmark of one shape: the learner's process, one engine under load, one row per transport."""

    def __init__(
        self,
        options: argparse.Namespace,
        shape: str,
        engine: TimedEngine,
        learner: LearnerSide,
        *,
        ranks: int,
        of_bare: Mapping[int, Mapping[str, float]],
    ) -> None:
        """
        ranks    ranks of the learner
        of_bare  results of the bare broadcast by MiB of a bucket
        """
        self._options, self._shape, self._engine, self._learner = options, shape, engine, learner
        self._ranks, self._of_bare = ranks, of_bare
        self._version = 0
        self._empty_pause = float("nan")
        assert engine.weight_updater is not None
        self._receiver = CollectiveReceiver(engine.weight_updater, engine="w0")

    async def pause_without_load(self) -> None:
        """Measure the pauses of updates that load nothing: how long the server needs to finish what it has begun."""
        pauses = []
        for _ in range(self._options.loads + 1):
            await asyncio.sleep(0.2)
            self._version += 1
            pauses.append((await self._engine.load_nothing((0, self._version))).pause_seconds)
        self._empty_pause = statistics.median(pauses[1:])
        self._engine.stages()

    async def row(self, transport: str, bucket_megabytes: int) -> dict[str, Any]:
        learner, ask = self._learner, asyncio.to_thread
        quiet = (time.monotonic() - 2.0, time.monotonic())
        reports, exports, publishes, busy = [], [], [], []
        loads = self._options.loads if transport in NCCL else self._options.folder_loads
        await self._meet_again(transport, bucket_megabytes)
        self._engine.straight()
        for number in range(loads + 1):
            await asyncio.sleep(0.2)
            self._version += 1
            num_bytes, seconds = await ask(learner.export, self._version)
            exports.append(seconds)
            began = time.monotonic()
            if transport in NCCL:
                with self._engine.reading(transport):
                    reports.append(await send(self._receiver, learner))
            else:
                weights = await ask(learner.publish)
                publishes.append(time.monotonic() - began)
                with self._engine.reading(transport):
                    reports.append(await self._engine.load(weights))
            busy.append(await ask(learner.seconds, began, time.monotonic()))
            if number == 0:
                self._engine.stages()  # the first load is separate
        pauses = sorted(report.pause_seconds for report in reports[1:])
        before, during = await ask(learner.seconds, *quiet), statistics.mean(busy[1:])
        stages, found = self._engine.stages(), self._of_bare.get(bucket_megabytes, {}) if transport in NCCL else {}
        if found:
            bare_seconds, pause = found["bare_seconds"], statistics.median(pauses)
            loading = pause - self._empty_pause
            found = {**found, "bare_of_pause": bare_seconds / pause, "bare_of_load": bare_seconds / loading}
        return {
            "shape": self._shape,
            "transport": transport,
            "ranks": self._ranks,
            "gigabytes_per_second": num_bytes / statistics.median(pauses) / 1e9,
            **found,
            "requests": self._options.requests,
            "loads": loads,
            "megabytes": num_bytes / 1e6,
            "bucket_megabytes": bucket_megabytes,
            "straight": min(straight) if len(straight := self._engine.straight()) >= loads else 0,
            "pause_first": reports[0].pause_seconds,
            "pauses": [round(report.pause_seconds, 4) for report in reports],
            "pause_p50": statistics.median(pauses),
            "pause_p99": pauses[math.ceil(0.99 * len(pauses)) - 1],
            "empty_pause_p50": self._empty_pause,
            "stages": stages,
            "export_p50": statistics.median(exports[1:]),
            "export_max": max(exports[1:]),
            "publish_p50": statistics.median(publishes[1:]) if publishes else None,
            "slower": None if self._options.idle else during / before - 1.0,
        }

    async def leave(self) -> None:
        await self._receiver.leave()

    async def _meet_again(self, transport: str, bucket_megabytes: int) -> None:
        await self._receiver.leave()
        await asyncio.to_thread(self._learner.open, transport, bucket_megabytes * 2**20)

    async def killed(self) -> dict[str, Any]:
        """Kill the server during a transfer; return the sender's report, and whether the learner goes on."""
        learner, ask = self._learner, asyncio.to_thread
        await self._meet_again("nccl", BUCKET_BYTES // 2**20)
        await ask(learner.export, self._version + 1)
        await send(self._receiver, learner)
        await ask(learner.begin, self._receiver.request)
        began = time.monotonic()
        await asyncio.sleep(0.5)  # the collective waits on the learner's GPU
        await self._engine.kill()
        problem = ""
        try:
            await ask(learner.sent)
        except WeightsError as error:
            problem = str(error)
        gave_up = time.monotonic() - began
        await asyncio.sleep(1.0)
        after = await ask(learner.seconds, time.monotonic() - 0.9, time.monotonic())
        return {
            "shape": self._shape,
            "transport": "killed",
            "gave_up_seconds": gave_up,
            "problem": problem,
            "learner_goes_on": await ask(learner.computes) and not math.isnan(after),
        }


@contextlib.contextmanager
def on_gpu(gpu: int) -> Iterator[None]:
    """Processes that start in this context see only this GPU."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices([gpu])
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


async def run_shape(options: argparse.Namespace, shape: str, rows: list[dict[str, Any]]) -> None:
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-weights-")))
        folder = (options.models or scratch) / shape.replace(":", "-")
        if not (folder / "model.safetensors").exists():
            make_model(SHAPES[shape], folder)
        arguments = {**GPU_ARGUMENTS, "mem-fraction-static": options.memory, **options.engine} if has_gpu() else {}
        engine = TimedEngine(
            folder,
            device="cuda" if has_gpu() else "cpu",
            dtype="bfloat16",
            version=(0, 0),
            options=Options(version_source="stream", server_arguments=arguments),
            log_path=scratch / "w0.engine.log",
        )
        with on_gpu(options.engine_gpu):
            await engine.start()
        gc.freeze()  # as cli/rollout_worker.py does
        try:
            found = bare_of(options, folder) if options.bare else {}
            learners = stack.enter_context(contextlib.ExitStack())
            for ranks in options.ranks:
                with on_gpu(options.learner_gpu):
                    learner = learners.enter_context(
                        learner_side(folder, patience_seconds=_PATIENCE_SECONDS, ranks=ranks, is_idle=options.idle)
                    )
                bench = Bench(options, shape, engine, learner, ranks=ranks, of_bare=found)
                async with full_load(engine, options.requests) as finished:
                    await asyncio.sleep(3.0)
                    await bench.pause_without_load()
                    for transport in options.transports:
                        for bucket in options.bucket_megabytes if transport in NCCL else [BUCKET_BYTES // 2**20]:
                            report(rows, await guarded(bench.row(transport, bucket), shape, transport), options.json)
                print(f"{shape}: {len(finished)} answers finished meanwhile, {sum(finished):,} tokens", flush=True)
                if options.kill and ranks == options.ranks[-1]:
                    report(rows, await guarded(bench.killed(), shape, "killed"), options.json)
                else:
                    await bench.leave()
                learners.close()  # the next one needs its GPU
        finally:
            await engine.close()


def bare_of(options: argparse.Namespace, folder: Path) -> dict[int, dict[str, float]]:
    """Return the results of the bare broadcast by MiB of a bucket. Failures are reported and left out."""
    num_bytes, found = (folder / "model.safetensors").stat().st_size, {}
    gpus = (options.learner_gpu, options.engine_gpu) if has_gpu() else (0, 0)
    for megabytes in options.bucket_megabytes:
        try:
            found[megabytes] = bare.measure(num_bytes, bucket_bytes=megabytes * 2**20, from_gpu=gpus[0], to_gpu=gpus[1])
            print(f"bare, buckets of {megabytes} MiB: {found[megabytes]}", flush=True)
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            print(f"bare: {error}", flush=True)
    return found


async def guarded(work: Any, shape: str, transport: str) -> dict[str, Any]:
    """Run one transport. If it fails, return a row with the error, so that the others go on."""
    try:
        return dict(await work)
    except Exception as error:
        return {"shape": shape, "transport": transport, "error": f"{type(error).__name__}: {error}"}


def report(rows: list[dict[str, Any]], row: dict[str, Any], path: Path | None) -> None:
    rows.append(row)
    print(line(row), flush=True)
    keep(row | {"command": command("benchmarks.gpu.weights"), **machine()}, path)


HEAD = "shape  transport      MB  bucket   first pause   p50 ms   p99 ms   export ms   publish ms   slower"


def line(row: Mapping[str, Any]) -> str:
    head = f"{row['shape']:5s}  {row['transport']:10s}"
    if "error" in row:
        return f"{head}  failed: {row['error']}"
    if row["transport"] == "killed":
        return f"{head}  given up after {row['gave_up_seconds']:.1f} s, learner goes on: {row['learner_goes_on']}"
    publish = f"{1e3 * row['publish_p50']:10.0f}" if row["publish_p50"] is not None else "         -"
    table = (
        f"{head}  {row['megabytes']:5.0f}  {row['bucket_megabytes']:6d}  {1e3 * row['pause_first']:12.0f}"
        f"  {1e3 * row['pause_p50']:7.1f}  {1e3 * row['pause_p99']:7.1f}  {1e3 * row['export_p50']:10.1f}   {publish}"
    )
    table += f"  {row['slower']:7.1%}" if row["slower"] is not None else "        -"
    table += f"\n    {row['straight']:,} tensors were copied straight, the others by SGLang's load_weights"
    if "bare_of_pause" in row:
        table += (
            f"\n    {row['gigabytes_per_second']:.0f} GB/s, bare {row['bare_gigabytes_per_second']:.0f}: "
            f"{row['bare_of_pause']:.0%} of the pause, {row['bare_of_load']:.0%} of what it adds to an empty one "
            f"({1e3 * row['empty_pause_p50']:.1f} ms)"
        )
    stages = [
        f"    {path:32s} {1e3 * p50:7.1f} ms, worst {1e3 * worst:.1f}" for path, (p50, worst) in row["stages"].items()
    ]
    return "\n".join([table, *stages])


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.weights", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=["0.6B"], metavar="SHAPE")
    add("--transports", nargs="+", choices=TRANSPORTS, default=["nccl", "shm", "disk"], metavar="TRANSPORT")
    add(
        "--bucket-megabytes", nargs="+", type=int, default=[BUCKET_BYTES // 2**20], help="of the engine's memory (nccl)"
    )
    add("--requests", type=int, default=256)
    add("--loads", type=int, default=20, help="by NCCL (default 20)")
    add("--folder-loads", type=int, default=5, help="by a folder: seconds each (default 5)")
    add("--ranks", nargs="+", type=int, default=[1], help="of the learner, each with its part; one after another")
    add("--bare", action="store_true", help="measure a bare broadcast of the same bytes before")
    add("--idle", action="store_true", help="the learner's GPU multiplies no matrices")
    add("--learner-gpu", type=int, default=0)
    add("--engine-gpu", type=int, default=1)
    add("--memory", type=float, default=0.85, help="mem-fraction-static of the server")
    add("--engine", nargs="+", default=[], metavar="OPTION=VALUE", help="options of the SGLang server")
    add("--models", type=Path, metavar="FOLDER", help="keeps models, one folder a shape (default: made anew)")
    add("--kill", action="store_true", help="kill the server during a transfer at the end")
    add("--json", type=Path)
    options = parser.parse_args(given)
    options.engine = assignments(options.engine)
    if max(options.ranks) > 1 and not set(options.transports) <= set(NCCL):
        parser.error("--ranks 2 and more send by nccl: add --transports nccl")
    if options.kill and options.idle:
        parser.error("--kill shows that the learner's products go on: leave --idle out")
    rows: list[dict[str, Any]] = []
    print(HEAD)
    for shape in options.shapes:
        asyncio.run(run_shape(options, shape, rows))
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
