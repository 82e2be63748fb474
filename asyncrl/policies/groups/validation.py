"""Validation of trajectory groups: each group is checked alone, before it is buffered, so no bad value reaches a step.

A message checks by itself what it can when it is built: lengths of arrays, positive or non-finite logprobs
(messages/rollout.py). This module checks what only the learner knows: what the group's prompt asked for, the model's
vocabulary and context, the versions that existed. ``CHECKS`` is the table, in the order of checking; cheap checks that
bound the size of the rest come first. A group that passes costs the learner no more than an honest group may.

Tests: tests/unit/policies/groups/test_validation.py.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import TrajectoryGroup
from asyncrl.messages.images import ImageRef
from asyncrl.messages.likeliest import Likeliest
from asyncrl.messages.routing import ExpertArray, dtype_for, unrouted
from asyncrl.messages.validation import MOST_SECONDS, name_problem
from asyncrl.policies.staleness.staleness import ResumePoints, effective_version

MOST_PARTS: Final = 64
"""Parts of one answer's reward. Each part is a metric of every step."""
LARGEST_PART_NAME: Final = 128
CATEGORY: Final = "category"
"""The part category/NAME says what kind of answer it is. Answers without it count as 0 in the metric
reward/category/NAME, which is the share of answers of the kind."""
OWN_METRICS: Final = frozenset({"mean", "std", "same_in_group"})
"""Metrics of the learner. A part of a reward becomes the metric ``reward/NAME``, so it may not use these names."""

LEAST_LOGPROB: Final = -104.0
"""Lower limit of the logprob of a sampled token. The smallest positive float32 probability is 2^-149, whose logarithm
is -103.3, and a token of probability 0 is never sampled. The rest is margin for rounding."""
UNLIKELY: Final = 42.0
"""Nats by which an answer may be less likely than tokens drawn uniformly from the vocabulary, ln(10^18).

For an answer of n tokens from a vocabulary V that was sampled with the logprobs it carries, E[exp(-sum)] <= V^n. By
Markov's inequality P(sum < -(n ln V + 42)) <= exp(-42): once in 10^18 answers, more than any run samples.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpec:
    """What the prompt of a group asked for, as far as the learner knows.

    samples            allowed numbers of answers
    max_tokens         limit of tokens per answer
    max_prompt_tokens  limit of tokens of the prompt
    prompt_digest      digest of the prompt's tokens (``digest``); empty if unknown
    epoch              pass over the data; None if unknown
    temperature        of the row, if it has one of its own; 0: rollout.temperature; None if unknown
    reports_support    whether each sampled token must say what it was sampled from; None if unknown
    images             images that the prompt shows; None if unknown
    """

    samples: frozenset[int]
    max_tokens: int
    max_prompt_tokens: int
    prompt_digest: bytes = b""
    epoch: int | None = None
    temperature: float | None = None
    reports_support: bool | None = None
    images: tuple[ImageRef, ...] | None = None


def digest(tokens: NDArray[np.int32]) -> bytes:
    """Return a digest of a prompt's tokens that is the same in every process."""
    return hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupValidation:
    """The limits of a run.

    vocabulary_size    tokens are 0..vocabulary_size - 1
    context_tokens     tokens that fit into the model, including the prompt
    largest_reward     largest magnitude of a reward and of its parts (reward.largest)
    are_answers_whole  whether all requested answers must be present; False if samples are cut off
    are_sampled        False if answers come from the data: no version sampled them, and their logprobs mean nothing
    are_whole          whether a rollout is one trajectory that follows the group's prompt (gives_one of the rollout
                       function, as single_turn and given have it). False if the function may return several, each
                       with its own prompt
    max_parts          trajectories per rollout; 0: unlimited
    needs_teacher      whether a served teacher scores each answer
    likeliest          number of likeliest tokens at each place, by the field of a trajectory that must have them
    num_experts        experts per layer of the model; 0: answers name no experts
    experts_shape      (layers, experts per token) of the model
    """

    vocabulary_size: int = 2**31
    context_tokens: int = 2**31
    largest_reward: float = math.inf
    are_answers_whole: bool = False
    are_sampled: bool = True
    are_whole: bool = False
    max_parts: int = 0
    needs_teacher: bool = False
    likeliest: Mapping[str, int] = field(default_factory=dict)
    num_experts: int = 0
    experts_shape: tuple[int, int] = (0, 0)
    asked_before: PromptSpec | None = None
    """What prompts that an earlier incarnation published may have asked for."""

    def problem(
        self,
        group: TrajectoryGroup,
        *,
        incarnation: int,
        policy_version: int,
        resume_points: ResumePoints,
        asked: PromptSpec | None = None,
    ) -> str:
        """Return why a learner at (incarnation, policy_version) must not train the group; "" if nothing is wrong.

        ``asked`` is None if this incarnation did not publish the prompt. Checks of answers are skipped for a failed
        group, which has none.
        """
        vetted = Vetted(
            group=group,
            asked=asked or self.asked_before,
            limits=self,
            incarnation=incarnation,
            policy_version=policy_version,
            resume_points=resume_points,
        )
        for check in CHECKS:
            if (group.trajectories or check.is_of_failed) and (problem := next(check.problems(vetted), "")):
                return problem
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vetted:
    """One group, what its prompt asked for, the run's limits, and where the learner is when the group arrives."""

    group: TrajectoryGroup
    asked: PromptSpec | None
    limits: GroupValidation
    incarnation: int
    policy_version: int
    resume_points: ResumePoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check.  problems: yields what is wrong, in words;  is_of_failed: whether failed groups are checked as well"""

    what: str
    problems: Callable[[Vetted], Iterator[str]]
    is_of_failed: bool = False


def _names(vetted: Vetted) -> Iterator[str]:
    if problem := name_problem(vetted.group.worker):
        yield problem


def _counts(vetted: Vetted) -> Iterator[str]:
    group, asked = vetted.group, vetted.asked
    if asked is None:
        return
    answers, most = len(group.rollouts), max(asked.samples)
    if answers > most:
        yield f"it has {answers} answers, and {most} were asked for"
    elif answers + group.cancelled not in asked.samples:
        yield f"it has {answers} answers and {group.cancelled} cut off, and {_either(asked.samples)} were asked for"
    elif group.cancelled and vetted.limits.are_answers_whole:
        yield f"it says that {group.cancelled} answers were cut off, and this run cuts none"
    elif (last := group.trajectories[-1].rollout) >= most:
        yield f"it has rollout {last}, and {most} were asked for"


def _parts(vetted: Vetted) -> Iterator[str]:
    limits, rollouts = vetted.limits, vetted.group.rollouts
    longest = max(len(parts) for parts in rollouts)
    if limits.are_whole and longest > 1:
        yield f"a rollout has {longest} parts, and this run's rollout function gives one"
    elif limits.max_parts and longest > limits.max_parts:
        yield f"a rollout has {longest} parts, over rollout.max_parts = {limits.max_parts}"
    elif limits.are_whole and any(len(one.prompt_tokens) for one in vetted.group.trajectories):
        yield "an answer has a prompt of its own, and this run's rollout function gives none"


def _prompt(vetted: Vetted) -> Iterator[str]:
    tokens, asked = vetted.group.prompt_tokens, vetted.asked
    if not len(tokens):
        yield "it has no prompt tokens"
    elif asked is None:
        return
    elif len(tokens) > asked.max_prompt_tokens:
        yield f"its prompt has {len(tokens)} tokens, and no prompt has more than {asked.max_prompt_tokens}"
    elif asked.prompt_digest and digest(tokens) != asked.prompt_digest:
        yield "its prompt is not the one that was asked"
    elif asked.images is not None and any(
        tuple(image for image in one.images if image.start < len(tokens)) != asked.images
        for one in vetted.group.trajectories
        if not len(one.prompt_tokens)
    ):
        yield "an answer's prompt shows other images than those that were asked"


def _epoch(vetted: Vetted) -> Iterator[str]:
    group, asked = vetted.group, vetted.asked
    if asked is not None and asked.epoch is not None and group.epoch != asked.epoch:
        yield f"it is of epoch {group.epoch} of the data, and its prompt of {asked.epoch}"


def _lengths(vetted: Vetted) -> Iterator[str]:
    asked, context = vetted.asked, vetted.limits.context_tokens
    for trajectory in vetted.group.trajectories:
        prompt, length = len(vetted.group.prompt_of(trajectory)), len(trajectory.tokens)
        if prompt + length > context:
            yield f"prompt and answer have {prompt + length} tokens, the model's context {context}"
        if asked is not None and length > asked.max_tokens:
            yield f"an answer has {length} tokens, and at most {asked.max_tokens} were asked for"


def _masks(vetted: Vetted) -> Iterator[str]:
    if not all(trajectory.response_mask.any() for trajectory in vetted.group.trajectories):
        yield "an answer has no token that the model sampled: there is nothing to train"


def _tokens(vetted: Vetted) -> Iterator[str]:
    size = vetted.limits.vocabulary_size
    trajectories = vetted.group.trajectories
    prompts = [vetted.group.prompt_tokens, *(one.prompt_tokens for one in trajectories if len(one.prompt_tokens))]
    named = [*(("prompt token", tokens) for tokens in prompts), *(("token", one.tokens) for one in trajectories)]
    for what, tokens in named:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= size:
            yield f"{what} {low if low < 0 else high} is outside the vocabulary of {size}"


def _logprobs(vetted: Vetted) -> Iterator[str]:
    if not vetted.limits.are_sampled:
        return
    even = math.log(vetted.limits.vocabulary_size)
    for trajectory in vetted.group.trajectories:
        sampled = trajectory.behavior_logprobs[trajectory.response_mask]
        least, total = float(sampled.min()), float(sampled.sum(dtype=np.float64))
        if least < LEAST_LOGPROB:
            yield f"a behavior logprob is {least:.4g}; what float32 can sample is above {LEAST_LOGPROB:g}"
        elif total < -(len(sampled) * even + UNLIKELY):
            yield (
                f"the behavior logprobs of {len(sampled)} tokens add up to {total:.4g}: less likely than {UNLIKELY:g} "
                f"nats below tokens drawn evenly from the vocabulary of {vetted.limits.vocabulary_size}"
            )


def _teacher(vetted: Vetted) -> Iterator[str]:
    if vetted.limits.needs_teacher and not all(len(one.teacher_logprobs) for one in vetted.group.trajectories):
        yield "an answer has no logprobs of a teacher, and this run needs them"


def _likeliest(vetted: Vetted) -> Iterator[str]:
    size = vetted.limits.vocabulary_size
    for name, count in vetted.limits.likeliest.items():
        for trajectory in vetted.group.trajectories:
            found: Likeliest = getattr(trajectory, name)
            if found.count != count:
                yield f"an answer has {found.count} {name.replace('_', ' ')} tokens at each place, not {count}"
                continue
            tokens = found.tokens[trajectory.response_mask]
            if not 0 <= int(tokens.min(initial=0)) <= int(tokens.max(initial=0)) < size:
                yield f"a token of {name} is outside the vocabulary of {size}"
            in_order = np.sort(tokens, axis=-1)
            if (in_order[:, 1:] == in_order[:, :-1]).any():
                yield f"{name} names a token twice at one place"


def _experts(vetted: Vetted) -> Iterator[str]:
    (layers, per_token), most = vetted.limits.experts_shape, vetted.limits.num_experts
    for trajectory in vetted.group.trajectories:
        experts = trajectory.experts
        if not len(experts):
            continue
        expected = (len(vetted.group.prompt_of(trajectory)) + len(trajectory.tokens), layers, per_token)
        if not most:
            yield "an answer names experts, and the model has none"
        elif experts.dtype != dtype_for(most) or experts.shape != expected:
            yield f"experts of an answer are {experts.shape} of {experts.dtype}, and must be {expected}"
        elif int(experts[experts != unrouted(experts)].max(initial=0)) >= most:
            yield f"an answer names an expert that is none of the {most}"
        elif not _are_distinct(experts):
            yield "an answer names an expert twice for one token and layer"


def _are_distinct(experts: ExpertArray) -> bool:
    """Return whether each row of k entries names k different experts, or none at all."""
    in_order = np.sort(experts, axis=-1)
    is_same = in_order[..., 1:] == in_order[..., :-1]
    return not bool((is_same & (in_order[..., :1] != unrouted(experts))).any())


def _supports(vetted: Vetted) -> Iterator[str]:
    """Check what tokens were sampled from: a trainer that normalised over other tokens would compare unlike numbers."""
    group, asked, size = vetted.group, vetted.asked, vetted.limits.vocabulary_size
    is_cut = asked.reports_support if asked is not None else None
    if asked is not None and asked.temperature is not None and group.temperature != asked.temperature:
        yield f"it was sampled at temperature {group.temperature:g}, and its prompt asked for {asked.temperature:g}"
    for trajectory in group.trajectories:
        support, mask = trajectory.support, trajectory.response_mask
        if not len(support.counts):
            if is_cut:
                yield "an answer does not say which tokens it was sampled from, and top_p or top_k cut them"
            continue
        if is_cut is False and len(support.tokens):
            yield "an answer says which tokens it was sampled from, and nothing cut them"
        if is_cut and not (support.counts[mask] > 0).all():
            yield "a sampled token does not say which tokens it was sampled from"
        if len(support.tokens) and not 0 <= int(support.tokens.min()) <= int(support.tokens.max()) < size:
            yield f"a token that an answer was sampled from is outside the vocabulary of {size}"
        cut = np.flatnonzero(support.counts)
        is_sampled = support.tokens == np.repeat(trajectory.tokens, support.counts)
        starts = np.cumsum(support.counts[cut], dtype=np.int64) - support.counts[cut]
        if len(cut) and not np.logical_or.reduceat(is_sampled, starts).all():
            yield "a token is none of those that it was sampled from"


def _rewards(vetted: Vetted) -> Iterator[str]:
    for trajectory in vetted.group.trajectories:
        turns = {f"the reward of turn {turn.start}": turn.reward for turn in trajectory.turn_rewards}
        largest = vetted.limits.largest_reward
        yield from reward_problems({"reward": trajectory.reward, **turns}, trajectory.reward_parts, largest=largest)


def reward_problems(rewards: Mapping[str, float], parts: Mapping[str, float], *, largest: float) -> Iterator[str]:
    """Yield what is wrong with an answer's rewards.  rewards: by display name;  largest: reward.largest"""
    yield from _part_names(parts)
    for name, value in (*rewards.items(), *parts.items()):  # a part may be called "reward"
        if not math.isfinite(value):
            yield f"{name} is {value}"
        elif abs(value) > largest:
            yield f"{name} is {value:.4g}, beyond reward.largest = {largest:g}"


def _part_names(parts: Mapping[str, float]) -> Iterator[str]:
    if len(parts) > MOST_PARTS:
        yield f"a reward has {len(parts)} parts, over {MOST_PARTS}"
    for name in parts:
        if problem := part_problem(name):
            yield problem


def part_problem(name: str) -> str:
    """Return what is wrong with the name of a reward part, which becomes the metric reward/NAME; "" if nothing is."""
    if name in OWN_METRICS:
        return f"a part of a reward is named {name!r}, and reward/{name} is a metric of the learner"
    if not 0 < len(name) <= LARGEST_PART_NAME or not name.isprintable():
        return f"the name of a reward's part must have 1 to {LARGEST_PART_NAME} printable characters, got {name[:40]!r}"
    return ""


def _versions(vetted: Vetted) -> Iterator[str]:
    if not vetted.limits.are_sampled:
        return
    for trajectory in vetted.group.trajectories:
        for span in trajectory.version_spans:
            version = effective_version(span, vetted.resume_points)
            if span.incarnation > vetted.incarnation or version > vetted.policy_version:
                yield (
                    f"sampled by version {span.policy_version} of incarnation {span.incarnation}, "
                    f"and the learner is at version {vetted.policy_version} of {vetted.incarnation}"
                )


def _times(vetted: Vetted) -> Iterator[str]:
    for name in ("seconds", "began", "reward_seconds"):
        if not 0 <= (value := getattr(vetted.group, name)) <= MOST_SECONDS:
            yield f"its {name} are {value:.4g}, and are 0 to {MOST_SECONDS:g}"


def _either(counts: frozenset[int]) -> str:
    return " or ".join(map(str, sorted(counts)))


CHECKS: Final = (
    Check(what="the worker's name", problems=_names, is_of_failed=True),
    Check(what="as many answers as were asked for", problems=_counts),
    Check(what="no more parts of an answer than its rollout function gives", problems=_parts),
    Check(what="the prompt that was asked", problems=_prompt),
    Check(what="the pass over the data that its prompt is of", problems=_epoch),
    Check(what="answers no longer than asked, and within the model's context", problems=_lengths),
    Check(what="something to train in every answer", problems=_masks),
    Check(what="tokens of the model's vocabulary", problems=_tokens),
    Check(what="a teacher's logprobs, if the run has a served teacher", problems=_teacher),
    Check(what="the likeliest tokens at each place, if the run needs them", problems=_likeliest),
    Check(what="experts of the model, each once, for every token", problems=_experts),
    Check(what="the tokens and the temperature that each token was sampled from", problems=_supports),
    Check(what="rewards and their parts: finite, within reward.largest, few, with names", problems=_rewards),
    Check(what="times that can be", problems=_times),
    Check(what="versions that there have been", problems=_versions),
    Check(what="logprobs that an engine can have sampled with", problems=_logprobs),
)
