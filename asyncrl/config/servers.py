"""[servers.NAME] of the run file: frozen models that a run asks by name, such as a judge, a teacher, a reward model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from asyncrl.config.checks import require, require_http

ELSEWHERE: Final = "openai"
"""Kind of a server that speaks OpenAI's protocol and that the run does not start."""
_OF_OTHERS: Final = re.compile(r"learner(-\d+|-swap\d+)?|prompts|weights|[we]\d+")
"""Names of a run's other processes and actors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSection:
    kind: str = "sglang"
    """Serves the model: a name, or "package.module:Class" of your own. "openai" is any server that speaks OpenAI's
    protocol and is up elsewhere."""
    path: str = ""
    """Hugging Face folder of the model. The run starts a server of it, places it, and restarts it when it dies."""
    url: str = field(default="", repr=False)  # may hold a password
    """Base URL of a server that is up elsewhere, http://HOST:PORT/v1, in place of path."""
    model: str = ""
    """The model's name at the server; empty: NAME."""
    api_key: str = field(default="", repr=False)
    """Bearer token of the server at url, if it requires one. A server that the run starts gets a key of its own."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Data type of the weights; empty: model.dtype."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs if there are any."""
    gpus: tuple[int, ...] = ()
    """GPUs of the server; empty: those after the learner's. A GPU may be shared if the options leave room on it."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of the server."""

    @property
    def is_ours(self) -> bool:
        """Whether the run starts the server."""
        return not self.url

    def __post_init__(self) -> None:
        require(
            bool(self.path) != bool(self.url),
            "set either path, the model of a server that the run starts, or url, a server that is up elsewhere",
        )
        require(self.kind != ELSEWHERE or bool(self.url), f'kind = "{ELSEWHERE}" needs the url of a server that is up')
        if self.url:
            require_http(self.url)
        for key in ("gpus", "options", "dtype"):
            require(self.is_ours or not getattr(self, key), f"{key} is of a server that the run starts; remove it")
        require(not self.api_key or not self.is_ours, "api_key is of a server at url; remove it")


def check_names(servers: Collection[str], *, pools: Mapping[str, int]) -> None:
    """Raise ConfigError for the name of a server or of a pool of workers that no process of a run can have.

    pools  number of workers of each pool, which are called NAME-0, NAME-1, ...
    """
    of_workers = {f"{name}-{number}" for name, count in pools.items() for number in range(count)}
    for where, name in (*(("servers", name) for name in servers), *(("rollout.pools", name) for name in pools)):
        is_plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,63}", name) is not None
        require(is_plain, f"{where}: a name must be letters, digits, - and _, and begin with a letter, got {name!r}")
        is_taken = _OF_OTHERS.fullmatch(name) is not None or (where == "servers" and name in of_workers)
        require(not is_taken, f"{where}: {name!r} is the name of another process; choose another")
