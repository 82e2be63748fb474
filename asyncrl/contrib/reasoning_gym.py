"""Procedural tasks of reasoning-gym: a data source that mixes them by weight, and a reward that scores answers.

    [data]
    source = "asyncrl.contrib.reasoning_gym:Tasks"
    [data.options]
    weights = { chain_sum = 2, countdown = 1 }

    [reward]
    kind = "reasoning_gym"

The task and the puzzle at a position depend only on the options. The package is imported when it is first needed.
Tests: tests/unit/contrib/test_reasoning_gym.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.rewards.port import Sample

_INSTRUCTION: Final = "\nGive the final answer between <answer> and </answer>."
_ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TASK, _ENTRY = "gym_task", "gym_entry"
_ENDLESS: Final = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    weights: Mapping[str, Any]
    """Weight of each data set of reasoning-gym; its share of the prompts is the weight over the sum of all weights."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of single data sets, such as {chain_sum = {max_terms = 3}}."""
    seed: int = 0
    """Seed of the puzzles and their order."""
    instruction: str = _INSTRUCTION
    """Text after the question."""

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ConfigError(f"weights: {name} must be a number > 0, got {weight!r}")
        if not self.weights:
            raise ConfigError("weights: name data sets of reasoning-gym, each with its share")
        for name, table in self.settings.items():
            if name not in self.weights or not isinstance(table, Mapping):
                raise ConfigError(f"settings: {name} must be one of weights, with a table")
        _require("data.source")


class Tasks:
    """An endless DataSource."""

    Options = TaskOptions

    def __init__(self, options: TaskOptions) -> None:
        """Raises ConfigError for an unknown data set."""
        self._options = options
        self._names = list(options.weights)
        shares = np.array([float(options.weights[name]) for name in self._names])
        self._ends = np.cumsum(shares / shares.sum())
        self._sets = {name: self._made(name) for name in self._names}

    def at(self, position: int) -> dict[str, Any]:
        draw = np.random.PCG64(np.random.SeedSequence([self._options.seed, position])).random_raw() / 2**64
        number = min(int(np.searchsorted(self._ends, draw, side="right")), len(self._names) - 1)
        name = self._names[number]
        entry = self._sets[name][position % _ENDLESS]
        return {
            "prompt": entry["question"] + self._options.instruction,
            "label": None if entry["answer"] is None else str(entry["answer"]),
            "metadata": {_TASK: name, _ENTRY: json.loads(json.dumps(entry, default=str))},
        }

    def _made(self, name: str) -> Any:
        settings = dict(self._options.settings.get(name, {}))
        return _data_set(name, {"size": _ENDLESS, "seed": self._options.seed, **settings})


class Score:
    """The reward function: the score of the task's own scorer, from 0 to 1; 0 without an <answer>."""

    def __init__(self) -> None:
        _require("reward.kind")
        self._sets: dict[str, Any] = {}

    def check_label(self, label: Any, metadata: Mapping[str, Any]) -> None:
        if metadata.get(_TASK) is None or metadata.get(_ENTRY) is None:
            raise ValueError(
                "the row is not one of reasoning-gym's: set data.source = asyncrl.contrib.reasoning_gym:Tasks"
            )

    def __call__(self, sample: Sample) -> float:
        self.check_label(sample.label, sample.metadata)
        name, entry = sample.metadata[_TASK], sample.metadata[_ENTRY]
        if name not in self._sets:
            self._sets[name] = _data_set(name, {"size": 1, "seed": 0})
        found = _ANSWER.findall(sample.completion)
        return float(self._sets[name].score_answer(found[-1].strip(), entry)) if found else 0.0

    def vote(self, completion: str) -> str:
        found = _ANSWER.findall(completion)
        return str(found[-1]).strip() if found else ""


def _require(where: str) -> None:
    """Raise ConfigError unless reasoning-gym is installed. Does not import it, which takes seconds."""
    if "reasoning_gym" not in sys.modules and importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(f"{where}: reasoning-gym is not installed: pip install 'asyncrl[reasoning-gym]'")


def _data_set(name: str, settings: Mapping[str, Any]) -> Any:
    try:
        return importlib.import_module("reasoning_gym").create_dataset(name, **settings)
    except (ValueError, TypeError, AssertionError) as error:  # raised for bad names and settings
        raise ConfigError(f"weights: {name!r}: {' '.join(str(error).split())}") from error
