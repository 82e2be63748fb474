"""[engine.options] of engine.kind = "sglang"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.engines.sglang.arguments import option_name
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    url: str = ""
    """http://HOST:PORT of a running server, for one worker; a worker that joins needs another one. If the server has
    other weights than those of model.path or this run, it first loads model.path. If empty, asyncrl launches a server
    on a free port."""
    tensor_parallel: int = 1
    """GPUs of the launched server."""
    server_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Any options of `python -m sglang.launch_server`, such as {mem-fraction-static = 0.85}; true sets a flag."""
    start_seconds: float = 600.0
    """Timeout for the server to become healthy."""
    request_seconds: float = 3600.0
    """Timeout of one generation or one load."""
    pause: Literal["in_place", "retract"] = "in_place"
    """Generations in progress during a load: keep their KV cache, or recompute it with the new weights."""
    version_source: Literal["auto", "spans", "stream"] = "auto"
    """Source of each token's version: the server's version spans (0.5.23) or streamed chunks."""
    stream_interval: int = 16
    """Tokens per streamed chunk. Version labels lag by up to this many tokens; smaller chunks reduce throughput."""

    @property
    def attention_parallel(self) -> int:
        """GPUs that share the attention heads. With DP attention they are in parts that serve different sequences."""
        said = {option_name(key): value for key, value in self.server_arguments.items()}
        parts = said.get("attn-dp-size", 1)  # of 0.5.23
        if "enable-dp-attention" in said:
            parts = said.get("dp-size", said.get("data-parallel-size", self.tensor_parallel))
        return max(1, self.tensor_parallel // parts) if isinstance(parts, int) and parts > 0 else self.tensor_parallel

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "start_seconds", "request_seconds", "stream_interval"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url must start with http:// or https://, got {self.url!r}")
