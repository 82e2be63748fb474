"""Every exception asyncrl raises on purpose.

    AsyncRLError           exit code 1: the launcher starts the process again
    ├── ConfigError        the user's mistake: printed as one line, exit code 2, never a traceback
    │   ├── NoAnswer       no response at bus.url
    │   ├── NoSuchRun      the bus is there and knows no run of that name
    │   ├── NoHistory      a folder has no history.jsonl
    │   ├── NoRoom         no GPUs are free for another process
    │   └── NameTaken      another rollout worker of the run has this name: exit code 4
    ├── LaunchError        a launcher could not start a process; the next try may work
    ├── HopelessError      starting again would end the same way: exit code 3
    ├── DiskError          a file cannot be written or read now: exit code 5, started again until it can
    ├── BusError           the bus refused or lost us
    │   ├── BusFull        a topic holds as many messages as it may; try again when some were taken
    │   ├── ObjectGone     a large object is not in the store, or not any more
    │   ├── MessageTooLarge  a message is over the server's max_payload, or a group over bus.max_group_bytes
    │   └── MessageError   bytes that are not the message they should be
    ├── EngineError        one request failed; the prompt group is tried again elsewhere
    │   ├── PromptError     no engine can answer this prompt; the group is failed
    │   └── EngineDied     the engine is gone; the rollout worker ends and its launcher restarts it
    ├── RolloutError       a RolloutFn failed on a group; it is failed with the reason
    ├── RewardError        a group could not be rewarded; it is failed with the reason
    ├── FilterError        a group filter raised on a group; it is failed with the reason
    ├── WeightsError       a weight version cannot be read (gone, torn, wrong checksum)
    ├── BackendError       a training step could not be done; the learner ends
    │   └── StepFailed     and nothing was changed: the learner looks for the groups that it fails with
    └── CheckpointError    a checkpoint cannot be written or read
        └── CheckpointDamaged  its files are not what was written; the learner takes the one before

To add one: subclass the boundary it belongs to, say in a sentence who catches it, put it in the tree.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Final

INTERRUPTED = 130
"""Exit code of what was drained or stopped before it was done."""
PIPE_CLOSED = 141
"""Exit code of a command whose output nobody reads any more (`| head`), as of those that SIGPIPE ends."""


class AsyncRLError(Exception):
    """Root of everything asyncrl raises on purpose. ``exit_code``: of the process that it ends."""

    exit_code = 1


class ConfigError(AsyncRLError, ValueError):
    """The user asked for something that cannot be: where, what, and how to fix it, in one line."""

    exit_code = 2


class NoAnswer(ConfigError):
    """Nobody answers at bus.url. Who watches a run waits for it."""


class NoSuchRun(ConfigError):
    """There is no run of this name: the bus answers and has none, or none is up in the run's folder."""


class NoHistory(ConfigError):
    """A run's folder has no history. `asyncrl audit` accounts without one where the folder holds a run otherwise."""


class NoRoom(ConfigError):
    """No GPUs are free for another process. `asyncrl run` refuses it; a fleet that is up stays as it is."""


class NameTaken(ConfigError):
    """Another rollout worker of the run has this name. `asyncrl run` starts its own again under another one."""

    exit_code = 4


class LaunchError(AsyncRLError):
    """A launcher could not start a process. `asyncrl run` takes it for one that died: it may be tried again."""


class HopelessError(AsyncRLError):
    """What starting the process again cannot heal. Launchers end the run."""

    exit_code = 3


class DiskError(AsyncRLError):
    """A disk takes or gives nothing now: full, read-only, an I/O error. Launchers start the process again until then.

    Raised where checkpoints are read; the code is also that of an OSError that only a disk says (``exit_code_of``).
    """

    exit_code = 5


class BusError(AsyncRLError):
    """The bus refused a request or cannot be reached."""


class Forbidden(BusError):
    """The server does not let our role do this."""


class Unanswered(BusError):
    """The server is there and does not answer this, or has been restarted since it could have."""


class BusFull(BusError):
    """A topic is full. The publisher waits; nothing was stored."""


class LogChanged(BusError):
    """A log is another one than was read so far, or back at an earlier state. The learner reads it again by group."""


class ObjectGone(BusError):
    """An object is not in the store, or was removed while it was read. The weight channel takes another way."""


class MessageTooLarge(BusError):
    """A message is larger than the server takes, or a trajectory group than the user allows. Nothing was stored; trying
    again cannot help."""


class MessageError(BusError, ValueError):
    """Bytes that do not decode to the message type they should be, or a message that contradicts itself."""


class EngineError(AsyncRLError):
    """One generation failed. The rollout worker gives the prompt back."""


class PromptError(EngineError):
    """This prompt can be answered by no engine: too long for the model, or not of its tokens. The group is failed."""


class NotNow(EngineError):
    """This worker leaves before it can begin. It gives the prompt back, and that is no attempt at the group."""


class EngineDied(EngineError):
    """The engine is gone. The rollout worker's process ends with it."""


class RolloutError(AsyncRLError):
    """A user's RolloutFn failed. The group fails with the reason; nothing crashes."""


class RewardError(AsyncRLError):
    """A group could not be rewarded. It fails with the reason; nothing crashes."""


class FilterError(AsyncRLError):
    """A user's group filter raised. The group fails with the reason; nothing crashes."""


class WeightsError(AsyncRLError):
    """A weight version cannot be read or stored. The follower waits for the next one."""


class BackendError(AsyncRLError):
    """A training step could not be done."""


class StepFailed(BackendError):
    """A step, or the scoring of answers, failed on every rank; weights and optimizer are as they were.

    The learner finds out which groups of the batch it fails with, and goes on without them.
    """


class CheckpointError(AsyncRLError):
    """A checkpoint cannot be written or read."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint's files are gone, cut, changed, or make no sense. A resumed learner takes the one before."""


_ONLY_DISKS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
"""What only a disk says, wherever in a process it is raised."""

DISK_ERRORS: Final = (
    *_ONLY_DISKS,
    *(errno.EACCES, errno.EPERM, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN),
)
"""What a file that was written before says when it cannot be now, and what may be over when somebody has made room or
mounted a disk again. The second line is a disk's only where a file is written: sockets and mistakes say it, too. Too
many open files (EMFILE, ENFILE) are a leak of ours, which no waiting heals.
"""

_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")
"""How libraries written in Rust say an errno."""


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions in a group and in its groups, in order; ``error`` itself where it is no group."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in leaves(inner)]


def exit_code_of(error: BaseException) -> int:
    """Of a process that ``error`` ends: the worst of the error, its causes and the members of its groups.

    That of DiskError only if there is nothing worse: a process that ends with it is started again without end.
    """
    codes, waiting, seen = {1}, [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:  # the one exception of a group has the group as its cause
            continue
        seen.add(id(one))
        if isinstance(one, AsyncRLError):
            codes.add(one.exit_code)
        if _errno(one) in _ONLY_DISKS:
            codes.add(DiskError.exit_code)
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        waiting += [one.__cause__] if one.__cause__ is not None else ()
    worst = max(codes - {DiskError.exit_code})
    return DiskError.exit_code if worst == 1 and DiskError.exit_code in codes else worst


def disk_problem(error: BaseException) -> OSError | None:
    """The error of a disk that cannot be written now among ``error`` and its causes; None if there is none."""
    one: BaseException | None = error
    while one is not None:
        if (number := _errno(one)) in DISK_ERRORS:
            return one if isinstance(one, OSError) else OSError(number, os.strerror(number))
        one = one.__cause__
    return None


def _errno(error: BaseException) -> int:
    """0 where it has none."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _OS_ERROR.search(str(error))
    return int(found[1]) if found else 0
