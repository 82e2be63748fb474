"""An SGLang server as a child process: its command line, its environment, its log, and its end.

The server runs under ``warden.py``: no process of its tree outlives us, even when we are killed by SIGKILL
(tests/test_sglang_server.py: test_the_server_goes_with_its_owner).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError

_HERE = Path(__file__).parent
_LOG_TAIL_BYTES = 3000

LOADER = "asyncrl.engines.sglang_loader.load"
"""What reads weights from files in the servers that we launch."""
_MOST_RANKS_OF_LOADER = 2
"""Each rank reads all of a file, and in SGLang's own way only what it keeps: from four on that should be as fast."""

INSTALL_HINT = (
    "engine.kind = 'sglang' needs SGLang, which is not installed: `pip install 'sglang>=0.5.16'` beside a CUDA build "
    "of torch, or without a GPU `pip install -r requirements/sglang-cpu.txt && pip install --no-deps sglang`; "
    "engine.kind = 'inprocess' needs neither"
)

_CPU_ARGUMENTS: Mapping[str, Any] = {
    "attention-backend": "torch_native",  # the default asks for AMX kernels
    "sampling-backend": "pytorch",
    "mem-fraction-static": 0.1,
    "max-total-tokens": 65_536,
    "max-running-requests": 64,
    "sleep-on-idle": True,  # it would spin on a core that the learner could use
}

_CPU_ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",  # otherwise rotary embeddings want vllm
    "TOKENIZERS_PARALLELISM": "false",
}


def check_installed() -> None:
    """Raises ConfigError saying how to install SGLang. It is looked for, not imported."""
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError(INSTALL_HINT)


def check_dtype(dtype: str, *, device: str, server_arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError where the server would die as it starts, minutes later."""
    said = {_option(key): value for key, value in server_arguments.items()}
    if said.get("device", device) == "cuda" and said.get("dtype", dtype) in ("float32", "float"):
        raise ConfigError(
            'model.dtype: SGLang has no float32 kernels for GPUs; use "bfloat16", engine.device = "cpu" or '
            'engine.kind = "inprocess"'
        )


def server_command(
    model_path: Path,
    *,
    device: str,
    dtype: str,
    port: int,
    weight_version: str,
    tensor_parallel: int,
    stream_interval: int,
    server_arguments: Mapping[str, Any],
) -> list[str]:
    """The server's command line. ``server_arguments`` override every default, whatever SGLang calls them.

    The dtype is always said: by default SGLang gives a float32 model a float16 KV cache, and logprobs are off by 0.01.
    """
    arguments: dict[str, Any] = {
        "model-path": str(model_path),
        "device": device,
        "dtype": dtype,
        "host": "127.0.0.1",
        "port": port,
        "weight-version": weight_version,
        "tensor-parallel-size": tensor_parallel,
        "stream-interval": stream_interval,
        "incremental-streaming-output": True,
        "skip-server-warmup": True,  # it sends a sentence: a tokenizer that knows none of it makes it die on a GPU
        "custom-weight-loader": [LOADER],
        **(_CPU_ARGUMENTS if device == "cpu" else {}),
        **{_option(key): value for key, value in server_arguments.items()},
    }
    command = [sys.executable, "-m", "sglang.launch_server"]
    for key, value in arguments.items():
        command += _argument(key, value)
    return command


def _option(key: str) -> str:
    return key.replace("_", "-").lstrip("-")


def _argument(key: str, value: Any) -> list[str]:
    """One option: a bool is a flag that is there or not, a list several words, a table JSON."""
    if isinstance(value, bool):
        return [f"--{key}"] if value else []
    if isinstance(value, list | tuple):
        return [f"--{key}", *map(str, value)]
    return [f"--{key}", json.dumps(value) if isinstance(value, Mapping) else str(value)]


def server_environment(base: Mapping[str, str], *, device: str, tensor_parallel: int = 1) -> dict[str, str]:
    """``base`` and what the server needs besides. No process but the server may see the stand-ins on PYTHONPATH."""
    environment = {
        **base,
        "HF_HUB_OFFLINE": "1",  # the model is a folder
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health would hang while generation is paused
    }
    if device == "cpu":
        environment.update(_CPU_ENVIRONMENT)
        environment.setdefault("OMP_NUM_THREADS", "1")
        if tensor_parallel > 1:
            environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _shares_of_cores(tensor_parallel))
        if importlib.util.find_spec("sgl_kernel") is None:
            paths = [str(_HERE / "sglang_cpu_stubs"), base.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def _shares_of_cores(ranks: int) -> str:
    """Cores for each rank, as SGLang wants them where a machine has fewer NUMA nodes than ranks: 0,1|2,3."""
    cores = sorted(os.sched_getaffinity(0))
    count = max(1, len(cores) // ranks)
    starts = [rank * count % len(cores) for rank in range(ranks)]
    return "|".join(",".join(map(str, cores[start : start + count])) for start in starts)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ranks_with_loader(info: Mapping[str, Any]) -> int:
    """How many ranks of a server that we launched read files by LOADER, of its /server_info; 0 when SGLang does."""
    ranks = int(info.get("tp_size") or 1)
    is_plain = (
        LOADER in (info.get("custom_weight_loader") or ())
        and int(info.get("dp_size") or 1) == 1  # SGLang takes no order with tensors for replicas
        and int(info.get("nnodes") or 1) == 1  # another host does not see the file that we hold open
        and not info.get("quantization")  # SGLang quantizes what it reads itself
        and not info.get("speculative_algorithm")  # the draft model reads the folder, too
    )
    return ranks if is_plain and ranks <= _MOST_RANKS_OF_LOADER else 0


class ServerProcess:
    """A command under the warden, its output in a log file."""

    def __init__(self, command: list[str], *, environment: Mapping[str, str], log_path: Path) -> None:
        self._command = command
        self._environment = environment
        self.log_path = log_path
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                str(_HERE / "warden.py"),
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(self._environment),
                start_new_session=True,  # Ctrl-C is for the worker, which still needs the server to drain
            )

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def wait(self) -> int:
        """Until the server and all its children are gone."""
        assert self._process is not None
        return await self._process.wait()

    async def close(self) -> None:
        """Kill the server and all its children. What they leave in /dev/shm (16 KiB) the next start sweeps up."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()

    def log_tail(self) -> str:
        """The end of the log, for an error message."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
                text = log.read(_LOG_TAIL_BYTES).decode(errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        return f"end of {self.log_path}:\n{text}"
