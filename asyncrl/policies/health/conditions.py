"""Conditions that do not stop a run yet: a disk that fills, or a run that trains the wrong thing.

Each condition is a number in an actor's heartbeats, with the value from which it is a finding. To add one, add a row
here and a row in the table of tests/unit/policies/health/test_diagnosis.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from asyncrl.policies.health.faults import Finding, Observation

MANY_SKIPPED: Final = 3
_NO_ROOM: Final = os.strerror(errno.ENOSPC)


@dataclass(frozen=True, slots=True)
class Condition:
    """
    threshold  report at or above this value
    message    follows the actor's name; may use {value} and {problem}
    cost       what it costs, in a few words
    no_room    the remedy instead, if the actor's problem is a full disk
    """

    fault: str
    threshold: float
    message: str
    cost: str
    remedy: str
    no_room: str = ""

    def line(self, seen: str) -> str:
        """Return what was seen with what it costs and the remedy."""
        return f"{seen}; {self.cost} -> {self.remedy}"


SPEED: Final = "this costs speed, not correctness"
RUIN: Final = "the model is getting worse, and every further step costs as much as before"

CONDITIONS: Final[dict[str, Condition]] = {
    "alarm/diverged": Condition(
        "diverged",
        1,
        "trains a model that has diverged: its numbers are not finite, or far from those of the model that sampled",
        RUIN,
        "stop; lower learner.learning_rate, and continue from a checkpoint before it, or begin again",
    ),
    "alarm/collapse": Condition(
        "collapse",
        1,
        "trains a policy that has collapsed, while the reward is no better than at the start",
        RUIN,
        "stop and read answers with `asyncrl samples`; lower learner.learning_rate, or keep the policy nearer to its "
        "start: reference.kl_coef, algorithm.entropy_coef",
    ),
    "alarm/reward_fell": Condition(
        "reward fell",
        1,
        "sees the reward fall far below its best",
        RUIN,
        "stop and read answers with `asyncrl samples`; go back to a good step (docs/guides/undo.md) with a lower "
        "learner.learning_rate",
    ),
    "alarm/drift": Condition(
        "drift",
        1,
        "trains tokens from which its policy has moved far away (metrics.drift_alarm)",
        "most runs with TIS that did so learned less than synchronous ones",
        "lower learner.learning_rate or staleness.max_staleness: their product matters",
    ),
    "alarm/mismatch": Condition(
        "mismatch",
        1,
        "sees that engine and trainer compute different policies (metrics.mismatch_alarm)",
        "every gradient is wrong by as much",
        "give both the same weights, precision and sampling options (model.dtype, engine.options), and change no token "
        "after it was sampled (rollout function, chat template)",
    ),
    "alarm/missing": Condition(
        "missing",
        1,
        "leaves out many answers that failed and have no reward",
        "training is biased if what fails is no fair sample, such as all answers without a number",
        "fix why they fail (the workers' logs say it), or return a reward for such answers",
    ),
    "alarm/drop": Condition(
        "stale",
        1,
        "drops many answers as too stale (metrics.drop_alarm), mostly long ones",
        "training sees fewer long answers than the policy writes",
        'raise staleness.max_staleness, or let the learner wait: staleness.eviction = "wait"',
    ),
    "alarm/stragglers": Condition(
        "stragglers",
        1,
        "holds back a full batch for old groups while engines are idle (metrics.straggler_alarm)",
        SPEED,
        "raise staleness.max_staleness as far as the learning rate allows (`asyncrl check` says it), or leave out what "
        'is older: staleness.discard = "tokens"',
    ),
    "alarm/split": Condition(
        "split",
        1,
        "or its engines are often idle: another split of the GPUs would train more (metrics.split_alarm)",
        SPEED,
        "give GPUs of the idle side to the other (learner.ranks, rollout.workers); `asyncrl plan` measures the split",
    ),
    "alarm/standstill": Condition(
        "standstill",
        1,
        "trains steps without any gradient",
        "steps cost as much as before and the model learns nothing",
        "read answers with `asyncrl samples`: the reward may match none of them or catch its own "
        "errors, or the task may be solved",
    ),
    "alarm/truncated": Condition(
        "truncated",
        1,
        "trains answers that are nearly all cut at rollout.max_new_tokens",
        "an answer that is not complete is hardly ever right",
        "raise rollout.max_new_tokens, or check that the model knows its end-of-text token (generation_config.json, "
        "chat template, rollout.stop)",
    ),
    "alarm/no_signal": Condition(
        "no signal",
        1,
        "trains on rewards that do not differ within any group: what changes the weights is not the reward",
        "the model learns nothing of the task",
        "read answers with `asyncrl samples`: the reward may match none of them or catch its own "
        "errors, or the task may be solved",
    ),
    "data/overlong_share": Condition(
        "overlong",
        0.5,
        "has passed over {value:.0%} of the rows: their prompts are longer than data.max_prompt_tokens",
        "training sees only the short ones",
        "raise data.max_prompt_tokens, or leave those rows out of the data",
    ),
    "weights/failed_reads": Condition(
        "unreadable",
        4,
        "cannot read the newest weights, tried {value:.0f} times ({problem})",
        "until then it samples with older weights, if it has any",
        "give it what the learner has: weights.directory under the same path, the same model.path",
        no_room="make room on that disk of the worker: it tries again by itself",
    ),
    "learner/disk_need": Condition(
        "little room",
        0.5,
        "has room for fewer than two more checkpoints on its disk: one takes {value:.0%} of what is free",
        "the run waits while the disk is full",
        "make room there, or lower checkpoint.keep and weights.keep",
    ),
    "learner/skipped_in_a_row": Condition(
        "not finite",
        MANY_SKIPPED,
        "has skipped {value:.0f} steps in a row: loss or gradient was not finite",
        "these steps train nothing, and the run ends after learner.max_skipped_steps of them",
        "lower learner.learning_rate",
    ),
}
ALARMS: Final = {name: condition.fault for name, condition in CONDITIONS.items() if name.startswith("alarm/")}
"""What the learner itself warns of, with the numbers of the step: metric -> fault."""


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
                    cost=condition.cost,
                    remedy=(_NO_ROOM in actor.beat.problem and condition.no_room) or condition.remedy,
                    host=actor.beat.host,
                    pid=actor.beat.pid,
                )
