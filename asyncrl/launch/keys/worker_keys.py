"""Keys of rollout workers: no other process can send messages under their names.

The run's launcher gives each worker that it starts a key:

    keys/workers/NAME   the worker's secret, 0600, passed to it through its environment
    keys/names          name -> public key of the workers that run now, for the learner

The worker owns its name while the launcher keeps it running. A worker that joins by itself creates a key, and its name
ends with the first digits of the public key: ``gpu7-6bd3c0f4a1e29578``. A reader of its messages therefore knows from
the name alone which key must have signed them. Nothing has to be registered, no name can be taken in advance, and no
name is left behind.

Messages of others under such a name are refused where the learner or `asyncrl run` reads them, and do not count against
the worker.
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
from asyncrl.launch.keys import key_files
from asyncrl.launch.port import LaunchedProcess, Launcher, ProcessSpec
from asyncrl.messages.roles import EVALUATION_WORKER, LEARNERS_ACTORS, WORKER
from asyncrl.messages.signing import SigningKey

WORKER_KEY_VARIABLE: Final = "ASYNCRL_WORKER_KEY"
"""Environment variable with the secret of a worker that `asyncrl run` starts; empty in a run without keys."""
WORKER_LIFE_VARIABLE: Final = "ASYNCRL_WORKER_LIFE"
"""Environment variable with the life of that key (messages/signing.py); messages of earlier lives are old."""
_NAMES: Final = "names"
_DIGITS: Final = 16
"""Creating a key that begins with 16 given digits takes 2^64 attempts."""
_KEYED_NAME: Final = re.compile(f".*-([0-9a-f]{{{_DIGITS}}})", re.DOTALL)


class KeyedLauncher:
    """A launcher that gives each worker a key and binds its name to it. See Launcher."""

    def __init__(self, launcher: Launcher, *, folder: Path) -> None:
        """``folder``: keys/ in the run's folder. Raises ConfigError if it cannot be written."""
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
        """Also raises DiskError, after which the start is retried."""
        if spec.role not in (WORKER, EVALUATION_WORKER):
            return await self._launcher.start(spec)
        key = self._key(spec.name)
        self._bind({**self._names, spec.name: key.public})
        own = {WORKER_KEY_VARIABLE: key.text(), WORKER_LIFE_VARIABLE: str(key_files.next_life(self._folder))}
        return await self._launcher.start(replace(spec, environment={**spec.environment, **own}))

    async def release(self, name: str) -> None:
        await self._launcher.release(name)
        try:
            self._bind({one: key for one, key in self._names.items() if one != name})
        except DiskError as error:  # the name stays bound to the worker that is gone
            log.warning("%s", error)

    async def close(self) -> None:
        await self._launcher.close()

    def _bind(self, names: Mapping[str, str]) -> None:
        if names != self._names:
            self._write(_NAMES, json.dumps(names, indent=1))
            self._names = dict(names)

    def _key(self, name: str) -> SigningKey:
        """Return the worker's existing key, so that its earlier messages stay valid, or create one."""
        path = self._folder / "workers" / name
        try:
            return SigningKey.from_text(path.read_text().strip())
        except (OSError, ValueError):  # no key yet, or a damaged one
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
    """Identity of this worker.

    key          key that it signs with; None in a run without keys
    has_own_key  it created the key itself, so no other worker can have its name
    life         life of this process (messages/signing.py); 0: the key is as new as its process
    """

    name: str
    key: SigningKey | None
    has_own_key: bool
    life: int = 0


def identity(label: str, environment: MutableMapping[str, str]) -> Identity:
    """Return the identity of this process.

    label        name from its launcher; for a worker that joins by itself, the first part of its name
    environment  environment of this process; the key is removed, so that child processes do not inherit it
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
    """Return the first digits of the key of a worker that joined by itself; "" for other names."""
    found = _KEYED_NAME.fullmatch(name)
    return found[1] if found else ""


def bound_names(folder: Path, *, learner: str) -> Callable[[str], str]:
    """Return a function from a name to the public key it is bound to, or its first digits; "" if it is not bound.

    learner  public key of the learner
    """
    path, read = folder / _NAMES, (0, 0)
    names: dict[str, str] = {}

    def bound(name: str) -> str:
        nonlocal read, names
        if name in LEARNERS_ACTORS:
            return learner
        with contextlib.suppress(OSError, ValueError):  # no launcher has written the file
            found = path.stat()
            if read != (this := (found.st_ino, found.st_mtime_ns)):
                names, read = json.loads(path.read_text()), this
        return names.get(name) or digits_in(name)

    return bound
