"""What a resumed run needs: a checkpoint that fits its log, the model and backend that it had, and its folders."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.actors.learner import checkpoint
from asyncrl.adapters import registry
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.config import record as config_record
from asyncrl.config.toml_text import toml_text
from asyncrl.data.sources import digests
from asyncrl.errors import ConfigError, DiskError
from asyncrl.messages.topics import PROGRESS, TRAJECTORIES
from asyncrl.policies.groups.saved import LearnerState

log = logging.getLogger("asyncrl.check")
_learner_log = logging.getLogger("asyncrl.learner")


async def find_checkpoint(run: RunConfig, *, bus: Bus) -> tuple[LearnerState, Path] | None:
    """Return the newest complete checkpoint of the run and its backend folder; None to start from the whole log.

    Damaged checkpoints are set aside (checkpoint.py). Raises ConfigError if a checkpoint is needed but none is
    left, and DiskError if none can be read now or by this user.
    """
    folder = run.run_directory / "checkpoints"
    try:
        found = await asyncio.to_thread(functools.partial(checkpoint.resume, folder, say=_learner_log.warning))
    except OSError as error:
        text = f"{error.filename or folder}: cannot be read: {error.strerror or error}; nothing is set aside for it"
        if isinstance(error, PermissionError):  # for a restarted learner this may be temporary
            text += ". If it stays so, resume as the user who started the run, or give this one the files"
        raise DiskError(text) from error
    if found is None:
        await require_checkpoint(run, bus=bus)
        if aside := checkpoint.list_damaged(folder):
            _learner_log.warning(
                "%s: only %s is left; starting at step 0, from the whole log", folder, ", ".join(aside)
            )
    return found


async def require_checkpoint(run: RunConfig, *, bus: Bus) -> None:
    """Raise ConfigError if the bus has seen a checkpoint of the run, but its folder has none.

    Groups that the checkpoint has consumed are no longer on the log, so a learner without it would wait for them
    forever. The same applies if a checkpoint was set aside and the log is gone with its bus. A run that was killed
    before its first checkpoint still has its whole log, and restarts from it.
    """
    folder = run.run_directory / "checkpoints"
    if checkpoint.list_complete(folder):
        return
    progress = (await bus.states(PROGRESS)).get("")
    depth, last = await bus.depth(TRAJECTORIES), await bus.last_sequence(TRAJECTORIES)
    aside = checkpoint.list_damaged(folder)
    if depth < last or (progress is not None and progress.finished) or (aside and not last):
        step = "" if progress is None else f", which is at step {progress.step}"
        damaged = f" ({', '.join(aside)} could not be read)" if aside else ""
        raise ConfigError(
            f"run.directory: {folder} has no checkpoint of run {run.run.name!r}{step}{damaged}; resume it with the "
            "run.directory that it was started with, or start another run.name"
        )


def check_settings(run: RunConfig) -> None:
    """Raise ConfigError if the run's checkpoints do not fit its settings, and log all other changes.

    The settings are compared with those recorded by the newest incarnation of the learner. Without a record nothing is
    compared.
    """
    try:
        before = RecordedRun(run.run_directory).newest_settings()
    except ConfigError:  # no record, or a damaged one
        return
    has_checkpoint = bool(checkpoint.list_complete(run.run_directory / "checkpoints"))
    if run.learner.backend != before.learner.backend and has_checkpoint:
        raise ConfigError(
            f'learner.backend: the checkpoints of this run are those of "{before.learner.backend}"; resume with it, or '
            "start another run.name from a model in its weights folder"
        )
    if _adapters(run) != _adapters(before) and has_checkpoint:
        raise ConfigError(
            f"learner.lora: the checkpoints of this run are of {_adapters(before)}, not of {_adapters(run)}; resume "
            "with those, or start another run.name from a model in its weights folder"
        )
    if has_checkpoint and _has_critic(run) and not _has_critic(before):
        raise ConfigError(
            f'algorithm: "{run.algorithm.name}" trains a critic, and the newest checkpoint of this run has none; '
            "resume with the [algorithm] that wrote it, or start another run.name from a model in its weights folder"
        )
    if _absolute(run.model.path) != _absolute(before.model.path):
        old, new = _model_config(before), _model_config(run)
        if old is not None and old != new:
            raise ConfigError(
                f"model.path: this run trains {before.model.path}, and {run.model.path} is another model (its "
                "config.json differs); resume with the first, or start another run.name"
            )
    if changed := changes(config_record.as_table(before), config_record.as_table(run)):
        log.warning("resumed with other settings: %s", "; ".join(changed))
    if _order(run) != _order(before):
        log.warning("the data has another order now: the run goes on at the same position of the new one")


def digest_data(run: RunConfig) -> dict[str, str]:
    """Return the SHA-256 of each data file by its path. Raises ConfigError for a file that cannot be read.

    Logs a warning if a file is not what it was when the newest incarnation of the learner began, as far as recorded.
    """
    data = digests(run.data)
    try:
        before = RecordedRun(run.run_directory).last_start().data
    except ConfigError:  # no record, or a damaged one
        return data
    if changed := [path for path, digest in data.items() if before.get(path, digest) != digest]:
        log.warning(
            "%s changed since this run was last up: the data may have another order now, and the run goes on at the "
            "same position of the new one",
            " and ".join(changed),
        )
    return data


def _adapters(run: RunConfig) -> str:
    """Describe what is trained: the whole model, or adapters. The scale (alpha) is part of the description."""
    lora = run.learner.lora
    if not lora.rank:
        return "the whole model"
    return f"adapters of rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(sorted(lora.modules))}"


def _has_critic(run: RunConfig) -> bool:
    return "critic" in registry.algorithm(run).models


def changes(before: Mapping[str, Any], now: Mapping[str, Any], *, of: str = "") -> list[str]:
    """Return ``key: old -> new`` for every changed key, except those for the run's place and length."""
    found = []
    for key in sorted({*before, *now}):
        name, old, new = f"{of}{key}", before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += changes(old, new, of=f"{name}.")
        elif old != new and name not in ("run.directory", "run.steps") and not name.startswith("bus."):
            found.append(f"{name} {toml_text(old)} -> {toml_text(new)}" if None not in (old, new) else name)
    return found


def _order(run: RunConfig) -> Any:
    """Return the settings that determine the order of the rows."""
    data = run.data
    files = [(_absolute(file.path), file.weight) for file in data.files]
    return (run.run.seed, data.shuffle, data.source, data.options, files, _absolute(data.path) if data.path else None)


def _absolute(path: str) -> Path:
    return Path(path).absolute()


def _model_config(run: RunConfig) -> Any:
    """Return the model's config.json; None if it cannot be read."""
    try:
        return json.loads((Path(run.model.path) / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
