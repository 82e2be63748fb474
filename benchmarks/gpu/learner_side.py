"""The learner's side of benchmarks/gpu/weights.py, in a process of its own: its weights, its channels, its busy GPU.

with learner_side(folder, patience_seconds=5) as learner:
    learner.open("nccl", bucket_bytes)
    learner.export(version)
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
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Final, cast

import safetensors.torch
import torch

from asyncrl.messages import WeightVersion
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.files import FilesChannel
from asyncrl.weights.nccl import Sender

_MATRIX: Final = 4096


class Products:
    """Keeps the learner's GPU busy with matrix products, and knows how long each took."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[tuple[float, float]] = []
        """(when it ended, seconds) of every ten products."""
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
        """Of ten products, the mean between two times; NaN when there was none."""
        found = [seconds for at, seconds in self._times if since < at <= until]
        return statistics.mean(found) if found else float("nan")


class LearnerSide:
    """What the learner does for a publish; one transfer at a time."""

    def __init__(self, folder: Path, patience_seconds: float) -> None:
        self._folder, self._patience = folder, patience_seconds
        self._device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        self._tensors = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        self._products = Products(self._device)
        self._version = 0
        self._threads = ThreadPoolExecutor(1)
        self._root: Path | None = None

    def open(self, transport: str, bucket_bytes: int) -> None:
        self._sender = Sender("127.0.0.1", bucket_bytes=bucket_bytes, patience_seconds=self._patience)
        parent = Path("/dev/shm" if transport.startswith("shm") else tempfile.gettempdir())
        # The same name each time: what a killed run left goes. Another one at the same time has another GPU.
        root = parent / f"asyncrl-weights-bench-{os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
        shutil.rmtree(root, ignore_errors=True)
        self._channel = FilesChannel(root, keep=2, model_path=self._folder)
        self._root = root

    def export(self, version: int) -> tuple[int, float]:
        """Bytes of the snapshot, and the seconds for which the learner stalls."""
        began = time.monotonic()
        self._snapshot = Snapshot.of(self._tensors.items())
        seconds = time.monotonic() - began
        self._version = version
        self._sender.hold(self._snapshot, incarnation=0, policy_version=version)
        return self._snapshot.num_bytes, seconds

    def publish(self) -> WeightVersion:
        return self._channel.publish(self._snapshot, incarnation=0, policy_version=self._version)

    def begin(self, request: TransferRequest) -> TransferOffer:
        """Sends at once, beside the answer, as WeightSender does."""
        transfer = self._sender.begin(request)
        self._sending = self._threads.submit(transfer.send)
        return transfer.offer

    def sent(self) -> None:
        """Returns once the engine has it all. Raises WeightsError."""
        self._sending.result()

    def seconds(self, since: float, until: float) -> float:
        return self._products.seconds(since, until)

    def computes(self) -> bool:
        ones = torch.ones(64, 64, device=self._device)
        return float((ones @ ones)[0, 0]) == 64.0

    def close(self) -> None:
        self._products.stop()
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)


class _Process(BaseManager):
    """Serves a LearnerSide; every thread that calls it has a connection of its own."""


_Process.register("LearnerSide", LearnerSide)


@contextlib.contextmanager
def learner_side(folder: Path, *, patience_seconds: float) -> Iterator[LearnerSide]:
    process = _Process(ctx=multiprocessing.get_context("spawn"))
    with process:
        learner = cast(LearnerSide, process.LearnerSide(folder, patience_seconds))  # type: ignore[attr-defined]
        try:
            yield learner
        finally:
            learner.close()
