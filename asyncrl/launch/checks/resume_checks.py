"""Finds the checkpoint to resume from, and refuses a folder that lacks required files."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import stat
from pathlib import Path

from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, DiskError
from asyncrl.messages.topics import PROGRESS, TRAJECTORIES
from asyncrl.policies.groups.saved import LearnerState
from asyncrl.state import checkpoint
from asyncrl.state.history import HISTORY_FILE

log = logging.getLogger("asyncrl.learner")


async def starting_checkpoint(run: RunConfig, *, bus: Bus) -> tuple[LearnerState, Path] | None:
    """Return the newest complete checkpoint of the run and its backend folder; None to start from the whole log.

    Damaged checkpoints are set aside (state/checkpoint.py). Raises ConfigError if a checkpoint is needed but none is
    left, and DiskError if none can be read now or by this user.
    """
    folder = run.run_directory / "checkpoints"
    try:
        found = await asyncio.to_thread(functools.partial(checkpoint.resume, folder, say=log.warning))
    except OSError as error:
        text = f"{error.filename or folder}: cannot be read: {error.strerror or error}; nothing is set aside for it"
        if isinstance(error, PermissionError):  # for a restarted learner this may be temporary
            text += ". If it stays so, resume as the user who started the run, or give this one the files"
        raise DiskError(text) from error
    if found is None:
        await refuse(run, bus=bus)
        if aside := checkpoint.damaged(folder):
            log.warning("%s: only %s is left; starting at step 0, from the whole log", folder, ", ".join(aside))
    return found


async def refuse(run: RunConfig, *, bus: Bus) -> None:
    """Raise ConfigError if the bus has seen a checkpoint of the run, but its folder has none.

    Groups that the checkpoint has consumed are no longer on the log, so a learner without it would wait for them
    forever. The same applies if a checkpoint was set aside and the log is gone with its bus. A run that was killed
    before its first checkpoint still has its whole log, and restarts from it.
    """
    folder = run.run_directory / "checkpoints"
    if checkpoint.complete(folder):
        return
    progress = (await bus.states(PROGRESS)).get("")
    depth, last = await bus.depth(TRAJECTORIES), await bus.last_sequence(TRAJECTORIES)
    aside = checkpoint.damaged(folder)
    if depth < last or (progress is not None and progress.finished) or (aside and not last):
        step = "" if progress is None else f", which is at step {progress.step}"
        damaged = f" ({', '.join(aside)} could not be read)" if aside else ""
        raise ConfigError(
            f"run.directory: {folder} has no checkpoint of run {run.run.name!r}{step}{damaged}; resume it with the "
            "run.directory that it was started with, or start another run.name"
        )


def refuse_others(run: RunConfig) -> None:
    """Raise ConfigError if a path of the learner's files or folders is something else.

    Examples are a folder, a pipe or a link loop in place of a file.
    """
    files = [run.run_directory / name for name in (HISTORY_FILE, "metrics.jsonl")]
    folders = [run.run_directory / "checkpoints", run.weights_directory]
    wanted = [*((path, stat.S_ISREG, "file") for path in files), *((path, stat.S_ISDIR, "folder") for path in folders)]
    for path, is_right, what in wanted:
        try:
            problem = "" if is_right(path.stat().st_mode) else f"is not a {what}"
        except OSError as error:  # does not exist yet, or may be temporary
            problem = "is a link to itself" if error.errno == errno.ELOOP else ""
        if problem:
            of = "weights.directory" if path == run.weights_directory else "run.directory"
            raise ConfigError(f"{of}: {path}: {problem}; one of the run belongs there, so move it away")
