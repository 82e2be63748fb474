"""Conditions that do not stop a run yet: a disk that fills, or a run that trains the wrong thing.

Each condition is a number in an actor's heartbeats, with the value from which it is a finding. To add one, add a row
here and a row in the table of tests/unit/policies/health/test_diagnosis.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from asyncrl.policies.health.faults import Finding, Observation

MANY_SKIPPED: Final = 3


@dataclass(frozen=True, slots=True)
class Condition:
    """
    threshold  report at or above this value
    message    follows the actor's name; may use {value} and {problem}
    """

    fault: str
    threshold: float
    message: str
    remedy: str


CONDITIONS: Final[dict[str, Condition]] = {
    "alarm/mismatch": Condition(
        "mismatch",
        1,
        "sees that engine and trainer compute different policies (metrics.mismatch_alarm)",
        "compare their weights, precision and sampling options; mismatch/fresh_mean says by how much",
    ),
    "alarm/drop": Condition(
        "stale",
        1,
        "drops many answers as too stale (metrics.drop_alarm): mostly long ones, so training sees fewer of them",
        'raise staleness.max_staleness, or set staleness.discard = "tokens" or eviction = "wait" (enough wait_seconds)',
    ),
    "alarm/hold": Condition(
        "held",
        1,
        "holds back a full batch for old groups while engines are idle (metrics.hold_alarm)",
        'set staleness.discard = "tokens", or raise max_staleness; the warning in learner.log says to which value',
    ),
    "alarm/split": Condition(
        "split",
        1,
        "or its engines are often idle: another split of the GPUs would train more (metrics.split_alarm)",
        "change learner.ranks and rollout.workers as learner.log says; `asyncrl plan` measures the best split",
    ),
    "alarm/standstill": Condition(
        "standstill",
        1,
        "trains steps without any gradient",
        "look at reward/mean and reward/same_in_group: rewards that are all equal train nothing",
    ),
    "alarm/truncated": Condition(
        "truncated",
        1,
        "trains answers that are nearly all cut at rollout.max_new_tokens: none of them is complete",
        "raise rollout.max_new_tokens, or check that the model knows its end-of-text token (generation_config.json, "
        "chat template, rollout.stop)",
    ),
    "alarm/no_signal": Condition(
        "no signal",
        1,
        "trains on rewards that are all equal: the weights still change, but not because of the reward",
        "look at answers with `asyncrl samples`: the reward may never match an answer, or the task may be solved",
    ),
    "data/overlong_share": Condition(
        "overlong",
        0.5,
        "has passed over {value:.0%} of the rows: their prompts are longer than data.max_prompt_tokens",
        "raise data.max_prompt_tokens, or leave those rows out of the data",
    ),
    "weights/failed_reads": Condition(
        "unreadable",
        4,
        "cannot read the newest weights, tried {value:.0f} times ({problem})",
        'mount weights.directory under the same path as on the learner, or set weights.channel = "objects" for the '
        "whole run; if the tensors are others, correct model.path; until then it samples with older weights, if it has "
        "any",
    ),
    "learner/disk_need": Condition(
        "little room",
        0.5,
        "has room for fewer than two more checkpoints on its disk: one takes {value:.0%} of what is free",
        "make room there, or lower checkpoint.keep and weights.keep; the run waits while the disk is full",
    ),
    "learner/skipped_in_a_row": Condition(
        "not finite",
        MANY_SKIPPED,
        "has skipped {value:.0f} steps in a row: loss or gradient was not finite",
        "lower learner.learning_rate; the run ends after learner.max_skipped_steps of them",
    ),
}


def findings(seen: Observation) -> Iterable[Finding]:
    """Yield the conditions of all actors that send heartbeats."""
    for name, actor in seen.actors.items():
        if actor.is_silent:
            continue
        for number, condition in CONDITIONS.items():
            value = actor.beat.numbers.get(number, 0.0)
            if value >= condition.threshold:
                yield Finding(
                    fault=condition.fault,
                    actor=name,
                    cause=f"{name} {condition.message.format(value=value, problem=actor.beat.problem)}",
                    remedy=condition.remedy,
                    host=actor.beat.host,
                    pid=actor.beat.pid,
                )
