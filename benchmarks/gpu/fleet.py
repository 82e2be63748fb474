"""SGLang servers for GPU benchmarks. They outlive many runs, because each takes a minute to start.

    with started_bus(scratch / "bus", max_message_bytes=2**24) as bus, Fleet(model, gpus=[1, 2], log_dir=logs) as fleet:
        fleet.reset()
        result = run_arm(fleet.urls, run_file=..., overrides={...}, name="a", learner_gpus=[0], directory=..., bus=bus,
                         limit_seconds=60)

The runs are in arm.py. On a machine without GPUs the servers run on the CPU, for rehearsals.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.engines.sglang.checks import check_installed
from asyncrl.engines.sglang.options import by_name
from asyncrl.engines.sglang.server import ServerProcess, find_free_port, server_command, server_environment
from benchmarks.gpu.arm import Arm, ArmResult, BusAddress, run_arm, visible_devices

__all__ = ["Arm", "ArmResult", "BusAddress", "Fleet", "FleetError", "run_arm", "started_bus"]

T = TypeVar("T")

GPU_ARGUMENTS: Final[Mapping[str, Any]] = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
}
"""Options of an SGLang server whose torch has no other attention kernels."""

_QUIET_SECONDS: Final = 15.0
_RELOAD_SECONDS: Final = 60.0


class FleetError(Exception):
    """A server does not start or restart."""


@contextlib.contextmanager
def started_bus(directory: Path, *, max_message_bytes: int = 8 * 2**20) -> Iterator[BusAddress]:
    """Start a nats-server with its store in ``directory``, which is removed afterwards.

    Enter this context on a thread that keeps running, because the server ends with the thread that started it.
    """
    server = EmbeddedServer(directory, max_message_bytes=max_message_bytes)
    try:
        with server:
            yield BusAddress(url=server.url, token=server.token)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Fleet:
    """SGLang servers of one model, one per GPU. ``urls`` has their addresses in the order of ``gpus``.

    server_arguments  options of SGLang that override GPU_ARGUMENTS (or the CPU's on a machine without GPUs)
    log_dir           folder for a log of each server
    """

    def __init__(
        self,
        model_path: Path,
        *,
        gpus: Sequence[int],
        log_dir: Path,
        server_arguments: Mapping[str, Any] | None = None,
        dtype: str = "bfloat16",
        start_seconds: float = 400.0,
        stream_interval: int = 16,
    ) -> None:
        self._device = "cuda" if has_gpu() else "cpu"
        arguments = {
            "log-level-http": "warning",
            "skip-server-warmup": self._device == "cpu",  # on GPUs the warm-up compiles kernels before the first arm
            **(GPU_ARGUMENTS if self._device == "cuda" else {}),
            **(server_arguments or {}),
        }
        self._start_seconds = start_seconds
        self._model_path = model_path.absolute()
        self._servers = [
            _Server(
                self._model_path,
                gpu=gpu,
                device=self._device,
                dtype=dtype,
                arguments=arguments,
                stream_interval=stream_interval,
                log_path=log_dir / f"sglang-{gpu}.log",
            )
            for gpu in gpus
        ]
        self.urls = tuple(server.url for server in self._servers)
        self._loop = asyncio.new_event_loop()  # owns the child processes
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleet", daemon=True)

    def __enter__(self) -> Fleet:
        check_installed()
        self._thread.start()
        try:
            self._start(self._servers)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def kill(self) -> None:
        """Kill every server, whatever it does."""
        for server in self._servers:
            self._do(server.close())

    def close(self) -> None:
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def reset(self) -> None:
        """Make every server idle, with the initial weights as version 0:0 and an empty cache.

        Restarts servers that died or hang. Raises FleetError if one does not come back.
        """
        with ThreadPoolExecutor(len(self._servers)) as pool:
            problems = list(pool.map(_Server.reset, self._servers))
        broken = [(server, problem) for server, problem in zip(self._servers, problems, strict=True) if problem]
        for server, problem in broken:
            print(f"fleet: {server.url} is started again: {problem}", flush=True)
            self._do(server.close())
        if broken:
            self._start([server for server, _ in broken])

    def _start(self, servers: Sequence[_Server]) -> None:
        """Start servers concurrently, and wait until each answers.

        A server that ends during its start gets a second chance, because a port that SGLang chose may be taken by then.
        Raises FleetError, with the end of its log, for a server that does not answer.
        """
        began = reported = time.monotonic()
        for server in servers:
            self._do(server.start())
        waiting = list(servers)
        tried_again: set[_Server] = set()
        while waiting:
            time.sleep(0.5)
            for server in list(waiting):
                if server.is_healthy():
                    waiting.remove(server)
                    print(f"fleet: {server} is up after {time.monotonic() - began:.0f} s", flush=True)
                elif not server.is_alive and server not in tried_again:
                    tried_again.add(server)
                    print(f"fleet: {server} ended while it started, and is started again", flush=True)
                    self._do(server.close())
                    self._do(server.start())
                elif not server.is_alive:
                    raise FleetError(f"{server} ended while it started; {server.problem()}")
            seconds = time.monotonic() - began
            if waiting and seconds > self._start_seconds:
                raise FleetError(f"{waiting[0]} does not answer after {seconds:.0f} s; {waiting[0].problem()}")
            if waiting and time.monotonic() - reported > 15:
                reported = time.monotonic()
                print(f"fleet: waiting for {', '.join(map(str, waiting))} since {seconds:.0f} s", flush=True)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _Server:
    """One SGLang server on one GPU, and its requests."""

    def __init__(
        self,
        model_path: Path,
        *,
        gpu: int,
        device: str,
        dtype: str,
        arguments: Mapping[str, Any],
        stream_interval: int,
        log_path: Path,
    ) -> None:
        port = find_free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._model_path = model_path
        self._name = f"SGLang on {'GPU' if device == 'cuda' else 'CPU'} {gpu}"
        self._command = server_command(
            model_path,
            device=device,
            dtype=dtype,
            port=port,
            weight_version="default",
            tensor_parallel=1,
            stream_interval=stream_interval,
            server_arguments=by_name(arguments),
        )
        self._environment = server_environment(os.environ, device=device)
        if device == "cuda":
            self._environment["CUDA_VISIBLE_DEVICES"] = visible_devices([gpu])
        self._log_path = log_path
        self._process: ServerProcess | None = None

    def __str__(self) -> str:
        return self._name

    async def start(self) -> None:
        self._process = ServerProcess(self._command, environment=self._environment, log_path=self._log_path)
        await self._process.start()

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()
            self._process = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive

    def is_healthy(self) -> bool:
        try:
            ask(self.url, "/health", seconds=2.0)
        except OSError:
            return False
        return True

    def problem(self) -> str:
        return self._process.problem() if self._process is not None else "(not started)"

    def reset(self) -> str:
        """Reset the server to its initial state. Return why that failed; empty if it did not."""
        if not self.is_alive:
            return f"it ended; {self.problem()}"
        try:
            ask(self.url, "/abort_request", {"rid": "", "abort_all": True})
            ask(self.url, "/continue_generation", {})  # the worker that paused it may have been killed
            self._wait_until_quiet()
            update = {"model_path": str(self._model_path), "weight_version": "default", "flush_cache": False}
            answer = ask(self.url, "/update_weights_from_disk", update, seconds=_RELOAD_SECONDS)
            if not answer.get("success"):
                return f"it refuses the initial weights: {answer.get('message')}"
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        try:
            ask(self.url, "/flush_cache?timeout=5", {})
        except OSError as error:  # old keys take space, but requests of other engine objects do not find them
            print(f"fleet: {self}: {error}", flush=True)
        return ""

    def _wait_until_quiet(self) -> None:
        """Wait until nothing is generated, because a flush or an update would wait or break it. Raises TimeoutError."""
        deadline = time.monotonic() + _QUIET_SECONDS
        while sum(running_and_waiting(self.url)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"still generating {_QUIET_SECONDS:.0f} s after everything was aborted")
            ask(self.url, "/abort_request", {"rid": "", "abort_all": True})
            time.sleep(0.1)


def ask(url: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float = 10.0) -> Any:
    """Return a server's JSON answer ({} for any other answer). Uses POST if there is a body. Raises OSError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        raise OSError(f"{path}: {error.code} {error.read()[:300]!r}") from error
    try:
        return json.loads(text)
    except ValueError:
        return {}


def running_and_waiting(url: str) -> tuple[int, int]:
    """Return the number of running sequences of an SGLang server, and of waiting ones. Raises OSError."""
    loads = ask(url, "/v1/loads", seconds=2.0)["loads"]
    return sum(load["num_running_reqs"] for load in loads), sum(load["num_waiting_reqs"] for load in loads)


def has_gpu() -> bool:
    import torch  # takes seconds, so only when servers start

    return torch.cuda.is_available()
