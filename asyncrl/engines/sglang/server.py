"""An SGLang server as a child process: command line, environment, log, and shutdown.

The server runs under ``reaper.py``, so no process of its tree outlives us, even if SIGKILL kills us
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
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.engines.sglang import repacking
from asyncrl.engines.sglang.arguments import option_name
from asyncrl.engines.sglang.options import Options
from asyncrl.engines.sglang.prefill_delay import prefill_arguments
from asyncrl.engines.sglang.routed_experts import OPTION
from asyncrl.errors import ConfigError
from asyncrl.tensors import quantized_model

_HERE = Path(__file__).parent
_LOG_TAIL_BYTES = 3000
_FIRST_SAFE_RETRACT = (0, 5, 23)
"""Older servers crash when their cache is flushed while requests are retracted."""
_FIRST_WITH_SPANS = (0, 5, 23)

LOADER = "asyncrl.engines.sglang.loader.load"
"""Loader of weight files in servers launched by us."""
_MOST_RANKS_OF_LOADER = 2
"""LOADER reads the whole file in each rank. SGLang's own loader maps it and reads the pages with the rank's part, so
with four or more ranks it should be as fast."""

_QUANTIZATIONS: Mapping[str, str] = {"fp8": "fp8", "int4": "compressed-tensors"}
"""SGLang's names for the values of weights.quantization."""

INSTALL_HINT = (
    "engine.kind = 'sglang' needs SGLang, which is not installed: `pip install 'sglang>=0.5.16'` beside a CUDA build "
    "of torch, or without a GPU `pip install -r requirements/sglang-cpu.txt && pip install --no-deps sglang`; "
    "engine.kind = 'inprocess' needs neither"
)

CPU_ARGUMENTS: Mapping[str, Any] = {
    "attention-backend": "torch_native",  # the default needs AMX kernels
    "sampling-backend": "pytorch",
    "mem-fraction-static": 0.1,
    "max-total-tokens": 65_536,
    "max-running-requests": 64,
    "sleep-on-idle": True,  # otherwise it spins on a core that the learner could use
}

_CPU_ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",  # otherwise rotary embeddings need vllm
    "TOKENIZERS_PARALLELISM": "false",
}
_COMPILES: Final = "enable-torch-compile"
_PORTS: Final = range(10_000, 32_000)
_RANDOM: Final = random.SystemRandom()  # runs seed the default generator, and other processes draw ports as well
_OPTIONS: Final = Options()


def check_pause(pause: str, *, url: str, version: str) -> None:
    """Check that this server can retract requests if ``pause`` needs it. Raises ConfigError."""
    if pause == "retract" and _number(version) < _FIRST_SAFE_RETRACT:
        raise ConfigError(f"pause = 'retract' needs SGLang 0.5.23, {url} is {version}")


def check_spans(version_source: str, *, url: str, version: str) -> None:
    """Check that this server reports version spans if ``version_source`` needs them. Raises ConfigError.

    A server built from source may not know its version.
    """
    if version_source == "spans" and (0, 0, 0) < _number(version) < _FIRST_WITH_SPANS:
        raise ConfigError(f"version_source = 'spans' needs SGLang 0.5.23, {url} is {version}")


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))  # "0.5.24rc1" is 0.5.24


def check_attached(*, quantization: str, is_colocated: bool) -> None:
    """Raise ConfigError for what a server that we did not launch cannot do."""
    if is_colocated:
        raise ConfigError("run.colocated: a server of your own (engine.options.url) does not release its GPUs")
    if quantization in repacking.FORMATS:
        raise ConfigError(
            f'weights.quantization: "{quantization}" needs asyncrl\'s loader in the server, and a server of your own '
            '(engine.options.url) lacks it; use "fp8", or remove engine.options.url'
        )


def check_installed() -> None:
    """Raise ConfigError, with instructions, if SGLang is not installed. Does not import it."""
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError(INSTALL_HINT)


def check_dtype(dtype: str, *, device: str, server_arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for a dtype that would crash the server during startup, minutes later."""
    said = {option_name(key): value for key, value in server_arguments.items()}
    if said.get("device", device) == "cuda" and said.get("dtype", dtype) in ("float32", "float"):
        raise ConfigError(
            'model.dtype: SGLang has no float32 kernels for GPUs; use "bfloat16", engine.device = "cpu" or '
            'engine.kind = "inprocess"'
        )


_NOT_ON_A_CPU: Final = {
    "Gemma3ForCausalLM": "samples from another distribution than the model's",
    "DeepseekV3ForCausalLM": "does not start",
    "GptOssForCausalLM": "has no attention with sinks",
    "Qwen3NextForCausalLM": "does not start",
}
"""Failures of SGLang 0.5.23's CPU server with tiny models, by architecture. GPUs have kernels for these models."""
_ON_GPUS_ALONE: Final = "Qwen3NextForCausalLM"
"""The in-process engine does not support it, either."""


def check_architecture(model_path: Path, *, device: str, quantization: str = "", options: Options = _OPTIONS) -> None:
    """Raise ConfigError for a model that the server cannot run. Ignores a folder that cannot be read."""
    if quantization and device == "cpu":
        raise ConfigError(f'weights.quantization: SGLang has no kernels for "{quantization}" on CPUs; remove it')
    try:
        config = json.loads((model_path / "config.json").read_text())
        architectures = config.get("architectures") or [""]
    except (OSError, ValueError, AttributeError):
        return
    if device != "cpu":  # the CPU server splits any number of heads
        _check_heads(config, tensor_parallel=options.attention_parallel)
        if quantization:
            _check_blocks(config, quantization, options)
    elif problem := _NOT_ON_A_CPU.get(architectures[0]):
        other = "" if architectures[0] == _ON_GPUS_ALONE else ' or engine.kind = "inprocess"'
        raise ConfigError(f"model.path: with a {architectures[0]} SGLang's CPU server {problem}; use a GPU{other}")


def _check_heads(config: Mapping[str, Any], *, tensor_parallel: int) -> None:
    """Raise ConfigError unless ``tensor_parallel`` GPUs can share the heads.

    Key-value heads may also be replicated, if there are fewer of them than GPUs.
    """
    names = (("num_attention_heads", False), ("num_key_value_heads", True), ("linear_num_key_heads", False))
    for name, may_be_copied in names:
        heads = config.get(name)
        if not isinstance(heads, int) or heads < 1 or heads % tensor_parallel == 0:
            continue
        if not (may_be_copied and tensor_parallel % heads == 0):
            raise ConfigError(
                f"engine.options: tensor_parallel: {tensor_parallel} does not divide the model's {name}, {heads}"
            )


def _check_blocks(config: Mapping[str, Any], quantization: str, options: Options) -> None:
    """Raise ConfigError if a rank's share of a matrix ends inside a block. Ignores sizes that config.json lacks.

    These are all sizes that SGLang cuts in a model of dense layers with grouped-query attention. It never cuts
    hidden_size. The only backend that quantizes refuses hidden sizes with part of a block, and models with other
    matrices: experts, latent attention, and linear attention, which has experts (megatron/refusals.py).
    """
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if not (isinstance(heads, int) and isinstance(hidden, int)) or heads < 1:
        return
    head_size = config.get("head_dim") or hidden // heads
    whole, sharing = options.tensor_parallel, options.attention_parallel
    kv_heads = max(config.get("num_key_value_heads") or heads, sharing)
    block = quantized_model.FORMATS[quantization].block
    for name, size, parts in (
        ("intermediate_size", config.get("intermediate_size"), whole),
        ("num_attention_heads x head_dim", heads * head_size, sharing),
        ("num_key_value_heads x head_dim", kv_heads * head_size, sharing),
    ):
        if isinstance(size, int) and size % (parts * block):
            raise ConfigError(
                f'weights.quantization: "{quantization}" has blocks of {block} numbers, and tensor_parallel = '
                f"{whole} cuts {name}, {size}, inside one; lower engine.options.tensor_parallel, or remove it"
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
    quantization: str = "",
    tells_experts: bool = False,
) -> list[str]:
    """Return the server's command line. ``server_arguments`` override every default.

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
        **({OPTION: True} if tells_experts else {}),
        **(CPU_ARGUMENTS if device == "cpu" else {}),
        **prefill_arguments(model_path, server_arguments, device=device, tensor_parallel=tensor_parallel),
        **({"quantization": _QUANTIZATIONS[quantization]} if quantization else {}),
        **{option_name(key): value for key, value in server_arguments.items()},
    }
    command = [sys.executable, "-m", "sglang.launch_server"]
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
    }
    if device == "cpu":
        environment.update(_CPU_ENVIRONMENT)
        environment.setdefault("OMP_NUM_THREADS", "1")
        if not any(option_name(key) == _COMPILES and value for key, value in options.server_arguments.items()):
            environment.setdefault("TORCHDYNAMO_DISABLE", "1")
        if options.tensor_parallel > 1:
            environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _shares_of_cores(options.tensor_parallel))
        stubs = [_HERE / "cpu_stubs"] if importlib.util.find_spec("sgl_kernel") is None else []
        paths = [*map(str, [*stubs, _HERE / "cpu_plugin"]), base.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def _shares_of_cores(ranks: int) -> str:
    """Return the cores of each rank, such as "0,1|2,3". SGLang needs them if there are fewer NUMA nodes than ranks."""
    cores = sorted(os.sched_getaffinity(0))
    count = max(1, len(cores) // ranks)
    starts = [rank * count % len(cores) for rank in range(ranks)]
    return "|".join(",".join(map(str, cores[start : start + count])) for start in starts)


def free_port() -> int:
    """Return a port outside the system's ephemeral range: the server binds it half a minute later, or more."""
    while True:
        port = _RANDOM.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def ranks_with_loader(info: Mapping[str, Any], quantization: str | None = "", *, is_ours: bool = True) -> int:
    """Return how many ranks use LOADER, from a server's /server_info; 0 if SGLang's loader must be used.

    Raises ConfigError where that cannot load the format of the weights.
    quantization  that format; None if adapters are loaded
    is_ours       whether we launched the server
    """
    if not is_ours:
        if quantization is not None:
            _require_served(info, quantization)
        return 0
    is_repacked = quantization in repacking.FORMATS
    ranks = int(info.get("tp_size") or 1)
    is_plain = (
        LOADER in (info.get("custom_weight_loader") or ())
        and int(info.get("dp_size") or 1) == 1  # SGLang cannot update replicas from tensors
        and int(info.get("nnodes") or 1) == 1  # other hosts cannot see the file we hold open
        and (is_repacked or not info.get("quantization"))  # SGLang quantizes in its own loader
        and not info.get("speculative_algorithm")  # the draft model is also read from the folder
    )
    if is_repacked and not is_plain:
        raise ConfigError(
            f'weights.quantization: "{quantization}" needs asyncrl\'s loader in the server, which replicas, several '
            'machines and speculative decoding exclude; remove them from engine.options.server_arguments, or use "fp8"'
        )
    return ranks if is_plain and (is_repacked or ranks <= _MOST_RANKS_OF_LOADER) else 0


def is_whole(info: Mapping[str, Any]) -> bool:
    """Whether one process of the server has all its weights, from its /server_info."""
    parts = ("tp_size", "dp_size", "pp_size", "nnodes")
    # a draft model reads the folder after the model has been updated
    return all(int(info.get(part) or 1) == 1 for part in parts) and not info.get("speculative_algorithm")


def _require_served(info: Mapping[str, Any], quantization: str) -> None:
    """Raise ConfigError unless an attached server was started on weights in that format. Others die of a load, or
    convert bfloat16 to e4m3 under the scales of the weights before."""
    served, name = info.get("quantization"), _QUANTIZATIONS[quantization] if quantization else None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        config = json.loads((Path(str(info.get("model_path"))) / "config.json").read_text())
        served = served or config["quantization_config"]["quant_method"]
    if served and not name:
        raise ConfigError(
            f"engine.options.url: the server serves {served} weights, which SGLang cannot load unquantized versions "
            f"into; start it on an unquantized folder without --quantization"
            + (', or set weights.quantization = "fp8"' if served == "fp8" else "")
        )
    if served != name:
        raise ConfigError(
            f'weights.quantization: "{quantization}", but the server at engine.options.url serves '
            f"{served or 'unquantized'} weights; start it on a folder in that format with --quantization {name}"
        )


class ServerProcess:
    """A command that runs under reaper.py, with its output in a log file."""

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
                str(_HERE / "reaper.py"),
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(self._environment),
                start_new_session=True,  # Ctrl-C must not reach the server: the worker needs it to drain
            )

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def wait(self) -> int:
        """Wait until the server and all its children have exited. Returns the exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def close(self) -> None:
        """Kill the server and all its children. The next start removes the 16 KiB that they leave in /dev/shm."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()

    def log_tail(self) -> str:
        """Return the end of the log for an error message."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
                text = log.read(_LOG_TAIL_BYTES).decode(errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        return f"end of {self.log_path}:\n{text}"
