"""Refuses to resume a run with another model or backend than it was started with, and logs what else has changed."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.adapters import registry
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.config import RunConfig
from asyncrl.config import record as config_record
from asyncrl.config.toml_text import toml_text
from asyncrl.data.sources import digests
from asyncrl.errors import ConfigError
from asyncrl.policies.audit.entries import BEGUN
from asyncrl.state import checkpoint

log = logging.getLogger("asyncrl.check")


def refuse_others(run: RunConfig, *, level: int = logging.WARNING) -> None:
    """Raise ConfigError if the run's checkpoints do not fit its settings, and log all other changes at ``level``.

    The settings are compared with those recorded by the newest incarnation of the learner; whether there is a critic,
    with those of the incarnation that wrote the newest checkpoint. Without a record nothing is compared.
    """
    recorded = RecordedRun(run.run_directory)
    try:
        before = recorded.newest_settings()
    except ConfigError:  # no record, or a damaged one
        return
    if run.learner.backend != before.learner.backend and checkpoint.complete(run.run_directory / "checkpoints"):
        raise ConfigError(
            f'learner.backend: the checkpoints of this run are those of "{before.learner.backend}"; resume with it, or '
            "start another run.name from a model in its weights folder"
        )
    if _adapters(run) != _adapters(before) and checkpoint.complete(run.run_directory / "checkpoints"):
        raise ConfigError(
            f"learner.lora: the checkpoints of this run are of {_adapters(before)}, not of {_adapters(run)}; resume "
            "with those, or start another run.name from a model in its weights folder"
        )
    if "critic" in registry.algorithm(run).models and not _may_have_critic(recorded):
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
        log.log(level, "resumed with other settings: %s", "; ".join(changed))
    if _order(run) != _order(before):
        log.log(level, "the data has another order now: the run goes on at the same position of the new one")


def compared_data(run: RunConfig) -> dict[str, str]:
    """Return the SHA-256 of each data file by its path. Raises ConfigError for a file that cannot be read.

    Logs a warning if a file is not what it was when the newest incarnation of the learner began, as far as recorded.
    """
    data = digests(run.data)
    try:
        before = RecordedRun(run.run_directory).newest_begun().data
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


def _may_have_critic(recorded: RecordedRun) -> bool:
    """Whether the newest checkpoint has a critic, by the algorithm that wrote it. True without one, or if unknown."""
    try:
        if (found := recorded.checkpoint()) is None:
            return True
        begun = {entry.incarnation: entry for entry in recorded.history() if entry.kind == BEGUN}
        return "critic" in registry.algorithm(recorded.settings(begun[found[0].incarnation])).models
    except (ConfigError, KeyError):  # the learner refuses a checkpoint without one, if later
        return True


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
