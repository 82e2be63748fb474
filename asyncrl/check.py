"""What a run file means, and whether it can work: said before anything starts.

Raises ConfigError, one line that says what to change. Loads no weights.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from asyncrl import app, auxiliary, plugins
from asyncrl.bus.access import without_secrets
from asyncrl.config import RunConfig
from asyncrl.data.model_folder import check_model
from asyncrl.errors import ConfigError
from asyncrl.placement import Placement, place


def check(run: RunConfig) -> None:
    """Refuse, with a ConfigError that says what to change, what cannot work. Starts nothing."""
    _check_bus(run)
    _check_sampling(run)
    check_model(Path(run.model.path))
    if not Path(run.data.path).is_file():
        raise ConfigError(f"data.path: {run.data.path} does not exist; it must be a .jsonl or .parquet file")
    algorithm = app.algorithm(run)
    if algorithm.advantage.has_group_baseline and run.rollout.group_size < 2:
        raise ConfigError(
            f"rollout: group_size 1 gives the advantage {algorithm.advantage.name} no baseline: it compares the "
            'samples of one prompt; use 2 or more, or algorithm.advantage = "reinforce"'
        )
    if "dynamic_sampling" in run.algorithm.filters and run.rollout.group_size < 2:
        raise ConfigError(
            'algorithm.filters: "dynamic_sampling" passes over groups of equal rewards, which one of one always is; '
            "remove it or use rollout.group_size = 2 or more"
        )
    auxiliary.check_folders(run, algorithm)
    for section, device in (("engine", run.engine.device), ("learner", run.learner.device)):
        if device == "cuda":
            app.require_gpu(section)
    app.options(app.engine_class(run), run.engine.options, "engine.options")
    app.options(app.backend_class(run), run.learner.options, "learner.options")
    if run.learner.ranks > 1 and run.learner.backend == "reference":
        raise ConfigError('learner.ranks: the reference backend is one process; use backend = "megatron" or ranks = 1')
    app.filters(run)
    plugins.load(run.weights.channel, where="weights.channel", table=app.CHANNELS)
    app.load_reward(run)
    plugins.load(run.rollout.function, where="rollout.function", table=app.ROLLOUTS)


def _check_bus(run: RunConfig) -> None:
    largest, limit = run.largest_message_bytes, run.bus.max_message_bytes
    if largest > limit:
        raise ConfigError(
            f"bus: a trajectory group of {run.rollout.group_size} x {run.rollout.max_new_tokens} tokens may take "
            f"{largest:,} bytes, over bus.max_message_bytes ({limit:,}); raise it (and max_payload of a server of your "
            "own) or lower rollout.group_size or rollout.max_new_tokens"
        )
    between = run.run.steps if run.checkpoint.keep_log else run.checkpoint.every_steps or run.run.steps
    groups = run.window + min(between, run.run.steps) * run.learner.groups_per_batch
    if groups * largest > run.bus.max_log_bytes:
        raise ConfigError(
            f"bus: up to {groups:,} groups of {largest:,} bytes lie in the log before a checkpoint trims it, "
            f"{groups * largest:,} in all, over bus.max_log_bytes ({run.bus.max_log_bytes:,}): a full log would stop "
            "the run; raise it or lower checkpoint.every_steps"
        )


def _check_sampling(run: RunConfig) -> None:
    rollout = run.rollout
    if rollout.top_p < 1 or rollout.top_k > 0:
        raise ConfigError(
            f"rollout: top_p={rollout.top_p} top_k={rollout.top_k} sample from a truncated distribution whose logprobs "
            "the trainer cannot recompute; use top_p = 1.0 and top_k = 0 and shape it by temperature"
        )


def placement(run: RunConfig) -> Placement:
    """The GPUs of this machine, dealt to the processes that `asyncrl run` starts on it. Raises ConfigError.

    Not part of ``check``: a process that was given its GPUs sees no others.
    """
    import torch

    return place(
        torch.cuda.device_count() if torch.cuda.is_available() else 0,
        ranks=run.learner.ranks if run.learner.device != "cpu" else 0,
        workers=run.rollout.workers,
        gpus_per_worker=int(run.engine.options.get("tensor_parallel", 1)) if run.engine.device != "cpu" else 0,
        learner_gpus=run.learner.gpus,
        rollout_gpus=run.rollout.gpus,
    )


def describe(run: RunConfig) -> str:
    """The resolved run file and what follows from it, for a person. Checks first, every row of the data too."""
    check(run)
    placed = placement(run)
    rows = app.open_rows(run)
    lines = []
    for section in dataclasses.fields(run):
        table = getattr(run, section.name)
        if table is None:
            continue
        lines.append(f"[{section.name}]")
        for key in dataclasses.fields(table):
            value = getattr(table, key.name)
            shown = (
                "***"
                if key.name == "token" and value
                else _toml(without_secrets(value) if key.name == "url" else value)
            )
            lines.append(f"{key.name} = {shown}")
        lines.append("")
    lines += [
        "# what follows",
        f"staleness bound   {run.max_staleness} versions ({run.run.mode})"
        + (f", the window's between {run.staleness.smallest} and it" if run.staleness.adaptive else ""),
        f"window            {run.window} groups = (max_staleness {run.max_staleness} + 1) x "
        f"groups_per_batch {run.learner.groups_per_batch}",
        f"data              {rows.num_rows:,} prompts, {run.run.steps * run.learner.groups_per_batch:,} trained",
        f"samples per step  {run.learner.groups_per_batch * run.rollout.group_size}",
        f"largest message   {run.largest_message_bytes:,} bytes of {run.bus.max_message_bytes:,}",
        f"GPUs              {placed}",
        f"weights           loaded {run.load.replace('_', ' ')}, kept in {run.weights_directory}",
        f"files             {run.run_directory}",
    ]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)
