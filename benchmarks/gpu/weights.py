"""New weights into an engine at full load: how long it pauses, how long the learner stalls, by transport.

    python -m benchmarks.gpu.weights --shapes 0.6B 4B --json FILE          GPU 0 is the learner's, GPU 1 the engine's

The engine keeps --requests answers in progress all the time. The learner's GPU multiplies matrices without end, so
that what a transfer takes from training shows. Per transport --loads updates (the first is a warm-up, and reported
apart), then, with --kill, the server is killed while weights are on the way to it: the learner must go on.

pause    seconds without a token: from the order to pause until the server goes on
export   the snapshot on the learner's GPU: its stall for one publish
publish  until the folder is written and hashed, beside the next step (files only)
slower   the matrix products during transfers against before, as a share of their time
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors.torch
import torch

from asyncrl.engines.sglang import Options, SGLangEngine
from asyncrl.errors import EngineError, WeightsError
from asyncrl.messages import Sampling
from asyncrl.protocols import LoadReport
from asyncrl.snapshot import Snapshot
from asyncrl.weights.files import FilesChannel
from asyncrl.weights.nccl import Sender
from benchmarks.gpu.fleet import Fleet, has_gpu
from benchmarks.gpu.shapes import SHAPES, make_model

_PATIENCE_SECONDS: Final = 5.0
_MATRIX: Final = 4096


class Trainer:
    """Keeps the learner's GPU busy, and knows how long each of its products took."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stop = threading.Event()
        self.times: list[tuple[float, float]] = []
        """(when it ended, seconds) of every product of ten."""
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Trainer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        size = _MATRIX if self._device.type == "cuda" else 128
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        a = torch.randn(size, size, device=self._device, dtype=dtype)
        while not self._stop.is_set():
            began = time.monotonic()
            for _ in range(10):
                a @ a
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            now = time.monotonic()
            self.times.append((now, now - began))

    def seconds(self, since: float, until: float) -> float:
        """Of a product of ten, the mean between two times."""
        found = [seconds for at, seconds in self.times if since < at <= until]
        return statistics.mean(found) if found else float("nan")


@contextlib.asynccontextmanager
async def full_load(engine: SGLangEngine, requests: int) -> AsyncIterator[list[int]]:
    """Answers in progress all the time; gives the running count of tokens, by version at the end of each answer."""
    generator = np.random.default_rng(0)
    finished: list[int] = []

    async def one() -> None:
        while True:
            prompt = generator.integers(10, 30, 128).astype(np.int32)
            length = int(generator.integers(256, 1024))
            with contextlib.suppress(EngineError):
                made = await engine.generate(prompt, Sampling(max_new_tokens=length, ignore_eos=True), seed=0)
                finished.append(len(made.tokens))

    tasks = [asyncio.create_task(one()) for _ in range(requests)]
    try:
        yield finished
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def send(engine: SGLangEngine, sender: Sender) -> LoadReport:
    """One transfer, as WeightFollower and WeightSender do it."""
    receiver = engine.receiver
    assert receiver is not None
    if not receiver.request.has_joined:
        meeting = sender.begin(receiver.request)
        await asyncio.gather(asyncio.to_thread(meeting.send), receiver.join(meeting.offer))
    transfer = sender.begin(receiver.request)
    _, report = await asyncio.gather(asyncio.to_thread(transfer.send), receiver.receive(transfer.offer))
    return report


class Bench:
    """One shape: the learner's tensors, one loaded engine, one row per transport."""

    def __init__(self, options: argparse.Namespace, shape: str, folder: Path, engine: SGLangEngine) -> None:
        self._options, self._shape, self._folder, self._engine = options, shape, folder, engine
        self._device = torch.device("cuda", 0) if has_gpu() else torch.device("cpu")
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        self._tensors = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        self._version = 0

    def snapshot(self) -> tuple[Snapshot, float]:
        began = time.monotonic()
        made = Snapshot.of(self._tensors.items())
        return made, time.monotonic() - began

    async def row(self, transport: str, trainer: Trainer) -> dict[str, Any]:
        sender = Sender("127.0.0.1", patience_seconds=_PATIENCE_SECONDS)
        root = Path("/dev/shm" if transport == "shm" else tempfile.gettempdir()) / "asyncrl-weights-bench"
        channel = FilesChannel(root, keep=2, model_path=self._folder)
        quiet = (time.monotonic() - 2.0, time.monotonic())
        reports, exports, publishes, busy = [], [], [], []
        loads = self._options.loads if transport != "disk" else min(4, self._options.loads)
        try:
            for _ in range(loads + 1):
                await asyncio.sleep(0.2)
                self._version += 1
                snapshot, seconds = await asyncio.to_thread(self.snapshot)
                exports.append(seconds)
                began = time.monotonic()
                if transport == "nccl":
                    sender.hold(snapshot, run_epoch=0, policy_version=self._version)
                    reports.append(await send(self._engine, sender))
                else:
                    weights = await asyncio.to_thread(
                        channel.publish, snapshot, run_epoch=0, policy_version=self._version
                    )
                    publishes.append(time.monotonic() - began)
                    reports.append(await self._engine.load(weights))
                busy.append(trainer.seconds(began, time.monotonic()))
        finally:
            shutil.rmtree(root, ignore_errors=True)
        pauses = sorted(report.pause_seconds for report in reports[1:])
        before, during = trainer.seconds(*quiet), statistics.mean(busy[1:])
        return {
            "shape": self._shape,
            "transport": transport,
            "requests": self._options.requests,
            "loads": loads,
            "megabytes": snapshot.num_bytes / 1e6,
            "pause_first": reports[0].pause_seconds,
            "pauses": [report.pause_seconds for report in reports],
            "pause_p50": statistics.median(pauses),
            "pause_p99": pauses[math.ceil(0.99 * len(pauses)) - 1],
            "export_p50": statistics.median(exports[1:]),
            "export_max": max(exports[1:]),
            "publish_p50": statistics.median(publishes[1:]) if publishes else None,
            "slower": during / before - 1.0,
        }

    async def killed(self, fleet: Fleet, trainer: Trainer) -> dict[str, Any]:
        """The server dies while weights are on the way: what the sender says, and whether the learner goes on."""
        sender = Sender("127.0.0.1", patience_seconds=_PATIENCE_SECONDS)
        snapshot, _ = self.snapshot()
        sender.hold(snapshot, run_epoch=0, policy_version=self._version + 1)
        receiver = self._engine.receiver
        assert receiver is not None
        if not receiver.request.has_joined:
            await send(self._engine, sender)
        else:
            await self._rejoin(sender)
        transfer = sender.begin(self._engine.receiver.request)  # type: ignore[union-attr]
        began = time.monotonic()
        sending = asyncio.create_task(asyncio.to_thread(transfer.send))
        await asyncio.sleep(0.5)  # the collective waits on the learner's GPU
        await asyncio.to_thread(fleet.kill)
        problem = ""
        try:
            await sending
        except WeightsError as error:
            problem = str(error)
        gave_up = time.monotonic() - began
        await asyncio.sleep(1.0)
        after = trainer.seconds(time.monotonic() - 0.9, time.monotonic())
        check = float((torch.ones(64, 64, device=self._device) @ torch.ones(64, 64, device=self._device))[0, 0])
        return {
            "shape": self._shape,
            "transport": "killed",
            "gave_up_seconds": gave_up,
            "problem": problem,
            "learner_goes_on": check == 64.0 and after == after,
        }

    async def _rejoin(self, sender: Sender) -> None:
        """This sender has not met the engine yet."""
        self._engine.receiver._rename()  # type: ignore[union-attr]
        await send(self._engine, sender)


async def run_shape(options: argparse.Namespace, shape: str, rows: list[dict[str, Any]]) -> None:
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-weights-")))
        folder = make_model(SHAPES[shape], scratch / "model")
        arguments = {"mem-fraction-static": options.memory} if has_gpu() else {}
        fleet = stack.enter_context(
            Fleet(folder, gpus=[options.engine_gpu], log_dir=scratch, server_arguments=arguments)
        )
        engine = SGLangEngine(
            folder,
            device="cuda" if has_gpu() else "cpu",
            dtype="bfloat16",
            version=(0, 0),
            options=Options(url=fleet.urls[0], version_source="stream"),
            log_path=scratch / "w0.engine.log",
        )
        await engine.start()
        gc.freeze()  # as commands/roles.py does
        try:
            bench = Bench(options, shape, folder, engine)
            stack.enter_context(trainer := Trainer(bench._device))
            async with full_load(engine, options.requests) as finished:
                await asyncio.sleep(3.0)
                for transport in options.transports:
                    report(rows, await guarded(bench.row(transport, trainer), shape, transport), options.json)
            print(f"{shape}: {len(finished)} answers finished meanwhile, {sum(finished):,} tokens", flush=True)
            if options.kill:
                report(rows, await guarded(bench.killed(fleet, trainer), shape, "killed"), options.json)
        finally:
            await engine.close()


async def guarded(work: Any, shape: str, transport: str) -> dict[str, Any]:
    """A transport that fails is a row, and the others go on."""
    try:
        return dict(await work)
    except Exception as error:
        return {"shape": shape, "transport": transport, "error": f"{type(error).__name__}: {error}"}


def report(rows: list[dict[str, Any]], row: dict[str, Any], path: Path | None) -> None:
    """At once, so that a call that is cut off keeps what it measured."""
    rows.append(row)
    print(line(row), flush=True)
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


HEAD = "shape  transport     MB   first pause   p50 ms   p99 ms   export ms   publish ms   slower"


def line(row: Mapping[str, Any]) -> str:
    head = f"{row['shape']:5s}  {row['transport']:9s}"
    if "error" in row:
        return f"{head}  failed: {row['error']}"
    if row["transport"] == "killed":
        return f"{head}  given up after {row['gave_up_seconds']:.1f} s, learner goes on: {row['learner_goes_on']}"
    publish = f"{1e3 * row['publish_p50']:10.0f}" if row["publish_p50"] is not None else "         -"
    return (
        f"{head}  {row['megabytes']:5.0f}  {1e3 * row['pause_first']:12.0f}  {1e3 * row['pause_p50']:7.1f}"
        f"  {1e3 * row['pause_p99']:7.1f}  {1e3 * row['export_p50']:10.1f}   {publish}  {row['slower']:7.1%}"
    )


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.weights", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=["0.6B"], metavar="SHAPE")
    add("--transports", nargs="+", choices=("nccl", "shm", "disk"), default=["nccl", "shm", "disk"])
    add("--requests", type=int, default=256)
    add("--loads", type=int, default=20)
    add("--engine-gpu", type=int, default=1)
    add("--memory", type=float, default=0.85, help="mem-fraction-static of the server")
    add("--kill", action="store_true", help="kill the server during a transfer at the end")
    add("--json", type=Path)
    options = parser.parse_args(given)
    rows: list[dict[str, Any]] = []
    print(HEAD)
    for shape in options.shapes:
        asyncio.run(run_shape(options, shape, rows))
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
