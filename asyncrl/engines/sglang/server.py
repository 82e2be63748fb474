"""An SGLang server as a child process: command line, environment, log, and shutdown.

The server runs below a keeper (keeper.py), so no process of its tree outlives us, even if SIGKILL kills us
(tests/unit/engines/sglang/test_server.py: test_the_server_goes_with_its_owner).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from asyncrl import os_process
from asyncrl.data.model_folder import ExpertCounts, context_of, decoder_config, experts_of
from asyncrl.engines.sglang.options import (
    CPU_ARGUMENTS,
    INT4_ARGUMENTS,
    LOADER,
    QUANTIZATIONS,
    Options,
    computes_as_learner,
    prefill_arguments,
)
from asyncrl.engines.sglang.reply import EXPERTS_OPTION
from asyncrl.errors import ConfigError, WeightsError
from asyncrl.program import Program
from asyncrl.tensors import int4, quantized_model
from asyncrl.tensors.exact_environment import EXACT_ENVIRONMENT
from asyncrl.tensors.model_tensors import Shapes, read_shapes, trained_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model folder as its config.json and the headers of its weights describe it.

    path             the folder; of a quantized copy if the server reads one
    quantization     format of the copy (tensors/quantized_model.py); empty if the server reads model.path
    shapes           tensors that a new version of the weights consists of
    optional_names   those that it may lack, because they are tied to others
    vocabulary_size  number of tokens
    context_tokens   context length in tokens, prompt and answer together
    experts          counts of the experts that the server reports for each token; None if it reports nothing
    architecture     the first in config.json
    """

    path: Path
    quantization: str = ""
    shapes: Shapes = field(default_factory=dict)
    optional_names: frozenset[str] = frozenset()
    vocabulary_size: int = 2**31
    context_tokens: int = 2**31
    experts: ExpertCounts | None = None
    architecture: str = ""


def read_model(model: ServedModel, *, quantized: Path, reports_experts: bool) -> ServedModel:
    """Read the model folder at model.path, ``model.path``. Raises ConfigError.

    quantized      folder to write a copy in ``model.quantization`` to, which is served instead; unused without one
    reports_experts  whether the server is to report the experts of each token
    """
    path, quantization = model.path, model.quantization
    try:
        served = quantized_model.model_folder(path, quantized, quantization) if quantization else path
        config = decoder_config(json.loads((served / "config.json").read_text()))
        shapes = trained_shapes(read_shapes(served), config)
    except (OSError, ValueError, WeightsError) as error:
        raise ConfigError(f"model.path={path}: {error}") from error
    return ServedModel(
        path=served,
        quantization=quantization,
        shapes=shapes,
        optional_names=frozenset({"lm_head.weight"} if config.get("tie_word_embeddings") else ()),
        vocabulary_size=int(config.get("vocab_size", 2**31)),
        context_tokens=context_of(config),
        experts=experts_of(config) if reports_experts else None,
        architecture=str((config.get("architectures") or [""])[0]),
    )


_HERE = Path(__file__).parent
_LOG_BYTES: Final = 2**18
"""The end of a log that is searched for the reason why the server ended."""
_LONGEST_REASON: Final = 300
_REASON: Final = re.compile(r"(?:[\w.]*(?:Error|Exception)\b(?:: .*)?|.*\berror: .+)")
"""The last line of a traceback, or what a command line's parser says."""
_ECHO: Final = re.compile(r"scheduler died|Initialization failed|Received sigquit|BrokenPipe|EOFError|ConnectionReset")
"""What the server's other processes say when one of them has died."""
_ANSWERED: Final = '" 200 OK'
"""What the server's log says of a request that it answered, as each does that has been up."""
_OPTION: Final = re.compile(r"(?<!\w)--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")
_CPU_ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",  # otherwise rotary embeddings need vllm
    "TOKENIZERS_PARALLELISM": "false",
}
_COMPILES: Final = "enable-torch-compile"
_PORTS: Final = range(10_000, 32_000)
_RANDOM: Final = random.SystemRandom()  # runs seed the default generator, and other processes draw ports as well
_OPTIONS: Final = Options()


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
    quantization: str = "",
    reports_experts: bool = False,
) -> list[str]:
    """Return the server's command line. ``server_arguments`` override every default (by ``by_name``).

    quantization: format of the weights in the folder. The dtype is always set: by default SGLang gives a float32 model
    a float16 KV cache, and logprobs are off by 0.01.
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
        "skip-server-warmup": True,  # its prompt crashes a GPU server if the tokenizer knows none of its words
        "custom-weight-loader": [LOADER],
        **({EXPERTS_OPTION: True} if reports_experts else {}),
        **(CPU_ARGUMENTS if device == "cpu" else {}),
        **prefill_arguments(model_path, server_arguments, device=device, tensor_parallel=tensor_parallel),
        **({"quantization": QUANTIZATIONS[quantization]} if quantization else {}),
        **(INT4_ARGUMENTS if quantization in int4.GROUPS else {}),
        **server_arguments,
    }
    command = os_process.module_command("sglang.launch_server")
    for key, value in arguments.items():
        command += _argument(key, value)
    return command


def _argument(key: str, value: Any) -> list[str]:
    """Return the words of one option. True is a flag, False is omitted, a list becomes words, a table JSON."""
    if isinstance(value, bool):
        return [f"--{key}"] if value else []
    if isinstance(value, list | tuple):
        return [f"--{key}", *map(str, value)]
    return [f"--{key}", json.dumps(value) if isinstance(value, Mapping) else str(value)]


def server_environment(base: Mapping[str, str], *, device: str, options: Options = _OPTIONS) -> dict[str, str]:
    """Return ``base`` plus the server's variables. Only the server may see the stubs on PYTHONPATH.

    A CPU server compiles only on request. SGLang decorates a few small functions with torch.compile; on a CPU this
    costs each rank ten seconds of a C++ compiler, and fails if there is no compiler.
    """
    environment = {
        **base,
        "HF_HUB_OFFLINE": "1",  # the model is a local folder
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health would hang while generation is paused
        "SGLANG_VLM_CACHE_SIZE_MB": "0",  # the vision tower's outputs would outlive its weights: no update removes them
    }
    # The memory saver would pin the host's copy of the weights anew in every turn: 6 to 8 s for 16 GB.
    environment.setdefault("TMS_RETAIN_CPU_BACKUP", "1")
    if device == "cpu":
        environment.update(_CPU_ENVIRONMENT)
        environment.setdefault("OMP_NUM_THREADS", "1")
        if not options.server_arguments.get(_COMPILES):
            environment.setdefault("TORCHDYNAMO_DISABLE", "1")
        if options.tensor_parallel > 1:
            environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _shares_of_cores(options.tensor_parallel))
        stubs = [_HERE / "cpu_testing" / "stubs"] if importlib.util.find_spec("sgl_kernel") is None else []
        paths = [*map(str, [*stubs, _HERE / "cpu_testing" / "plugin"]), base.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if computes_as_learner(options.server_arguments):
        environment |= {**EXACT_ENVIRONMENT, "TORCHDYNAMO_DISABLE": "1"}  # compiled rotary embeddings round once less
    return environment


def _shares_of_cores(ranks: int) -> str:
    """Return the cores of each rank, such as "0,1|2,3". SGLang needs them if there are fewer NUMA nodes than ranks."""
    cores = sorted(os.sched_getaffinity(0))
    count = max(1, len(cores) // ranks)
    starts = [rank * count % len(cores) for rank in range(ranks)]
    return "|".join(",".join(map(str, cores[start : start + count])) for start in starts)


def find_free_port(host: str = "127.0.0.1", *, following: int = 0) -> int:
    """Return a port outside the system's ephemeral range: the server binds it half a minute later, or more.

    following  how many ports behind it must be free as well
    """
    while True:
        port = _RANDOM.choice(_PORTS)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for one in range(port, port + following + 1):
                probes.enter_context(socket.socket()).bind((host, one))
            return port


class ServerProcess:
    """A command with its output in a log file. It ends with us, and with it all its children."""

    def __init__(self, command: list[str], *, environment: Mapping[str, str], log_path: Path) -> None:
        self._command = command
        self._environment = environment
        self.log_path = log_path
        self._program: Program | None = None
        self._start = 0  # of what this process wrote to the log
        self._reason = ""

    async def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as output:
            self._start = output.tell()
            self._program = await Program.start(
                self._command,
                environment=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def is_alive(self) -> bool:
        return self._program is not None and not self._program.has_ended

    async def wait(self) -> int:
        """Wait until the server and all its children have exited. Returns the exit code."""
        assert self._program is not None
        return await self._program.wait()

    def end_because(self, reason: str) -> None:
        """Kill the server, for a reason that its log does not know. Returns at once."""
        self._reason = reason
        if self._program is not None:
            self._program.kill()

    async def close(self) -> None:
        """Kill the server and all its children. The next start removes the 16 KiB that they leave in /dev/shm."""
        if self._program is not None:
            await self._program.end()

    def problem(self) -> str:
        """Return why the server ended, or what it said last, in one line with the name of its log."""
        if self._reason:
            return f"{self._reason} (log: {self.log_path})"
        try:
            reason = reason_in(self._read())
        except OSError as error:
            return f"{self.log_path}: {error.strerror}"
        return f"{reason or 'it said nothing'} (log: {self.log_path})"

    def repeats(self) -> bool:
        """Return whether the start before ended by the same reason, without an answer to any request before that."""
        if self._reason:
            return False
        try:
            before, now = self._read(before=True), self._read()
        except OSError:
            return False
        return bool(reason := reason_in(now)) and reason == reason_in(before) and _ANSWERED not in before

    def _read(self, *, before: bool = False) -> str:
        """Return the end of the log.  before: of what was there when this process started. Raises OSError."""
        with self.log_path.open("rb") as log:
            begin, end = (0, self._start) if before else (self._start, log.seek(0, os.SEEK_END))
            begin = max(begin, end - _LOG_BYTES)
            log.seek(begin)
            return log.read(end - begin).decode(errors="replace")


def reason_in(log: str) -> str:
    """Return the sentence of a server's log that says why it ended: the last error that is no echo of another one.

    Its options are named as a run file names them: SGLang advises --mem-fraction-static, which asyncrl sets.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _REASON.fullmatch(line)]
    reasons = [line for line in errors if not _ECHO.search(line)] or errors or lines
    reason = _OPTION.sub(lambda found: f"engine.options.server_arguments.{found[1]}", reasons[-1]) if reasons else ""
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]} ..."
