"""A frozen model behind an SGLang server of its own ([servers.NAME] with kind = "sglang"): OpenAI's protocol, a key."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from asyncrl.config import RunConfig, ServerSection
from asyncrl.config.checks import Positive
from asyncrl.engines.port import ServedTo
from asyncrl.engines.sglang import server
from asyncrl.engines.sglang.checks import check_architecture, check_dtype, check_installed, check_on_cpu
from asyncrl.engines.sglang.client import ServerClient, wait_until_healthy
from asyncrl.engines.sglang.options import Options as EngineOptions
from asyncrl.engines.sglang.options import by_name, check_arguments, metrics_arguments
from asyncrl.errors import ConfigError, EngineDied
from asyncrl.messages.control import ServerAddress
from asyncrl.tensors.device import require_gpu, resolve_device

_OURS: Final = {"host": "", "api-key": "", "served-model-name": "model", "config": ""}
"""Options that asyncrl sets, and the key of the section that has them."""
_STREAM_INTERVAL: Final = 16
_PROBE_SECONDS: Final = 3600.0
"""The health monitor decides how long an answer may take (policies/health/waits.py: "engine")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    tensor_parallel: Positive[int] = 1
    """GPUs of the server."""
    server_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Any options of `python -m sglang.launch_server`, such as {mem-fraction-static = 0.4}; true sets a flag."""
    start_seconds: Positive[float] = 600.0
    """Timeout for the server to become healthy."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "server_arguments", by_name(self.server_arguments))


class SGLangModelServer:
    """See ModelServer in engines/port.py."""

    options_type = Options

    @classmethod
    def num_gpus(cls, section: ServerSection, options: Options) -> int:
        return 0 if section.device == "cpu" else options.tensor_parallel

    @classmethod
    def check(cls, run: RunConfig, name: str, section: ServerSection, options: Options) -> None:
        """Raise ConfigError, naming the keys of the section, for what the server would refuse or die of."""
        with _named(name):
            check_arguments(options.server_arguments, is_frozen=True)
            for key in options.server_arguments:
                if key in _OURS:
                    hint = f" and use servers.{name}.{_OURS[key]}" if _OURS[key] else ""
                    raise ConfigError(f"engine.options: server_arguments: {key!r} is set by asyncrl; remove it{hint}")

    @classmethod
    def check_machine(cls, run: RunConfig, name: str, section: ServerSection, options: Options) -> None:
        with _named(name):
            check_installed()
            if section.device == "cuda":
                require_gpu("engine")
            device = resolve_device(section.device, section="engine")
            check_dtype(section.dtype or run.model.dtype, device=device, server_arguments=options.server_arguments)
            check_on_cpu(options.server_arguments, device=device)
            engine = EngineOptions(tensor_parallel=options.tensor_parallel, server_arguments=options.server_arguments)
            check_architecture(Path(section.path), device=device, options=engine)

    def __init__(self, name: str, section: ServerSection, options: Options, *, to: ServedTo) -> None:
        self._name = name
        self._section = section
        self._options = options
        self._to = to
        self._client = ServerClient("", request_seconds=_PROBE_SECONDS)

    async def start(self) -> ServerAddress:
        section, options = self._section, self._options
        host, port, key = self._to.host, server.find_free_port(), secrets.token_urlsafe(24)
        model = section.model or self._name
        device = resolve_device(section.device, section="engine")
        with _named(self._name):
            command = server.server_command(
                Path(section.path),
                device=device,
                dtype=section.dtype or self._to.dtype,
                port=port,
                weight_version="frozen",
                tensor_parallel=options.tensor_parallel,
                stream_interval=_STREAM_INTERVAL,
                server_arguments={
                    **(metrics_arguments() if self._to.has_metrics else {}),
                    **options.server_arguments,
                    "host": host,
                    "served-model-name": model,
                    "config": str(self._write_key(key)),
                },
            )
            engine = EngineOptions(tensor_parallel=options.tensor_parallel, server_arguments=options.server_arguments)
            self._client.server = server.ServerProcess(
                command,
                environment=server.server_environment(os.environ, device=device, options=engine),
                log_path=self._to.log_path,
            )
            await self._client.server.start()
            self._client.url = f"http://{_in_url(host)}:{port}"
            self._client.open(is_ours=True)
            await wait_until_healthy(self._client, seconds=options.start_seconds)
        return ServerAddress(name=self._name, url=f"{self._client.url}/v1", model=model, key=key)

    def _write_key(self, key: str) -> Path:
        """Write the server's key to a file that only we can read: everybody can read a command line."""
        path = self._to.directory / f"{self._name}.key.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"api-key": key}, file)  # YAML includes JSON
        return path

    async def answers(self) -> None:
        await self._client.get("/health")

    async def server_metrics(self) -> str:
        return await self._client.server_metrics()

    async def wait(self) -> str:
        assert self._client.server is not None
        await self._client.server.wait()
        return self._client.server.problem()

    async def close(self) -> None:
        await self._client.close()
        if self._client.server is not None:
            await self._client.server.close()


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Let errors name the keys of the server's section in place of those of the run's engine."""
    try:
        yield
    except (ConfigError, EngineDied) as error:
        text = str(error)
        for key in ("engine.options", "engine.device", "model.path", "model.dtype"):
            text = text.replace(key, f"servers.{name}.{key.partition('.')[2]}")
        raise type(error)(text) from error
