"""The keys with which the processes of a run authenticate each other's messages (messages/signing.py).

    keys/learner      in the run's folder: the learner's secret, 0600
    keys/learner.pub  its public half, for bus.learner_key of workers on other machines
    keys/heard        life and sequence of the newest messages of others (heard_file.py)
    keys/tickets      the learner's secret for making tickets (policies/groups/tickets.py), 0600; a run that an older
                      version started without this file has no tickets
    keys/life         life of the newest process that signs, including workers that the launcher starts; each start
                      increases it

The learner's key is created with the run by the first process that needs it, or comes with the learner's credentials
(bin/nats-config), which also give the public half to the other roles. A run that an older version started without a key
continues without one.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final

from asyncrl.actors.learner.history import HISTORY_FILE
from asyncrl.bus.credentials_file import keys
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, disk_problem
from asyncrl.launch.keys import heard_file, key_files, worker_keys
from asyncrl.launch.port import Launcher
from asyncrl.messages.signing import Signatures, SigningKey, is_public_key

LEARNER_KEY_VARIABLE: Final = "ASYNCRL_LEARNER_KEY"
"""Environment variable with the learner's public key, for processes that `asyncrl run` starts."""
_FOLDER: Final = "keys"
KEY_FILES: Final = (f"{_FOLDER}/learner", f"{_FOLDER}/learner.pub", f"{_FOLDER}/tickets")
"""Key files in the folder of a run that signs."""

_OURS: Final[dict[tuple[int, Path], Signatures]] = {}
"""By process id and folder: the signatures of this process. It keeps one life across all its connections to the bus."""
_TAKING: Final = threading.Lock()

log = logging.getLogger("asyncrl.keys")


def signatures(run: RunConfig, *, role: str, own: SigningKey | None = None, life: int = 0) -> Signatures:
    """Return what a process of this role signs with, and which keys it trusts. Raises ConfigError for a damaged key.

    own, life   of a rollout worker; a key that is as new as its process needs no life
    """
    name, folder = run.run.name, run.run_directory / _FOLDER
    if role != "learner":
        known = run.bus.learner_key or _given(run, role).get("learner-key", "")
        known = known or _public(folder)
        # A worker without its own key belongs to a run without keys. It must not trust old messages that the learner
        # signed while it had a key more than what the learner sends now.
        learns = role == "rollout-worker" and not known and own is not None
        bound: Callable[[str], str] = worker_keys.digits_in
        life = life or key_files.now()
        return Signatures(run=name, own=own, life=life, learner=known, learns=learns, bound=bound)
    with _TAKING:
        ours = _OURS.get((os.getpid(), folder))
        try:
            key = _key(run)
        except (ConfigError, OSError):
            if ours is None:
                raise
            return ours.for_another_connection()  # a disk failure now does not affect the bus connection
        if key is None:
            return Signatures(run=name)
        if ours is None or ours.learner != key.public:
            bound = worker_keys.bound_names(folder, learner=key.public)
            ours = Signatures(run=name, own=key, life=key_files.next_life(folder), learner=key.public, bound=bound)
            ours.heard.remember(heard_file.load(folder))
            _OURS[os.getpid(), folder] = ours
        return ours.for_another_connection()


@contextlib.asynccontextmanager
async def heard_kept(run: RunConfig) -> AsyncIterator[None]:
    """In this context, a process of the learner's role keeps for its next life what it has heard from others."""
    ours = signatures(run, role="learner")
    keeping = heard_file.kept(run.run_directory / _FOLDER, ours.heard) if ours.learner else contextlib.nullcontext()
    async with keeping:
        yield


def is_launched(run: RunConfig) -> Callable[[str], bool]:
    """Return a function: can only the run's own processes have this name? True for every name in a run without keys."""
    bound = worker_keys.bound_names(run.run_directory / _FOLDER, learner=learner_key(run))
    return lambda name: not learner_key(run) or is_public_key(bound(name))


def learner_key(run: RunConfig) -> str:
    """Return the learner's public key, creating the key if needed; empty for a run without keys."""
    key = _key(run)
    return key.public if key is not None else ""


def _key(run: RunConfig) -> SigningKey | None:
    """Return the learner's key from its credentials or its folder; None for a run without keys."""
    directory, folder = run.run_directory, run.run_directory / _FOLDER
    given = _given(run, "learner").get("signing-key", "")
    if given and directory.is_dir() and (folder.is_dir() or not (directory / HISTORY_FILE).exists()):
        folder.mkdir(exist_ok=True)
        key = SigningKey.from_text(given)
    elif (kept := _secret(folder)) is not None:
        key = kept
    else:
        return _made(run)
    _publish(key, folder)
    return key


def _publish(key: SigningKey, folder: Path) -> None:
    """Write the public half if it is missing, for example after a crash between the two writes."""
    public = folder / "learner.pub"
    try:
        if not public.exists() or public.read_bytes().strip() != key.public.encode():
            key_files.write(public, key.public, mode=0o644)
    except OSError as error:
        log.warning("%s: cannot be written: %s; workers on other machines need it", public, error.strerror)


def _given(run: RunConfig, role: str) -> dict[str, str]:
    """Return the keys in the role's credentials, as written by `bin/nats-config`."""
    return keys(run.bus.credentials, role=role) if run.bus.credentials else {}


def _made(run: RunConfig) -> SigningKey | None:
    """Create the learner's key.

    None for a run that has started without keys, and if the run's folder does not exist yet, since nothing is sent
    before it does.
    """
    directory, folder = run.run_directory, run.run_directory / _FOLDER
    if not directory.is_dir() or (directory / HISTORY_FILE).exists():
        return None
    try:
        folder.mkdir(exist_ok=True)
        with _alone_in(folder):
            if (kept := _secret(folder)) is not None:
                return kept
            key = SigningKey.generate()
            key_files.write(folder / "learner", key.text(), mode=0o600)
        key_files.write(folder / "learner.pub", key.public, mode=0o644)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot keep the learner's key there: {error.strerror}") from None
    return key


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Allow one process at a time if the file system can lock folders; several processes of a run may start at once."""
    held = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _secret(folder: Path) -> SigningKey | None:
    try:
        return SigningKey.from_text((folder / "learner").read_text().strip())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and disk_problem(error):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"{folder / 'learner'}: cannot read the learner's key: {reason}; put it back from a copy, or remove "
            f"{folder}: a run that has begun continues unsigned"
        ) from None


def _public(folder: Path) -> str:
    try:
        text = (folder / "learner.pub").read_text(errors="replace").strip()
    except OSError:
        return ""
    if not is_public_key(text):
        raise ConfigError(
            f"{folder / 'learner.pub'}: is not a key of 64 hexadecimal digits; remove it: the learner writes it again "
            "when it starts"
        )
    return text


def ticket_secret(run: RunConfig) -> bytes:
    """Return the secret for the tickets of the run's prompts.

    It is created with the run; empty for a run without tickets. Raises ConfigError.
    """
    path = run.run_directory / _FOLDER / "tickets"
    try:
        if not path.exists() and learner_key(run) and not (run.run_directory / HISTORY_FILE).exists():
            key_files.write(path, SigningKey.generate().text(), mode=0o600)
        secret = path.read_bytes().strip() if path.exists() else b""
    except OSError as error:
        raise ConfigError(f"{path}: cannot keep the secret of the run's tickets there: {error.strerror}") from None
    if secret and not is_public_key(secret.decode(errors="replace")):  # the secret has the same format as a public key
        raise ConfigError(
            f"{path}: is not the secret of the run's tickets, 64 hexadecimal digits; put it back from a copy, or "
            "remove it: a run that has begun continues without tickets"
        )
    return secret


def keyed(launcher: Launcher, run: RunConfig) -> Launcher:
    """Wrap the launcher so that it gives workers their own keys, if the run has keys."""
    folder = run.run_directory / _FOLDER
    ticket_secret(run)  # created before two processes need it
    return worker_keys.KeyedLauncher(launcher, folder=folder) if learner_key(run) else launcher
