"""The learner's side of benchmarks/gpu/weights.py in its own process: weights, channels, and load on its GPU.

with learner_side(folder, patience_seconds=5, ranks=1) as learner:
    learner.open("nccl", bucket_bytes)
    learner.export(version)

With several ranks, each rank is a process that holds, exports and sends its own part, as in pipeline or expert
parallelism. The ranks share the learner's GPU. This works because no process group with the engine contains two of
them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Final, cast

import torch
from safetensors import safe_open

from asyncrl.messages import WeightVersion
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest
from asyncrl.tensors.snapshot import PartWorker, Snapshot
from asyncrl.weights.files import FilesChannel
from asyncrl.weights.nccl import Sender

_MATRIX: Final = 4096


class Products:
    """Keeps the learner's GPU busy with matrix products, and records their times."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[tuple[float, float]] = []
        """(end, seconds) of every ten products."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

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
            self._times.append((now, now - began))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def seconds(self, since: float, until: float) -> float:
        """Return the mean seconds of ten products between two times; NaN if there are none."""
        found = [seconds for at, seconds in self._times if since < at <= until]
        return statistics.mean(found) if found else float("nan")


class OtherRank:
    """A further rank of the learner: its part of the model, and the channel's worker for this part."""

    def __init__(self, folder: Path, number: int, ranks: int) -> None:
        os.environ["NCCL_CUMEM_ENABLE"] = "0"  # as adapters/registry.py does
        self._tensors = part_of(folder, number, ranks)
        self._workers: dict[type[PartWorker], PartWorker] = {}
        self._snapshot: Snapshot | None = None

    def export(self) -> int:
        """Export this rank's part; return its bytes."""
        self._snapshot = None  # free its memory for the next one
        self._snapshot = Snapshot.from_tensors(self._tensors.items())
        return self._snapshot.num_bytes

    def run(self, worker: type[PartWorker], order: bytes) -> bytes:
        assert self._snapshot is not None
        return self._workers.setdefault(worker, worker())(self._snapshot, order)


class OtherPart:
    """See tensors.snapshot.Part."""

    def __init__(self, side: OtherRank, rank: int) -> None:
        self._side = side
        self.rank = rank

    def run(self, worker: type[PartWorker], order: bytes) -> bytes:
        return self._side.run(worker, order)


def part_of(folder: Path, number: int, ranks: int) -> dict[str, torch.Tensor]:
    """Load every ``ranks``-th tensor to the GPU. The layers are alike, so the parts have similar sizes."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    with safe_open(folder / "model.safetensors", framework="pt", device=device) as file:
        return {name: file.get_tensor(name) for name in sorted(file.keys())[number::ranks]}


class LearnerSide:
    """The learner's work for a publish, one transfer at a time.

    ranks    number of ranks that share the model
    is_idle  whether the GPU multiplies no matrices
    """

    def __init__(self, folder: Path, patience_seconds: float, ranks: int, is_idle: bool) -> None:
        os.environ["NCCL_CUMEM_ENABLE"] = "0"  # as adapters/registry.py does
        self._folder, self._patience = folder, patience_seconds
        self._device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self._processes = [_Process(ctx=multiprocessing.get_context("spawn")) for _ in range(ranks - 1)]
        for process in self._processes:
            process.start()
        self._others = [
            OtherPart(cast(OtherRank, process.OtherRank(folder, number, ranks)), number)  # type: ignore[attr-defined]
            for number, process in enumerate(self._processes, start=1)
        ]
        self._tensors = part_of(folder, 0, ranks)
        self._products = None if is_idle else Products(self._device)
        self._version = 0
        self._snapshot: Snapshot | None = None
        self._threads = ThreadPoolExecutor(max(1, ranks))
        self._root: Path | None = None

    def open(self, transport: str, bucket_bytes: int) -> None:
        self._sender = Sender("127.0.0.1", bucket_bytes=bucket_bytes, patience_seconds=self._patience)
        parent = Path("/dev/shm" if transport.startswith("shm") else tempfile.gettempdir())
        # Always the same name, so that leftovers of a killed run are removed. A concurrent run has another GPU.
        root = parent / f"asyncrl-weights-bench-{os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
        shutil.rmtree(root, ignore_errors=True)
        self._channel = FilesChannel(root, keep=2, model_path=self._folder)
        self._root = root

    def export(self, version: int) -> tuple[int, float]:
        """Export a snapshot; return its bytes, and the seconds that the learner stalls."""
        self._snapshot = None  # free its memory for the next one: 30B has room for one copy beside the weights
        self._sender.withdraw()
        began = time.monotonic()
        others = [self._threads.submit(part._side.export) for part in self._others]
        snapshot = replace(Snapshot.from_tensors(self._tensors.items()), others=tuple(self._others))
        self._snapshot = snapshot
        num_bytes = snapshot.num_bytes + sum(other.result() for other in others)
        seconds = time.monotonic() - began
        self._version = version
        self._sender.set_weights(snapshot, incarnation=0, policy_version=version)
        return num_bytes, seconds

    def publish(self) -> WeightVersion:
        assert self._snapshot is not None
        return self._channel.publish(self._snapshot, incarnation=0, policy_version=self._version)

    def begin(self, request: TransferRequest) -> TransferOffer:
        """Start sending at once, concurrently with the answer, as WeightSender does."""
        transfer = self._sender.begin(request)
        self._sending = self._threads.submit(transfer.send)
        return transfer.offer

    def sent(self) -> None:
        """Wait until the engine has everything. Raises WeightsError."""
        self._sending.result()

    def seconds(self, since: float, until: float) -> float:
        return self._products.seconds(since, until) if self._products is not None else float("nan")

    def computes(self) -> bool:
        ones = torch.ones(64, 64, device=self._device)
        return float((ones @ ones)[0, 0]) == 64.0

    def close(self) -> None:
        if self._products is not None:
            self._products.stop()
        for process in self._processes:
            process.shutdown()
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)


class _Process(BaseManager):
    """Serves a LearnerSide. Every calling thread has its own connection."""


_Process.register("LearnerSide", LearnerSide)
_Process.register("OtherRank", OtherRank)


@contextlib.contextmanager
def learner_side(
    folder: Path, *, patience_seconds: float, ranks: int = 1, is_idle: bool = False
) -> Iterator[LearnerSide]:
    process = _Process(ctx=multiprocessing.get_context("spawn"))
    with process:
        learner = cast(LearnerSide, process.LearnerSide(folder, patience_seconds, ranks, is_idle))  # type: ignore[attr-defined]
        try:
            yield learner
        finally:
            learner.close()
