"""Every exception that asyncrl raises on purpose.

    AsyncRLError           exit code 1: the launcher restarts the process
    ├── ConfigError        a user error: printed as one line without a traceback, exit code 2
    │   ├── NoAnswer       no response at bus.url, exit code 1
    │   ├── NoSuchRun      the bus answers but has no run of that name
    │   ├── NoHistory      a folder has no history.jsonl
    │   └── NoRoom         no GPUs are free for another process
    ├── LaunchError        a launcher could not start a process; the next attempt may work
    ├── HopelessError      a restart would end the same way: exit code 2
    │   └── BusLost        what the run had on the bus was deleted, or is older than the run
    ├── DiskError          a file cannot be written or read now
    ├── BusError           the bus refused a request or the connection is lost
    │   ├── BusClosed      we closed the connection, so no request has an answer any more
    │   ├── BusFull        a topic is full; retry after consumers have taken messages
    │   ├── ObjectGone     a large object is not, or no longer, in the store
    │   ├── MessageTooLarge  a message exceeds the server's max_payload, or a group exceeds bus.max_group_bytes
    │   └── MessageError   bytes that do not decode to the expected message
    ├── EngineError        one request failed; the prompt group is retried elsewhere
    │   ├── PromptError     no engine can answer this prompt; the group is failed
    │   └── EngineDied     the engine is gone; the rollout worker ends and its launcher restarts it
    ├── RolloutError       a RolloutFn failed on a group; the group is failed with the reason
    ├── RewardError        an answer could not be rewarded; its sample, or its group, is failed with the reason
    │   └── Outage         also a RolloutError: a service is away; the worker waits for it
    │       └── MaybeOutage  or it fails for this answer alone
    ├── FilterError        a group filter raised on a group; the group is failed with the reason
    ├── ImageError         an image cannot be read or shown; its row, answer or group is failed with the reason
    ├── WeightsError       a weight version cannot be read (gone, torn, wrong checksum)
    ├── BackendError       a training step could not be done; the learner ends
    │   └── StepFailed     a step failed and changed nothing: the learner fails its groups
    └── CheckpointError    a checkpoint cannot be written or read
        └── CheckpointDamaged  the files are not what was written; the learner uses the previous checkpoint

To add an exception: subclass the boundary it belongs to, state in one sentence who catches it, and add it to the tree.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from typing import Final

from asyncrl.outage import AWAY, MAYBE

INTERRUPTED = 130
"""Exit code of a process that was drained or stopped before its work was done."""


class AsyncRLError(Exception):
    """Root of everything asyncrl raises on purpose. ``exit_code``: exit code of the process that the error ends."""

    exit_code = 1


class ConfigError(AsyncRLError, ValueError):
    """The user asked for something impossible. One line says where, what, and how to fix it."""

    exit_code = 2


class NoAnswer(ConfigError):
    """No server answers at bus.url. Commands that watch a run wait for the server; a process of a run is restarted."""

    exit_code = 1


class NoSuchRun(ConfigError):
    """No run has this name: the bus answers but does not have it, or no run is up in the run's folder."""


class NoHistory(ConfigError):
    """A run's folder has no history. `asyncrl audit` works without one if the folder is otherwise a run's folder."""


class NoRoom(ConfigError):
    """No GPUs are free for another process. `asyncrl run` refuses to start; a fleet that is up keeps its size."""


class LaunchError(AsyncRLError):
    """A launcher could not start a process. `asyncrl run` treats this like a process that died and may try again."""


class HopelessError(AsyncRLError):
    """A failure that a restart cannot fix. Launchers end the run."""

    exit_code = ConfigError.exit_code


class BusLost(HopelessError):
    """Somebody deleted a stream, bucket or consumer of the run, or its server came back with an older or empty store.

    Ends the run; `asyncrl run FILE --resume` creates what is missing and publishes the outstanding groups again.
    """


class DiskError(AsyncRLError):
    """A disk cannot be written or read now: full, read-only, an I/O error. Raised where checkpoints are read."""


class BusError(AsyncRLError):
    """The bus refused a request or cannot be reached."""


class BusClosed(BusError):
    """Our connection is closed. Commands that read a run's bus raise NoSuchRun instead, once the run has ended."""


class Forbidden(BusError):
    """The server does not let our role do this."""


class Unanswered(BusError):
    """The server is reachable but does not answer this request, or a reconnect has made an answer impossible."""


class BusFull(BusError):
    """A topic is full. The publisher waits; nothing was stored."""


class ObjectGone(BusError):
    """An object is not in the store, or was removed during the read. The weight channel falls back to another way."""


class MessageTooLarge(BusError):
    """A message exceeds the server's limit, or a trajectory group exceeds the user's limit. Nothing was stored, and a
    retry cannot help."""


class MessageError(BusError, ValueError):
    """Bytes that do not decode to the expected message type, or a message that contradicts itself."""


class OtherSchema(MessageError):
    """A message that another version of asyncrl encoded (version.SCHEMA)."""


class EngineError(AsyncRLError):
    """One generation failed. The rollout worker returns the prompt to the bus."""


class PromptError(EngineError):
    """No engine can answer this prompt: it is too long for the model or not made of its tokens. The group is failed."""


class NotNow(EngineError):
    """This worker is leaving and cannot begin. It returns the prompt, which counts as no attempt at the group."""


class EngineDied(EngineError):
    """The engine is gone. The rollout worker's process ends with it."""


class RolloutError(AsyncRLError):
    """A user's RolloutFn failed. The group is failed with the reason; the process continues."""


class RewardError(AsyncRLError):
    """An answer, or its whole group, could not be rewarded. It is failed with the reason; the process continues."""


class Outage(RewardError, RolloutError):
    """A service that a reward or a rollout function needs is away. The worker waits for it and tries again.

    The group is failed with it only if others get through meanwhile (actors/rollout/outages.py).
    """


class MaybeOutage(Outage):
    """The service may also fail for this answer alone: a time-out, HTTP 500."""


OUTAGES: Final[Mapping[str, type[Outage]]] = {AWAY: Outage, MAYBE: MaybeOutage}
"""By the kinds of outage.py."""


class FilterError(AsyncRLError):
    """A user's group filter raised. The group is failed with the reason; the process continues."""


class ImageError(AsyncRLError, ValueError):
    """An image cannot be read, is too large, or is not here. Its row, answer or group is failed with the reason.

    Of a file or source alone the reason is a sentence about "it", and who knows its number or digest puts that before.
    """


class WeightsError(AsyncRLError):
    """A weight version cannot be read or stored. The follower waits for the next one."""


class BackendError(AsyncRLError):
    """A training step could not be done."""


class StepFailed(BackendError):
    """A batch could not be prepared, scored or trained; weights and optimizer are unchanged.

    The learner keeps the batch on disk, fails its groups and goes on; two batches in a row end the run.
    """


class CheckpointError(AsyncRLError):
    """A checkpoint cannot be written or read."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint's files are missing, truncated, changed, or invalid. A resumed learner uses the previous one."""


DISK_ERRORS: Final = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE),
    *(errno.EACCES, errno.EPERM, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN),
)
"""Errors of writing to a file that could be written before. They may end when space is freed or a disk is mounted
again. The second line means a disk only where a file is written: sockets and mistakes raise these errors as well. Too
many open files (EMFILE, ENFILE) is not listed: it is a leak in asyncrl, which waiting does not fix.
"""

_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")
"""How libraries written in Rust report an errno."""


def leaves(error: BaseException) -> list[BaseException]:
    """Return the exceptions in a group and its nested groups, in order; ``[error]`` if it is not a group."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in leaves(inner)]


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ``error`` ends: the worst of its members and their causes."""
    codes = [1]
    for leaf in leaves(error):
        one: BaseException | None = leaf
        while one is not None and not isinstance(one, BaseExceptionGroup):
            codes += [one.exit_code] if isinstance(one, AsyncRLError) else []
            one = one.__cause__
    return max(codes)


def disk_problem(error: BaseException) -> OSError | None:
    """Return the first error of a disk that cannot be written now, among ``error`` and its causes, or None."""
    one: BaseException | None = error
    while one is not None:
        if (number := _errno(one)) in DISK_ERRORS:
            return one if isinstance(one, OSError) else OSError(number, os.strerror(number))
        one = one.__cause__
    return None


def _errno(error: BaseException) -> int:
    """Return the errno of an error, or 0 if it has none."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _OS_ERROR.search(str(error))
    return int(found[1]) if found else 0
