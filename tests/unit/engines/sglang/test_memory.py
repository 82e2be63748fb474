"""A server's memory leaves its GPUs and returns once there is room for it (run.colocated)."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.engines.sglang.memory import GpuMemory, read_free_bytes
from asyncrl.errors import EngineDied, EngineError

GIB = 2**30


class Gpus:
    """Two GPUs of 140 GiB. A server has ``server_gib`` of each, and a learner that is slow to leave ``learner_gib`` of
    the second. The learner leaves when somebody has looked ``looks`` times after ``resume`` was called."""

    def __init__(self, *, looks: int = 0) -> None:
        self.is_served = True
        self.server_gib, self.learner_gib = 119, 0
        self.looks = looks
        self.busy = 0

    def free_bytes(self) -> dict[str, int]:
        if self.looks:
            self.looks -= 1
        elif not self.is_served:
            self.learner_gib = 0
        served = self.server_gib if self.is_served else 0
        return {"0": (140 - served) * GIB, "1": (140 - served - self.learner_gib) * GIB}


class Client:
    """A server that exits when it resumes with too little memory, like torch-memory-saver."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self.orders: list[str] = []

    async def flush(self) -> None:
        if self._gpus.busy:
            self._gpus.busy -= 1
            raise EngineError("busy")

    async def order(self, path: str, body: Any) -> None:
        assert not self._gpus.busy
        self.orders.append(path)
        self._gpus.is_served = path == "/resume_memory_occupation"
        if self._gpus.is_served and self._gpus.learner_gib + self._gpus.server_gib > 140:
            raise EngineDied("lost SGLang")


def memory_of(gpus: Gpus, **named: Any) -> GpuMemory:
    client: Any = Client(gpus)
    return GpuMemory(client, **({"free_bytes": gpus.free_bytes} | named))


async def test_a_server_that_is_still_busy_is_asked_again() -> None:
    gpus = Gpus()
    gpus.busy = 2
    await memory_of(gpus).release()
    assert not gpus.is_served


async def test_a_server_is_asked_back_once_others_have_freed_its_memory() -> None:
    gpus = Gpus()
    memory = memory_of(gpus)
    for _ in range(2):
        await memory.release()
        gpus.learner_gib, gpus.looks = 45, 3
        await memory.resume()
        assert gpus.is_served
        assert gpus.looks == 0


async def test_memory_that_stays_in_use_is_named_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    gpus = Gpus()
    memory = memory_of(gpus, room_seconds=0)
    await memory.release()
    gpus.learner_gib, gpus.looks = 45, 2**31
    with caplog.at_level(logging.WARNING), pytest.raises(EngineDied) as caught:
        await memory.resume()
    line = "run.colocated: GPU 1 has 95.0 GiB free, and the engine needs 119.0 GiB, 0 s after the learner left; "
    assert str(caught.value).startswith(line)
    assert "lower mem-fraction-static" in str(caught.value)
    assert str(caught.value).endswith(": lost SGLang")
    assert [record.message.startswith(line) for record in caplog.records] == [True]


class Library:
    """NVIDIA's management library on a machine with three GPUs, the last of which is lost."""

    class NVMLError(Exception):
        """As in pynvml."""

    def __init__(self, *, has_driver: bool = True) -> None:
        self.has_driver, self.is_open = has_driver, False

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.has_driver:
            raise self.NVMLError("Driver Not Loaded")
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:  # noqa: N802
        if name != "GPU-1":
            raise self.NVMLError("Not Found")
        return 1

    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:  # noqa: N802
        assert self.is_open
        if device == 2:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(total=100, free=10 * (device + 1))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, {"0": 10, "1": 20}), ("1", {"1": 20}), ("1, 0", {"1": 20, "0": 10}), ("GPU-1", {"GPU-1": 20})]
    + [("GPU-9", {}), ("", {}), ("2", {})],
)
def test_free_memory_is_of_the_gpus_that_the_process_sees(visible: str | None, expected: dict[str, int]) -> None:
    library = Library()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert read_free_bytes(environment, load=lambda name: library) == expected
    assert not library.is_open
