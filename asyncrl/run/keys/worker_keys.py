"""Keys of rollout workers: nobody else can speak under their names.

A worker that a run's launcher starts has its key from it:

    keys/workers/NAME   the worker's secret, 0600; it gets it through its environment
    keys/names          name -> public key of those that run now, for the learner

and its name is its own for as long as the launcher keeps it up. A worker that joins by itself makes a key, and its name
ends with the first digits of it: ``gpu7-6bd3c0f4a1e29578``. So whoever reads what it says knows by the name alone who
may say it. Nothing is registered, no name can be taken before its worker comes, and none is left behind.

What others say under such a name is refused where the learner or `asyncrl run` reads it, and is not held against the
worker.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from asyncrl.errors import ConfigError, DiskError
from asyncrl.messages.signing import SigningKey
from asyncrl.policies.health.faults import EVALUATION_WORKER, LEARNERS_ACTORS, REWARD_WORKER, WORKER
from asyncrl.protocols.launcher import LaunchedProcess, Launcher, ProcessSpec
from asyncrl.run.keys import key_files

WORKER_KEY_VARIABLE: Final = "ASYNCRL_WORKER_KEY"
"""In the environment of a worker that `asyncrl run` starts: its secret, or nothing in a run without keys."""
WORKER_LIFE_VARIABLE: Final = "ASYNCRL_WORKER_LIFE"
"""And which life of that key it is (messages/signing.py): what it said in another one is old."""
_NAMES: Final = "names"
_DIGITS: Final = 16
"""To make a key that begins with 16 given digits takes 2^64 tries."""
_KEYED_NAME: Final = re.compile(f".*-([0-9a-f]{{{_DIGITS}}})", re.DOTALL)


class KeyedLauncher:
    """A launcher that gives each rollout worker a key and binds its name to it. See Launcher."""

    def __init__(self, launcher: Launcher, *, folder: Path) -> None:
        """``folder``: keys/ in the run's folder. Raises ConfigError when it cannot be written."""
        self._launcher = launcher
        self._folder = folder
        self._names: dict[str, str] = {}
        self.places = launcher.places
        try:
            self._write(_NAMES, "{}")
        except DiskError as error:
            raise ConfigError(f"run.directory: {error}") from None

    def connect(self) -> str:
        return self._launcher.connect()

    def check_room(self, specs: Sequence[ProcessSpec]) -> None:
        self._launcher.check_room(specs)

    async def start(self, spec: ProcessSpec) -> LaunchedProcess:
        """Raises DiskError, too: it is tried again."""
        if spec.role not in (WORKER, EVALUATION_WORKER, REWARD_WORKER):
            return await self._launcher.start(spec)
        key = self._key(spec.name)
        self._bind({**self._names, spec.name: key.public})
        own = {WORKER_KEY_VARIABLE: key.text(), WORKER_LIFE_VARIABLE: str(key_files.next_life(self._folder))}
        return await self._launcher.start(replace(spec, environment={**spec.environment, **own}))

    async def release(self, name: str) -> None:
        await self._launcher.release(name)
        try:
            self._bind({one: key for one, key in self._names.items() if one != name})
        except DiskError as error:  # it stays bound to who had it, who is gone
            log.warning("%s", error)

    async def close(self) -> None:
        await self._launcher.close()

    def _bind(self, names: Mapping[str, str]) -> None:
        if names != self._names:
            self._write(_NAMES, json.dumps(names, indent=1))
            self._names = dict(names)

    def _key(self, name: str) -> SigningKey:
        """The one that it had: what it said before stays its own."""
        path = self._folder / "workers" / name
        try:
            return SigningKey.from_text(path.read_text().strip())
        except (OSError, ValueError):  # there is none yet, or it is damaged
            key = SigningKey.generate()
            self._write(f"workers/{name}", key.text())
            return key

    def _write(self, name: str, text: str) -> None:
        try:
            key_files.write(self._folder / name, text, mode=0o600)
        except OSError as error:
            raise DiskError(f"{self._folder / name}: cannot be written: {error.strerror}") from error


log = logging.getLogger("asyncrl.keys")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this worker is.

    key          what it signs with; None in a run without keys
    has_own_key  it made its key itself, so that no other worker can have its name
    life         which start of a process with this key it is; 0: the key is as new as its process
    """

    name: str
    key: SigningKey | None
    has_own_key: bool
    life: int = 0


def identity(label: str, environment: MutableMapping[str, str]) -> Identity:
    """That of this process.

    label        what its launcher calls it; of a worker that joins by itself, what its name begins with
    environment  of this process; the key is taken out of it, so that whom this process starts does not inherit it
    """
    text = environment.pop(WORKER_KEY_VARIABLE, None)
    if text is None:
        key = SigningKey.generate()
        return Identity(f"{label}-{key.public[:_DIGITS]}", key, has_own_key=True)
    life = environment.pop(WORKER_LIFE_VARIABLE, "")
    try:
        given = SigningKey.from_text(text) if text else None
        return Identity(label, given, has_own_key=False, life=int(life or 0))
    except ValueError as error:
        raise ConfigError(f"{WORKER_KEY_VARIABLE}: {error}") from None


def digits_in(name: str) -> str:
    """The first digits of the key of a worker that joined by itself; "" for other names."""
    found = _KEYED_NAME.fullmatch(name)
    return found[1] if found else ""


def bound_names(folder: Path, *, learner: str) -> Callable[[str], str]:
    """A function from a name to the public key that it is bound to, or its first digits; "" for none.

    learner  its public key
    """
    path, read = folder / _NAMES, (0, 0)
    names: dict[str, str] = {}

    def bound(name: str) -> str:
        nonlocal read, names
        if name in LEARNERS_ACTORS:
            return learner
        with contextlib.suppress(OSError, ValueError):  # no launcher has been here
            found = path.stat()
            if read != (this := (found.st_ino, found.st_mtime_ns)):
                names, read = json.loads(path.read_text()), this
        return names.get(name) or digits_in(name)

    return bound
