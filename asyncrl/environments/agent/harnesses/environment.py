"""The environment variables of a harness: where to find the model, and few of the worker's own variables.

A harness may run code that a model wrote, so it must not see credentials in the worker's environment.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from asyncrl.environments.agent.harnesses.protocol import Endpoint
from asyncrl.errors import ConfigError

INHERITED: Final = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TERM", "TMPDIR"),
    *("PYTHONPATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)
"""Variables that a harness inherits from the worker; the option ``inherit`` adds more."""
_DIRECT: Final = ("NO_PROXY", "no_proxy")
_SCRIPTS: Final = (".py", ".sh", ".js", ".mjs", ".ts", ".rb", ".pl")
"""Endings by which the first argument of a command is known to be a script: ["python", "-u", "agent.py"]."""


def base_variables(*, venv: str, inherit: Sequence[str], added: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that all samples of a harness share.

    added   the option ``environment``
    """
    names = (*INHERITED, *inherit)
    found = {name: os.environ[name] for name in names if name in os.environ}
    if venv:
        found["VIRTUAL_ENV"] = venv
        found["PATH"] = os.pathsep.join(filter(None, (str(Path(venv) / "bin"), found.get("PATH", ""))))
    return found | {name: str(value) for name, value in added.items()}


def endpoint_variables(endpoint: Endpoint, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that OpenAI and Anthropic clients read.

    environment   the variables that the program gets besides
    """
    return direct_variables(endpoint, environment) | {
        "OPENAI_BASE_URL": f"{endpoint.base_url}/v1",
        "OPENAI_API_BASE": f"{endpoint.base_url}/v1",
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
        "ANTHROPIC_BASE_URL": endpoint.base_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "ANTHROPIC_MODEL": endpoint.model,
    }


def direct_variables(endpoint: Endpoint, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep HTTP clients from asking a proxy for the endpoint.

    A proxy cannot reach a loopback address, and must not see prompts and the sample's key. Both spellings get the
    entries of both, because a client that knows both reads only one of them.
    """
    given = [entry.strip() for name in _DIRECT for entry in environment.get(name, "").split(",")]
    hosts = [*filter(None, given), urlsplit(endpoint.base_url).hostname or "", "localhost"]
    direct = "*" if "*" in hosts else ",".join(dict.fromkeys(hosts))  # "*" means every host only where it stands alone
    return dict.fromkeys(_DIRECT, direct)


def check_names(environment: Mapping[str, object]) -> None:
    """Raise ConfigError unless every name and value is valid text."""
    for name, value in environment.items():
        if not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
            raise ConfigError(f"environment: {name!r} must be a text, got {type(value).__name__}")


def check_venv(venv: str) -> None:
    """Raise ConfigError if ``venv`` is set but is not a virtual environment."""
    if venv and not os.access(Path(venv) / "bin" / "python", os.X_OK):
        raise ConfigError(f"venv: {venv} is not a virtual environment (it has no bin/python); make one: python -m venv")


def check_program(command: Sequence[str], *, directory: str, path: str) -> None:
    """Raise ConfigError unless the program can be started from ``directory`` with this PATH, and has its script."""
    if directory and not os.path.isdir(directory):
        raise ConfigError(f"directory: {directory} is not a folder")
    program = command[0]
    where = os.path.join(directory, program) if os.sep in program else program
    if shutil.which(where, path=path) is None:
        looked = "it is not there, or not executable" if os.sep in program else f"it is not on PATH ({path})"
        raise ConfigError(f"{program!r} cannot be started: {looked}")
    script = next((part for part in command[1:] if not part.startswith("-")), "")
    if script.endswith(_SCRIPTS) and not os.path.exists(os.path.join(directory, script)):
        raise ConfigError(f"{program!r} cannot run {script!r}: no such file (from {directory or os.getcwd()})")
