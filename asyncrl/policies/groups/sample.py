"""A prompt group in human-readable form: text, rewards, advantage, staleness and fate. Pure.

The learner records some groups in samples.jsonl (sample_files.py). Readers build others from the trajectory log and
from events (audit/samples.py). The JSON form has the same fields under the same names.

Tests: tests/unit/policies/groups/test_sample.py.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import Trajectory, TrajectoryGroup
from asyncrl.policies.groups.turn_text import pieces_of
from asyncrl.policies.staleness.staleness import ResumePoints, oldest_version, per_token

PENDING: Final = "pending"
"""Fate of a group that has not left the window."""
EVALUATED: Final = "evaluated"
"""Fate of a prompt of an evaluation, which trains nothing."""
UNKNOWN: Final = "unknown"
"""Fate of a group if it cannot be found out: the run's folder is elsewhere, and its events are gone."""

Decode = Callable[[Sequence[int]], str]
By = Literal["policy", "environment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One trajectory.

    turns             (who wrote it, text), in order; empty until decoded
    reward            None if it was not finite
    parts             parts of the reward that were finite
    advantage         mean over the sampled tokens without old_tokens; None if unknown
    advantages        advantage of each token, if they are not all the same
    trainer_logprobs, entropies  of each token, in nats, as computed by the step that trained it; None for a token that
                      trained nothing, and () if unknown
    staleness         versions between its oldest token and the version that trained or dropped it; None if unknown
    old_tokens        sampled tokens that the step left out as too old; staleness is then that of the other tokens
    tokens, logprobs  of each token; logprobs of the behavior policy
    environment       [start, end) ranges of tokens that the policy did not sample
    versions          (start, incarnation, policy version) of each version span
    rollout, part     rollout of the group that it belongs to, and its part number there; rollout -1: a rollout by
                      itself
    prompt, prompt_tokens  the prompt of this trajectory, if it is not the group's prompt
    turn_rewards      (start, reward) of each turn with its own reward
    images            (start, end, SHA-256) of each image among the tokens of prompt and answer; files: RUN/images
    """

    reward: float | None = None
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    advantage: float | None = None
    staleness: int | None = None
    old_tokens: int = 0
    finish_reason: str = ""
    turns: tuple[tuple[str, str], ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()
    trainer_logprobs: tuple[float | None, ...] = ()
    entropies: tuple[float | None, ...] = ()
    environment: tuple[tuple[int, int], ...] = ()
    versions: tuple[tuple[int, int, int], ...] = ()
    rollout: int = -1
    part: int = 0
    prompt: str | None = None
    prompt_tokens: tuple[int, ...] = ()
    turn_rewards: tuple[tuple[int, float], ...] = ()
    images: tuple[tuple[int, int, str], ...] = ()

    @property
    def text(self) -> str:
        """All text after the prompt."""
        return "".join(text for _, text in self.turns)

    @property
    def spans(self) -> list[tuple[By, int, int]]:
        """Who wrote each turn, and the [start, end) of its tokens."""
        found: list[tuple[By, int, int]] = []
        done = 0
        for start, end in (*self.environment, (len(self.tokens), len(self.tokens))):
            found += [("policy", done, start)] if start > done else []
            found += [("environment", start, end)] if end > start else []
            done = end
        return found

    @property
    def titles(self) -> list[str]:
        """Titles of the turns: "answer" if there is only one, "turn 2, reward +0.5", "environment"."""
        number, titles = 0, []
        sampled = sum(by == "policy" for by, _, _ in self.spans)
        for by, first, end in self.spans:
            number += by == "policy"
            earned = [reward for start, reward in self.turn_rewards if first <= start < end]
            title = ("answer" if sampled == 1 else f"turn {number}") if by == "policy" else by
            titles.append(title + (f", reward {sum(earned):+g}" if earned else ""))
        return titles


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSample:
    """A prompt group.

    fate            trained, dropped, failed, filtered, EVALUATED, PENDING or UNKNOWN
    step            step that trained the group or made the evaluated version; otherwise the number of steps done
    reason          why the group was dropped, filtered or could not be made
    time            Unix seconds when that happened, or when the group arrived; 0 if unknown
    prompt          None until decoded
    dataset, place  of an evaluation prompt: its data set, and its index in the data set, from 0
    label           the data's answer; "" if there is none
    model           folder name of the saved model that was evaluated; "" for the run's own version
    """

    group_id: int
    fate: str = PENDING
    step: int = 0
    incarnation: int = 0
    reason: str = ""
    worker: str = ""
    epoch: int = 0
    seconds: float = 0.0
    time: float = 0.0
    prompt: str | None = None
    prompt_tokens: tuple[int, ...] = ()
    answers: tuple[Answer, ...] = ()
    dataset: str = ""
    place: int = 0
    label: str = ""
    model: str = ""

    @property
    def identity(self) -> Hashable:
        """Key of the group; of two samples with the same key, the later one counts."""
        if self.fate != EVALUATED:
            return self.group_id
        return (self.dataset, self.place, self.model, self.incarnation, self.step)

    @property
    def name(self) -> str:
        """Display name of the group."""
        return f"{self.dataset}, prompt {self.place}" if self.fate == EVALUATED else f"group {self.group_id}"

    @property
    def reward(self) -> float | None:
        """Mean reward over the rollouts (all parts of a rollout have the same reward); None without any."""
        rewards = [answer.reward for answer in self.answers if answer.reward is not None and not answer.part]
        return sum(rewards) / len(rewards) if rewards else None

    def title(self, index: int) -> str:
        """Return the title of answer ``index``: "answer 2", or "answer 2, part 1 of 3" if it has several parts."""
        answer = self.answers[index]
        number = (answer.rollout if answer.rollout >= 0 else index) + 1
        parts = sum(answer.rollout >= 0 and other.rollout == answer.rollout for other in self.answers)
        return f"answer {number}" + (f", part {answer.part + 1} of {parts}" if parts > 1 else "")

    @property
    def worst(self) -> float:
        """Reward of the worst answer; infinity without any."""
        return min((answer.reward for answer in self.answers if answer.reward is not None), default=math.inf)

    @property
    def staleness(self) -> int | None:
        return max((answer.staleness for answer in self.answers if answer.staleness is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def as_shown(self) -> dict[str, Any]:
        """Return the JSON form for people and scripts: adds the names of the group and its turns, and their pieces."""
        table = self.as_json() | {"name": self.name}
        for row, answer in zip(table["answers"], self.answers, strict=True):
            row["titles"] = answer.titles
            row["pieces"] = [dataclasses.asdict(piece) for piece in pieces_of(answer.turns)]
        return table


def sample_of(
    group: TrajectoryGroup,
    *,
    fate: str = PENDING,
    step: int = 0,
    incarnation: int = 0,
    reason: str = "",
    time: float = 0.0,
    resume_points: ResumePoints | None = None,
    bound: int | None = None,
    advantages: Sequence[NDArray[np.float32]] = (),
    trainer: Sequence[NDArray[np.float32]] = (),
) -> GroupSample:
    """Return the sample of a group, not decoded yet.

    resume_points  None if the staleness of the answers is unknown
    bound          staleness bound per token, if the step leaves out older tokens (staleness.discard = "tokens")
    advantages     f32[T] of each answer, 0 where the policy sampled nothing
    trainer        f32[2, T] of each answer: trainer logprobs and entropies, NaN where nothing was trained
    """
    at = step - 1 if fate == "trained" else step
    answers = [
        _answer(
            trajectory,
            **_ages(trajectory, at=at, resume_points=resume_points, bound=bound if fate == "trained" else None),
            advantages=advantages[index] if advantages else None,
            trainer=trainer[index] if trainer else None,
        )
        for index, trajectory in enumerate(group.trajectories)
    ]
    return GroupSample(
        group_id=group.group_id,
        fate=fate,
        step=step,
        incarnation=incarnation,
        reason=reason or group.error,
        worker=group.worker,
        epoch=group.epoch,
        seconds=group.seconds,
        time=time,
        prompt_tokens=tuple(group.prompt_tokens.tolist()),
        answers=tuple(answers),
        label=group.label,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt of an evaluation, and the model that answers it. Fields as in GroupSample."""

    dataset: str
    place: int
    label: str
    model: str = ""
    step: int
    incarnation: int


def evaluated_sample(group: TrajectoryGroup, asked: Asked, *, time: float) -> GroupSample:
    """Return the answers to a prompt of an evaluation, not decoded yet."""
    made = sample_of(group, fate=EVALUATED, step=asked.step, incarnation=asked.incarnation, time=time)
    answers = made.answers
    if asked.model:  # every saved model is version 0 during its evaluation
        answers = tuple(dataclasses.replace(answer, versions=()) for answer in answers)
    return dataclasses.replace(
        made, answers=answers, dataset=asked.dataset, place=asked.place, label=asked.label, model=asked.model
    )


def decoded(sample: GroupSample, decode: Decode) -> GroupSample:
    """Return the sample with its text."""
    answers = tuple(
        dataclasses.replace(
            answer,
            turns=tuple(_turns(answer, decode, begin=len(answer.prompt_tokens or sample.prompt_tokens))),
            prompt=_text(answer.prompt_tokens, answer.images, decode) if answer.prompt_tokens else None,
        )
        for answer in sample.answers
    )
    shown = next((answer.images for answer in sample.answers if not answer.prompt_tokens), ())
    return dataclasses.replace(sample, prompt=_text(sample.prompt_tokens, shown, decode), answers=answers)


def picked(among: int, *, count: int, seed: int, step: int) -> list[int]:
    """Return which of the batch's ``among`` groups step ``step`` records; the same in every run with the same seed."""
    return sorted(random.Random(f"{seed}/{step}").sample(range(among), min(among, count)))


def reason_of(fate: str, event: Mapping[str, Any]) -> str:
    """Return why a group was not trained, from the learner's event (groups/states.py, Outcome.events)."""
    if fate == "dropped":
        return f"{event.get('reason', 'stale')}, {event.get('staleness', '?')} versions old"
    if fate == "filtered":
        return f"by {event['by']}" if event.get("by") else "nothing to learn from"
    return str(event.get("error", ""))


def _ages(trajectory: Trajectory, *, at: int, resume_points: ResumePoints | None, bound: int | None) -> dict[str, Any]:
    """Return the staleness of an answer when version ``at`` trains it, and the mask ``old`` of tokens left out."""
    mask = trajectory.response_mask
    staleness = None if resume_points is None else max(0, at - oldest_version(trajectory.version_spans, resume_points))
    if resume_points is None or bound is None:
        return {"staleness": staleness, "old": np.zeros_like(mask)}
    ages = per_token(trajectory.version_spans, length=len(mask), policy_version=at, resume_points=resume_points)
    young = ages[mask & (ages <= bound)]
    return {"staleness": int(young.max()) if young.size else staleness, "old": mask & (ages > bound)}


def _answer(
    trajectory: Trajectory,
    *,
    staleness: int | None,
    old: NDArray[np.bool_],
    advantages: NDArray[np.float32] | None,
    trainer: NDArray[np.float32] | None,
) -> Answer:
    mask = trajectory.response_mask
    mean, each = None, ()
    if advantages is not None and mask.any():
        sampled = advantages[mask & ~old] if (mask & ~old).any() else advantages[mask]
        mean = round(float(sampled.mean()), 6)
        if not (sampled == sampled[0]).all():
            each = tuple(round(value, 6) for value in advantages.tolist())
    logprobs, entropies = trainer if trainer is not None and np.isfinite(trainer).any() else ((), ())
    return Answer(
        reward=_finite(trajectory.reward),
        parts={name: value for name, value in trajectory.reward_parts.items() if math.isfinite(value)},
        advantage=mean,
        staleness=staleness,
        old_tokens=int(np.count_nonzero(old)),
        finish_reason=trajectory.finish_reason,
        tokens=tuple(trajectory.tokens.tolist()),
        logprobs=tuple(round(value, 4) for value in trajectory.behavior_logprobs.tolist()),
        advantages=each,
        trainer_logprobs=tuple(map(_rounded, logprobs)),
        entropies=tuple(map(_rounded, entropies)),
        environment=tuple(_ranges(~mask)),
        versions=tuple((span.start, span.incarnation, span.policy_version) for span in trajectory.version_spans),
        rollout=trajectory.rollout,
        part=trajectory.part,
        prompt_tokens=tuple(trajectory.prompt_tokens.tolist()),
        turn_rewards=tuple((turn.start, turn.reward) for turn in trajectory.turn_rewards),
        images=tuple((one.start, one.end, one.digest) for one in trajectory.images),
    )


def _ranges(marked: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the [start, end) range of each run of True.  bool[T]"""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], marked, [False])).astype(np.int8)))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _turns(answer: Answer, decode: Decode, *, begin: int) -> list[tuple[By, str]]:
    """begin: number of tokens before the answer"""
    return [
        (by, _text(answer.tokens[start:end], answer.images, decode, begin=begin + start))
        for by, start, end in answer.spans
    ]


def _text(tokens: Sequence[int], images: Sequence[tuple[int, int, str]], decode: Decode, *, begin: int = 0) -> str:
    """Return the text of tokens, with [image DIGEST] for the placeholders of each image.  begin: tokens before them"""
    pieces, done = [], 0
    for start, end, digest in images:
        if begin <= start and end <= begin + len(tokens):
            pieces += [decode(tokens[done : start - begin]), f"[image {digest[:12]}]"]
            done = end - begin
    return "".join([*pieces, decode(tokens[done:])]) if pieces else decode(tokens)


def _rounded(value: float) -> float | None:
    return round(float(value), 4) if math.isfinite(value) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
