"""The prompts of a run and of its evaluation: checked without a tokenizer first, then opened with it.

Every row is parsed once. A bad row is reported before torch and transformers are imported, which takes many seconds on
a busy machine. Tests: tests/unit/launch/checks/test_data_rows.py, tests/unit/cli/test_cli.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.adapters import registry
from asyncrl.config import RewardSection, RunConfig
from asyncrl.config.secret_values import hide_secrets
from asyncrl.data.model_folder import check_model_at
from asyncrl.data.prompts import PromptDataset, indexed
from asyncrl.data.row_check import SAMPLING, RowLimits, RowReward
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.environments import load as rollout_functions
from asyncrl.errors import ConfigError
from asyncrl.launch.assembly.evaluation_sets import (
    look_at_rows,
    open_set,
    require_metric,
    require_space,
    row_limits,
)
from asyncrl.rewards.load import label_check, needs_label, rewards_of_rows

if TYPE_CHECKING:
    from asyncrl.data.sources import Positions
    from asyncrl.policies.evaluation.questions import EvaluationSet


def index_rows(run: RunConfig) -> Positions:
    """Check every row of the data without tokenising it.

    Raises ConfigError for the first row that cannot be a prompt.
    """
    return indexed(run.data, seed=run.run.seed, limits=_limits(run))


def num_usable(run: RunConfig, num_rows: int, *, num_too_long: int) -> int:
    """Return how many prompts of an epoch are not known to be too long."""
    is_mixture = any(file.weight for file in run.data.files)  # a row comes several times in an epoch, or not at all
    return num_rows if is_mixture else num_rows - num_too_long


def require_batch(run: RunConfig, num_rows: int, *, num_too_long: int = 0) -> None:
    """Raise ConfigError if the data ends before the first step."""
    usable = num_usable(run, num_rows, num_too_long=num_too_long)
    if run.data.epochs and usable * run.data.epochs < run.learner.groups_per_batch:
        dropped = f" (of {num_rows}, without those that are too long)" if usable < num_rows else ""
        raise ConfigError(
            f"data.epochs: {usable} rows{dropped} x {run.data.epochs} are no batch of learner.groups_per_batch = "
            f"{run.learner.groups_per_batch}, so nothing would be trained; lower it, or raise data.epochs (0 repeats)"
        )


def open_rows(run: RunConfig, rows: Positions | None = None) -> PromptDataset:
    """Open the prompts. ``rows``: result of ``index_rows``; None: read them here. Raises ConfigError."""
    limits = _limits(run)
    rows = index_rows(run) if rows is None else rows
    tokenizer = load_tokenizer(Path(run.model.path))
    if rollout_functions.traits(run.rollout.function).samples:
        most = registry.context_tokens(run) - run.rollout.max_new_tokens
        limits = dataclasses.replace(limits, prompt_tokens=most)
    return PromptDataset.open(run.data, tokenizer=tokenizer, seed=run.run.seed, limits=limits, rows=rows)


def open_evaluation_sets(run: RunConfig) -> list[EvaluationSet]:
    """Tokenise the data sets of [evaluation]. Raises ConfigError for the first row that cannot be a prompt."""
    model = check_model_at("model.path", Path(run.model.path))
    tokenizer = load_tokenizer(Path(run.model.path))
    sets = []
    for dataset in run.evaluation.datasets:
        reward = dataset.reward or run.reward
        opened = open_set(
            dataset,
            tokenizer=tokenizer,
            max_new_tokens=run.rollout.max_new_tokens,
            context_tokens=registry.context_tokens(run),
            vocabulary=model.vocab_size,
            limits=_limits_of_set(run, reward),
        )
        parts = {name: dataclasses.asdict(part) for name, part in sorted(reward.parts.items())}
        judge = repr(
            (reward.kind, sorted(hide_secrets(reward.options).items()), *([hide_secrets(parts)] if parts else []))
        )
        sets.append(dataclasses.replace(opened, judge=judge))
    require_metric(run.checkpoint.best, sets)
    require_space(
        sets,
        log_bytes=run.bus.max_log_bytes,
        num_recorded=run.metrics.samples_per_evaluation,
        turn_tokens=0 if rollout_functions.traits(run.rollout.function).gives_one else model.context_tokens,
    )
    return sets


def look_at_evaluation_rows(run: RunConfig) -> None:
    """Check every row of the data sets of [evaluation] without tokenising it. Raises ConfigError."""
    for dataset in run.evaluation.datasets:
        look_at_rows(dataset, limits=_limits_of_set(run, dataset.reward or run.reward))


def _limits_of_set(run: RunConfig, reward: RewardSection) -> RowLimits:
    return row_limits(
        row_bytes=run.bus.max_message_bytes // 2,
        labelled_for=reward.kind if needs_label(reward) else "",
        check_label=label_check(reward),
        keeps_messages=_keeps_messages(run),
    )


def _limits(run: RunConfig) -> RowLimits:
    model = check_model_at("model.path", Path(run.model.path))
    return RowLimits(
        prompt_tokens=model.context_tokens,
        row_bytes=run.bus.max_message_bytes - run.largest_prompt_bytes,
        labelled_for=run.reward.kind if needs_label(run.reward) else "",
        check_label=label_check(run.reward),
        rewards=_rewards_of_rows(run) if run.data.reward_key else {},
        sampling={name: _as_toml(getattr(run.rollout, name)) for name in (*SAMPLING, "ignore_eos")},
        vocabulary=model.vocab_size,
        keeps_messages=_keeps_messages(run),
    )


def _rewards_of_rows(run: RunConfig) -> dict[str, RowReward]:
    return {
        name: RowReward(needs_label=needs_label(one), check_label=label_check(one))
        for name, one in rewards_of_rows(run.reward).items()
    }


def _keeps_messages(run: RunConfig) -> bool:
    """Whether the rollout function may use messages; functions that return one trajectory use only tokens."""
    return not rollout_functions.traits(run.rollout.function).gives_one


def _as_toml(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
