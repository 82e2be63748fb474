"""A run whose checkpoints are in another folder: it cannot be resumed from this one."""

from __future__ import annotations

from asyncrl import checkpoint
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.protocols import Bus
from asyncrl.topics import PROGRESS, TRAJECTORIES


async def refuse(run: RunConfig, *, bus: Bus) -> None:
    """Raises ConfigError when the bus has seen a checkpoint of the run, and its folder here has none.

    What was trained behind it is no more in the log, so that a learner without it would wait for ever for those groups.
    A run that was killed before its first checkpoint has its whole log: it begins anew with that.
    """
    folder = run.run_directory / "checkpoints"
    if checkpoint.complete(folder):
        return
    progress = (await bus.states(PROGRESS)).get("")
    is_trimmed = await bus.depth(TRAJECTORIES) < await bus.last_sequence(TRAJECTORIES)
    if is_trimmed or (progress is not None and progress.finished):
        step = "" if progress is None else f", which is at step {progress.step}"
        raise ConfigError(
            f"run.directory: {folder} has no checkpoint of run {run.run.name!r}{step}; resume it with the "
            "run.directory that it was started with, or start another run.name"
        )
