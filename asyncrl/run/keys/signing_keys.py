"""The keys by which the processes of a run know each other's messages (messages/signing.py).

    keys/learner      in the run's folder: the learner's secret, 0600
    keys/learner.pub  its public half, for bus.learner_key of workers on other machines
    keys/heard        what was said last by others (heard_file.py)
    keys/tickets       the learner's secret that tickets are made of (policies/trust/tickets.py), 0600; a run that was
                      begun without one, by an older version, has no tickets
    keys/life         of the newest process that signs, workers that the run's launcher starts too; it rises with each

The learner's key is made with the run, whoever starts it, or was given with its credentials (bin/nats-config), and so
was its public half to the other roles. A run that was begun without one, by an older version, goes
on without one.
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

from asyncrl.bus.credentials_file import keys
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, DiskError, exit_code_of
from asyncrl.messages.signing import Signatures, SigningKey, is_public_key
from asyncrl.protocols.launcher import Launcher
from asyncrl.run.keys import heard_file, key_files, worker_keys
from asyncrl.state.history import HISTORY_FILE

LEARNER_KEY_VARIABLE: Final = "ASYNCRL_LEARNER_KEY"
"""In the environment of processes that `asyncrl run` starts: the learner's public key."""
_FOLDER: Final = "keys"
KEY_FILES: Final = (f"{_FOLDER}/learner", f"{_FOLDER}/learner.pub", f"{_FOLDER}/tickets")
"""In the folder of a run that signs."""

_OURS: Final[dict[tuple[int, Path], Signatures]] = {}
"""By process id and folder: what this process signs with. It has one life, however often it connects to the bus."""
_TAKING: Final = threading.Lock()

log = logging.getLogger("asyncrl.keys")


def signatures(
    run: RunConfig, *, role: str, own: SigningKey | None = None, life: int = 0, has_joined: bool = False
) -> Signatures:
    """What a process of this role signs with, and whom it believes. Raises ConfigError for a key that is damaged.

    own, life   of a rollout worker; a key that is as new as its process needs no life
    has_joined  it has come by the bus: the run's folder on this machine may be of another run of that name
    """
    name, folder = run.run.name, run.run_directory / _FOLDER
    if role != "learner":
        known = run.bus.learner_key or _given(run, role).get("learner-key", "")
        known = known or ("" if has_joined else _public(folder))
        # One without a key of its own is of a run without keys: what the learner signed while it had some is not to be
        # believed more than what it says now.
        learns = role == "rollout-worker" and not known and (own is not None or has_joined)
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
            return ours.for_another_connection()  # a disk that fails now says nothing about the bus
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
    """Inside, what this process of the learner's role hears of others is kept for its next life."""
    ours = signatures(run, role="learner")
    keeping = heard_file.kept(run.run_directory / _FOLDER, ours.heard) if ours.learner else contextlib.nullcontext()
    async with keeping:
        yield


def is_launched(run: RunConfig) -> Callable[[str], bool]:
    """Whether a name is one that nobody but an own process of the run can have; of a run without keys every name is."""
    bound = worker_keys.bound_names(run.run_directory / _FOLDER, learner=learner_key(run))
    return lambda name: not learner_key(run) or is_public_key(bound(name))


def learner_key(run: RunConfig) -> str:
    """The learner's public key, made if the run has none; empty for a run that goes on without."""
    key = _key(run)
    return key.public if key is not None else ""


def _key(run: RunConfig) -> SigningKey | None:
    """The learner's, from its credentials or its folder; None for a run that goes on without."""
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
    """Write the public half where it is not: a crash may have come before it."""
    public = folder / "learner.pub"
    try:
        if not public.exists() or public.read_bytes().strip() != key.public.encode():
            key_files.write(public, key.public, mode=0o644)
    except OSError as error:
        log.warning("%s: cannot be written: %s; workers on other machines need it", public, error.strerror)


def _given(run: RunConfig, role: str) -> dict[str, str]:
    """Keys in the role's credentials, where `bin/nats-config` wrote them."""
    return keys(run.bus.credentials, role=role) if run.bus.credentials else {}


def _made(run: RunConfig) -> SigningKey | None:
    """None for a run that has begun without, and for one whose folder is not there yet: nothing is said before."""
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
    """One process at a time, where the file system locks folders: several of a run may start in the same moment."""
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
        if exit_code_of(error) == DiskError.exit_code:
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
    """What the tickets of the run's prompts are made of, made with the run; empty for a run that goes on without.

    Raises ConfigError.
    """
    path = run.run_directory / _FOLDER / "tickets"
    try:
        if not path.exists() and learner_key(run) and not (run.run_directory / HISTORY_FILE).exists():
            key_files.write(path, SigningKey.generate().text(), mode=0o600)
        secret = path.read_bytes().strip() if path.exists() else b""
    except OSError as error:
        raise ConfigError(f"{path}: cannot keep the secret of the run's tickets there: {error.strerror}") from None
    if secret and not is_public_key(secret.decode(errors="replace")):  # it looks like one
        raise ConfigError(
            f"{path}: is not the secret of the run's tickets, 64 hexadecimal digits; put it back from a copy, or "
            "remove it: a run that has begun continues without tickets"
        )
    return secret


def keyed(launcher: Launcher, run: RunConfig) -> Launcher:
    """The launcher, giving the run's workers keys of their own if the run has keys."""
    folder = run.run_directory / _FOLDER
    ticket_secret(run)  # before two processes look for it
    return worker_keys.KeyedLauncher(launcher, folder=folder) if learner_key(run) else launcher
