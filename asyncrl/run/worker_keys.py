"""Keys of the rollout workers that a run's launcher starts: nobody else can speak under their names.

    keys/workers/NAME   the worker's secret, 0600; it gets it through its environment
    keys/names          name -> public key of those that run now, for the learner

A name is its worker's for as long as the launcher keeps it up. What others say under it is refused where the learner or
`asyncrl run` reads it, and is not held against the worker. Names of workers that join by themselves are not bound.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from asyncrl.errors import ConfigError
from asyncrl.messages.signing import SigningKey
from asyncrl.policies.health.faults import WORKER
from asyncrl.protocols.launcher import LaunchedProcess, Launcher, ProcessSpec

WORKER_KEY_VARIABLE: Final = "ASYNCRL_WORKER_KEY"
"""In the environment of a worker that `asyncrl run` starts: its secret."""
_LEARNERS_ACTORS: Final = ("learner", "prompts", "weights")
_NAMES: Final = "names"


class KeyedLauncher:
    """A launcher that gives each rollout worker a key and binds its name to it. See Launcher."""

    def __init__(self, launcher: Launcher, *, folder: Path) -> None:
        """``folder``: keys/ in the run's folder."""
        self._launcher = launcher
        self._folder = folder
        self._names: dict[str, str] = {}
        self.places = launcher.places
        _write(folder / _NAMES, "{}")

    def connect(self) -> str:
        return self._launcher.connect()

    def check_room(self, specs: Sequence[ProcessSpec]) -> None:
        self._launcher.check_room(specs)

    async def start(self, spec: ProcessSpec) -> LaunchedProcess:
        if spec.role != WORKER:
            return await self._launcher.start(spec)
        key = self._key(spec.name)
        self._bind({**self._names, spec.name: key.public})
        environment = {**spec.environment, WORKER_KEY_VARIABLE: key.text()}
        return await self._launcher.start(replace(spec, environment=environment))

    async def release(self, name: str) -> None:
        await self._launcher.release(name)
        self._bind({one: key for one, key in self._names.items() if one != name})

    async def close(self) -> None:
        await self._launcher.close()

    def _bind(self, names: Mapping[str, str]) -> None:
        if names != self._names:
            _write(self._folder / _NAMES, json.dumps(names, indent=1))
            self._names = dict(names)

    def _key(self, name: str) -> SigningKey:
        """The one that it had: what it said before stays its own."""
        path = self._folder / "workers" / name
        try:
            return SigningKey.from_text(path.read_text().strip())
        except (OSError, ValueError):  # there is none yet, or it is damaged
            key = SigningKey.generate()
            _write(path, key.text())
            return key


def own_key() -> SigningKey | None:
    """That of this worker's process, if its launcher gave it one; whom it starts does not inherit it."""
    text = os.environ.pop(WORKER_KEY_VARIABLE, "")
    try:
        return SigningKey.from_text(text) if text else None
    except ValueError as error:
        raise ConfigError(f"{WORKER_KEY_VARIABLE}: {error}") from None


def bound_names(folder: Path, *, learner: str) -> Callable[[str], str]:
    """A function from a name to the public key that it is bound to, "" for none; ``learner``: its public key."""
    path, read = folder / _NAMES, (0, 0)
    names: dict[str, str] = {}

    def bound(name: str) -> str:
        nonlocal read, names
        if name in _LEARNERS_ACTORS:
            return learner
        with contextlib.suppress(OSError, ValueError):  # no launcher has been here
            found = path.stat()
            if read != (this := (found.st_ino, found.st_mtime_ns)):
                names, read = json.loads(path.read_text()), this
        return names.get(name, "")

    return bound


def _write(path: Path, text: str) -> None:
    """Whole or not at all, for its owner's eyes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text + "\n")
    temporary.rename(path)
