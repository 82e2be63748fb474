"""What a resumed run needs: a checkpoint that fits its log, the model and backend that it had, and its folders."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.actors.learner import checkpoint
from asyncrl.actors.learner.history import HISTORY_FILE
from asyncrl.adapters import registry
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.config import record as config_record
from asyncrl.config.toml_text import toml_text
from asyncrl.errors import ConfigError, DiskError
from asyncrl.launch.checks import signal_files
from asyncrl.launch.checks.signal_files import Files, model_config
from asyncrl.logs import printable
from asyncrl.messages.topics import PROGRESS, TRAJECTORIES
from asyncrl.policies.audit.entries import HistoryEntry
from asyncrl.policies.groups.saved import LearnerState

_learner_log = logging.getLogger("asyncrl.learner")

_ASKED: Final = (
    "group_size",
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "ignore_eos",
    "stop",
    "stop_token_ids",
)
"""What a prompt group says on the bus about its answers (keys of [rollout])."""
_OF_THE_FILE: Final = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache")
_MOST_NAMES: Final = 8
_LONGEST_SHOWN: Final = 100


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
    """Raise ConfigError if the run's checkpoints do not fit its settings or its model, or it is a part of a branch.

    Both are compared with what the newest incarnation of the learner recorded. Without a record nothing is compared.
    """
    recorded = RecordedRun(run.run_directory)
    recorded.require_whole_branch()
    try:
        before, files = (
            _settings_of(recorded.last_start()),
            signal_files.recorded(run.run_directory),
        )
    except ConfigError:  # no record, or a damaged one
        return
    if not checkpoint.list_complete(run.run_directory / "checkpoints"):
        return
    if run.learner.backend != before.learner.backend:
        raise ConfigError(
            f'learner.backend: the checkpoints of this run are those of "{before.learner.backend}"; resume with it, or '
            "start another run.name from a model in its weights folder"
        )
    if _adapters(run) != _adapters(before):
        raise ConfigError(
            f"learner.lora: the checkpoints of this run are of {_adapters(before)}, not of {_adapters(run)}; resume "
            "with those, or start another run.name from a model in its weights folder"
        )
    if _has_critic(run) and not _has_critic(before):
        raise ConfigError(
            f'algorithm: "{run.algorithm.name}" trains a critic, and the newest checkpoint of this run has none; '
            "resume with the [algorithm] that wrote it, or start another run.name from a model in its weights folder"
        )
    now = model_config(Path(run.model.path))
    old = files.get("model.path", {}).get("config.json")
    old = old if isinstance(old, Mapping) else model_config(Path(before.model.path))
    if old is None or now is None or not (changed := changes(_of_model(old), _of_model(now))):
        return
    if _absolute(run.model.path) != _absolute(before.model.path):
        raise ConfigError(
            f"model.path: this run trains {before.model.path}, and {run.model.path} is another model (its config.json "
            f"differs: {'; '.join(changed)}); resume with the first, or start another run.name"
        )
    raise ConfigError(
        f"model.path: {run.model.path}/config.json is no longer that of this run ({'; '.join(changed)}), so it would "
        "go on as another model; put the file back, or start another run.name from a model in its weights folder"
    )


def name_changes(run: RunConfig, state: LearnerState, *, data: Mapping[str, str], files: Files) -> None:
    """Log one line for every change of what defines the run, since the newest incarnation of the learner began.

    data, files  digests of what is there now;  state: that of the checkpoint to go on from

    Without a record nothing is compared.
    """
    from asyncrl.actors.learner.training_step import learning_rates  # imports torch

    say = _learner_log.warning
    try:
        recorded = RecordedRun(run.run_directory)
        begun = recorded.last_start()
        before = _settings_of(begun)
    except ConfigError as error:
        if run.run_directory.joinpath(HISTORY_FILE).exists():  # damaged, or of another version of asyncrl
            say("the settings are not compared with those before, which cannot be read: %s", error)
        return
    was, now = (config_record.as_table(one, has_defaults=True) for one in (before, run))
    followed = f' ("auto", {run.why_staleness_bound}; set {before.staleness_bound} to keep it)'
    for line in changes(was, now):
        is_chosen = bool(run.why_staleness_bound) and line.startswith("staleness.max_staleness ")
        say("resumed with another setting: %s%s", line, followed if is_chosen else "")
    for line in _changed_files(signal_files.recorded(run.run_directory), files):
        say("changed since this run was last up: %s", printable(line))
    changed = [path for path, digest in data.items() if begun.data.get(path, digest) != digest]
    for path in changed:
        say("changed since this run was last up: the data %s", path)
    if changed or _order(run) != _order(before):
        say(
            "the data may have another order now: the run goes on at position %d, the same as of the data before",
            state.prompts.position,
        )
    step = state.step
    if (newest := max((entry.step for entry in recorded.history()), default=0)) > step:
        say(
            "steps %d to %d are lost with the learner before and are trained again; groups that it sampled with them "
            "count as old as version %d, and those over the staleness bound of %d are dropped",
            step + 1,
            newest,
            step,
            run.max_staleness,
        )
    if learning_rates(before, step) != learning_rates(run, step):
        last, rate = learning_rates(before, max(step - 1, 0))[0], learning_rates(run, step)[0]
        ends = [one.learner.decay_steps or one.run.steps for one in (run, before)]
        why = f' (learner.schedule = "{run.learner.schedule}" ends at step {ends[0]}, before at {ends[1]};'
        why += " learner.decay_steps sets the step)"
        say(
            "the learning rate goes from %s at step %d to %s at step %d%s",
            _rate(last),
            step,
            _rate(rate),
            step + 1,
            why if run.learner.schedule != "constant" else "",
        )
    asked = [key for key in _ASKED if getattr(run.rollout, key) != getattr(before.rollout, key)]
    if asked and (state.prompts.outstanding or not state.step):
        count = len(state.prompts.outstanding)  # unknown without a checkpoint
        say(
            "%s: the %sprompt groups that are under way keep what they were asked with",
            ", ".join(f"rollout.{key}" for key in asked),
            f"{count} " if count else "",
        )


def _settings_of(begun: HistoryEntry) -> RunConfig:
    """Return what a learner recorded, to be compared and no more: its bus may be that of another machine."""
    return config_record.from_table(begun.settings, where=HISTORY_FILE)


def _adapters(run: RunConfig) -> str:
    """Describe what is trained: the whole model, or adapters. The scale (alpha) is part of the description."""
    lora = run.learner.lora
    if not lora.rank:
        return "the whole model"
    return f"adapters of rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(sorted(lora.modules))}"


def _has_critic(run: RunConfig) -> bool:
    return "critic" in registry.algorithm(run).models


def changes(before: Mapping[str, Any], now: Mapping[str, Any], *, of: str = "") -> list[str]:
    """Return ``key: old -> new`` for every changed key, except those for the run's place and length.

    Tables of a list are told apart by their names, so that a change in one of them names its key.
    """
    found = []
    for key in sorted({*before, *now}):
        name, old, new = f"{of}{key}", _by_name(before.get(key)), _by_name(now.get(key))
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += changes(old, new, of=f"{name}.")
        elif old != new and name not in ("run.directory", "run.steps") and not name.startswith("bus."):
            found.append(f"{name} {_shown(old)} -> {_shown(new)}")
    return found


def _by_name(value: Any) -> Any:
    """Return a list of tables as one table, by the tables' names, paths or places; other values as they are."""
    if not (isinstance(value, list | tuple) and value and all(isinstance(one, Mapping) for one in value)):
        return value
    names = [str(one.get("name") or one.get("path") or "") for one in value]
    if not all(names) or len({*names}) < len(names):
        names = [str(place) for place in range(1, len(value) + 1)]
    return dict(zip(names, value, strict=True))


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    text = toml_text(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _changed_files(before: Mapping[str, Mapping[str, Any]], now: Files) -> list[str]:
    """Return a line for each key of the run file whose files are others now; keys without a record are left out."""
    lines = []
    for key in sorted(before.keys() & now.keys()):
        old, new = before[key], now[key]
        if key == "packages":
            lines += [f"the package {change}" for change in changes(old, new)]
            continue
        names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
        if not names:
            continue
        shown = ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" * (len(names) > _MOST_NAMES))
        pair = old.get("config.json"), new.get("config.json")
        keys = changes(pair[0], pair[1]) if isinstance(pair[0], Mapping) and isinstance(pair[1], Mapping) else []
        lines.append(f"{key}: {shown}" + (f" ({'; '.join(keys)})" if keys else ""))
    return lines


def _of_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json says about the model, without what it says about the file."""
    return {key: value for key, value in config.items() if key not in _OF_THE_FILE}


def _rate(value: float | None) -> str:
    return "0" if value is None else f"{value:.3g}"


def _order(run: RunConfig) -> Any:
    """Return the settings that determine the order of the rows."""
    data = run.data
    files = [(_absolute(file.path), file.by_epoch) for file in data.files]
    return (run.run.seed, data.shuffle, data.source, data.options, files, _absolute(data.path) if data.path else None)


def _absolute(path: str) -> Path:
    return Path(path).absolute()
