"""Prompts, trajectories, and partial rollouts: tokens of unfinished groups that another worker may take over.

Messages are frozen: no receiver changes a message. Each message checks itself on construction, so a message that
decodes is valid. Arrays are numpy arrays, little-endian on the wire.

A group with one trajectory, for the prompt "7+5=" and the answer "12<eos>":

    TrajectoryGroup(group_id=3, prompt_tokens=[9, 2, 7, 4], trajectories=(
        Trajectory(tokens=[3, 4, 1], response_mask=[T, T, T], behavior_logprobs=[-.1, -.3, -.0],
                   version_spans=(VersionSpan(incarnation=0, policy_version=6, start=0),
                                  VersionSpan(incarnation=0, policy_version=7, start=2)),
                   reward=1.0, finish_reason="stop"),))
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.checks import MOST_KEPT
from asyncrl.messages.images import ImageRef, check_images
from asyncrl.messages.likeliest import NONE, Likeliest, check_likeliest
from asyncrl.messages.routing import NO_EXPERTS, ExpertArray, check_experts
from asyncrl.messages.support import WHOLE, Support, check_support
from asyncrl.messages.validation import check_array, check_counts, replace, require

FINISH_REASONS: Final = ("stop", "length", "abort")

ANY_INCARNATION: Final = 2**31 - 1
"""Incarnation of tokens that no policy sampled. Such tokens belong to every history."""

_POSITIVE_LOGPROB: Final = 1e-3
"""Largest logprob above 0 that an engine's rounding (softmax in bfloat16) can explain. A larger value is wrong."""

LONGEST_ERROR: Final = 2000
"""Characters to keep of a failed group's error."""

_MAX_GROUP: Final = 2**16
_LONGEST_ENGINE: Final = 200
LONGEST_LABEL: Final = 2000
"""Most characters of a label for people. The tests of a program may be long."""

_ALONE: Final = -1
"""``Trajectory.rollout`` of a trajectory that is a whole rollout. Its index in the group is the rollout's number."""
_NO_PROMPT: Final = np.zeros(0, np.int32)
_NO_LOGPROBS: Final = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How an engine samples each trajectory of a group.

    temperature     divides the logits, also in the behavior logprobs; 0 takes the likeliest token and requires
                    ``is_trained`` False
    ignore_eos      sample max_new_tokens tokens, whatever they are
    stop            texts that end an answer; the answer includes the whole token that completes one of them
    stop_token_ids  tokens that end an answer, like an end token
    min_new_tokens  number of first tokens that may not be an end token or in ``stop_token_ids``; their logprobs are of
                    the distribution without those tokens. A stop text may still end a shorter answer
    max_context_tokens  most tokens of prompt and answer, over all turns; 0: as many as the engine takes
    top_logprobs    number of likeliest tokens that each token carries with their logprobs (messages/likeliest.py)
    is_trained      False for an evaluation. Trained tokens carry their ``support`` where top_p or top_k cut the
                    distribution; engines refuse penalties for them
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_context_tokens: int = 0
    top_logprobs: int = 0
    is_trained: bool = True

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 1, f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        require(0 <= self.temperature < math.inf, f"temperature must be >= 0, got {self.temperature}")
        require(
            self.temperature > 0 or not self.is_trained, "temperature must be > 0, got 0.0: greedy answers are equal"
        )
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        require(self.top_k >= 0, f"top_k must be >= 0, got {self.top_k}")
        require(
            not self.is_trained or self.top_k == 0 or 2 <= self.top_k <= MOST_KEPT,
            f"top_k must be 0 (off) or 2 to {MOST_KEPT:,} in training, got {self.top_k}",
        )
        require(
            0 <= self.top_logprobs <= MOST_KEPT, f"top_logprobs must be 0 to {MOST_KEPT:,}, got {self.top_logprobs}"
        )
        require(
            not self.top_logprobs or not self.reports_support,
            f"top_logprobs are of the whole vocabulary, and {self.changes} cuts it; use 0, or top_p = 1 and top_k = 0",
        )
        require(self.max_context_tokens >= 0, f"max_context_tokens must be >= 0, got {self.max_context_tokens}")
        require(all(self.stop), "stop holds an empty text, which every answer contains")
        require(all(0 <= token < 2**31 for token in self.stop_token_ids), "stop_token_ids must be token ids, >= 0")
        require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens must be >= 0 and <= max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}",
        )
        require(
            0 < self.repetition_penalty <= 2, f"repetition_penalty must be in (0, 2], got {self.repetition_penalty}"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            require(-2 <= getattr(self, name) <= 2, f"{name} must be in [-2, 2], got {getattr(self, name)}")
        require(
            not (self.ignore_eos and (self.stop or self.stop_token_ids or self.min_new_tokens)),
            "ignore_eos samples max_new_tokens tokens: it goes with no stop, stop_token_ids or min_new_tokens",
        )

    @property
    def changes(self) -> str:
        """How the sampling distribution differs from the model's at ``temperature``; "" if it does not."""
        off = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return " ".join(f"{name}={getattr(self, name)}" for name, value in off.items() if getattr(self, name) != value)

    @property
    def penalties(self) -> str:
        """The penalties, as in ``changes``; "" if there are none."""
        return " ".join(one for one in self.changes.split() if "penalty" in one)

    @property
    def reports_support(self) -> bool:
        """Whether each token carries the tokens that it was sampled from (messages/support.py)."""
        return self.is_trained and (self.top_p < 1 or self.top_k > 0)

    @property
    def most_kept(self) -> int:
        """Most tokens to sample from; 0: all. In training a nucleus is cut to MOST_KEPT."""
        return self.top_k or (MOST_KEPT if self.reports_support else 0)

    def own_temperature(self, default: float) -> float:
        """Return the temperature, or 0 if it is ``default``: a trajectory group names only another one."""
        return 0.0 if self.temperature == default else self.temperature

    def at_most(self, max_new_tokens: int) -> SamplingParams:
        """Return a copy with another ``max_new_tokens``; min_new_tokens is lowered to it if necessary."""
        low = max(0, min(self.min_new_tokens, max_new_tokens))
        changed: SamplingParams = replace(self, max_new_tokens=max_new_tokens, min_new_tokens=low)
        return changed

    def after(self, num_tokens: int) -> SamplingParams:
        """Return the parameters for the rest of an answer that has ``num_tokens``, fewer than max_new_tokens."""
        left: SamplingParams = replace(
            self,
            max_new_tokens=self.max_new_tokens - num_tokens,
            min_new_tokens=max(0, self.min_new_tokens - num_tokens),
        )
        return left


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """One prompt to be answered ``group_size`` times.  Topic ``prompts``: prompt source -> rollout workers.

    group_id            number of the group in the run, dense from 0; the message's key
    min_policy_version  oldest weights that may sample the group (admission.version_to_begin)
    incarnation         incarnation of the learner that published the group
    label, metadata     values for the reward function; anything that msgpack can carry
    response_tokens     i32[R], an answer to imitate, including <eos>; empty if the data has none
    response_mask       bool[R], True for the response tokens to train; empty: all
    reward              name of the row's own reward; empty: reward.kind
    ticket              ticket that the answer's key must contain (policies/groups/tickets.py); empty: none
    policy_version      learner's version at publication; the age of a given answer counts from it
    epoch               pass over the data
    dataset             data set of an evaluation's prompt; empty in training
    messages            messages from which the chat template made the prompt; empty without a template, and for
                        single_turn and given
    recorded_place      for an evaluation's prompt whose answers are recorded for people to read: its index in its data
                        set (EvaluationAnswers.group); -1: not recorded
    images              images that the prompt shows, in order; their files are on the object store (images/store.py)
    """

    group_id: int
    prompt_tokens: NDArray[np.int32]
    group_size: int
    sampling: SamplingParams
    prompt: str = ""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0
    min_policy_version: int = 0
    response_tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    policy_version: int = 0
    incarnation: int = 0
    dataset: str = ""
    response_mask: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    reward: str = ""
    ticket: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    recorded_place: int = -1
    images: tuple[ImageRef, ...] = ()

    def __post_init__(self) -> None:
        check_images(self.images, num_tokens=len(self.prompt_tokens))
        check_array(self, "prompt_tokens", np.int32)
        check_array(self, "response_tokens", np.int32)
        check_array(self, "response_mask", np.bool_)
        require(
            len(self.response_mask) in (0, len(self.response_tokens)),
            f"response_mask has {len(self.response_mask)} of {len(self.response_tokens)} tokens",
        )
        require(len(self.prompt_tokens) > 0, "prompt_tokens is empty")
        require(
            1 <= self.group_size <= _MAX_GROUP, f"group_size must be >= 1 and <= {_MAX_GROUP}, got {self.group_size}"
        )
        check_counts(self, "group_id", "epoch", "min_policy_version", "incarnation")
        require(
            bool(re.fullmatch("([0-9a-f]{32})?", self.ticket)), f"ticket must be 32 digits, got {self.ticket[:40]!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class VersionSpan:
    """The policy that sampled the tokens from ``start`` to the next span.

    incarnation  ANY_INCARNATION for tokens that no policy sampled: they do not get older when a learner falls back
    """

    start: int
    incarnation: int
    policy_version: int

    def __post_init__(self) -> None:
        check_counts(self, "start", "incarnation", "policy_version")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class TurnReward:
    """Reward of the turn that begins at token ``start`` of a trajectory, in addition to the rollout's reward."""

    start: int
    reward: float

    def __post_init__(self) -> None:
        check_counts(self, "start")
        require(math.isfinite(self.reward), f"the reward of a turn is {self.reward}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sampled answer, or a part of one: everything after its prompt, with the origin of each token.

    A rollout is one trajectory, or has several parts: contexts that do not continue each other (after a compaction, of
    sub-agents, of a rewritten history). All parts of a rollout have the rollout's reward.

    tokens             i32[T]
    response_mask      bool[T]; True for tokens that the policy sampled, False for tokens of an environment
    behavior_logprobs  f32[T]; log-probability under the distribution that was sampled from; 0 where the mask is False
    version_spans      sorted by start, the first at 0
    reward             NaN until rewarded
    experts            [P + T, layers, experts per token] (messages/routing.py), including the prompt's tokens; empty if
                       the engine does not report them
    support            tokens that each was sampled from (messages/support.py); empty: the whole vocabulary
    likeliest          tokens at each place, under the behavior policy (SamplingParams.top_logprobs)
    resumed            number of tokens under the mask, from the first, that earlier attempts at the group sampled
    prompt_tokens      i32[P], the tokens before these; empty: the group's prompt
    rollout, part      index of the rollout in the group, and of this trajectory in the rollout, from 0; rollout -1: the
                       trajectory is a whole rollout, and its index in the group is the number of the rollout
    turn_rewards       rewards of single turns in addition to ``reward``, sorted by start
    teacher_logprobs   f32[T], what a served teacher gives each token, at temperature 1; empty without one
    images             all images of prompt and answer, in order; ``start`` counts from the prompt's first token
    teacher_likeliest  tokens at each place, under that teacher (teacher.top_logprobs)
    metadata           what the rollout function leaves for hooks and filters; anything that msgpack can carry
    """

    tokens: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    version_spans: tuple[VersionSpan, ...]
    reward: float = math.nan
    reward_parts: dict[str, float] = field(default_factory=dict)
    finish_reason: str = "stop"
    experts: ExpertArray = field(default_factory=lambda: NO_EXPERTS)
    support: Support = WHOLE
    resumed: int = 0
    prompt_tokens: NDArray[np.int32] = field(default_factory=lambda: _NO_PROMPT)
    rollout: int = _ALONE
    part: int = 0
    turn_rewards: tuple[TurnReward, ...] = ()
    teacher_logprobs: NDArray[np.float32] = field(default_factory=lambda: _NO_LOGPROBS)
    images: tuple[ImageRef, ...] = ()
    likeliest: Likeliest = NONE
    teacher_likeliest: Likeliest = NONE
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_array(self, "tokens", np.int32)
        check_array(self, "prompt_tokens", np.int32)
        check_array(self, "response_mask", np.bool_)
        check_array(self, "behavior_logprobs", np.float32)
        check_array(self, "teacher_logprobs", np.float32)
        length = len(self.tokens)
        require(length > 0, "a trajectory has no tokens")
        require(len(self.response_mask) == length, f"response_mask has {len(self.response_mask)} of {length} tokens")
        require(
            len(self.behavior_logprobs) == length,
            f"behavior_logprobs has {len(self.behavior_logprobs)} of {length} tokens",
        )
        require(bool(np.isfinite(self.behavior_logprobs).all()), "behavior_logprobs holds NaN or infinity")
        require(float(self.behavior_logprobs.max()) <= _POSITIVE_LOGPROB, "behavior_logprobs holds a value above 0")
        starts = [span.start for span in self.version_spans]
        require(
            bool(starts) and starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < length,
            f"version_spans must start at 0 and rise below {length}, got {starts}",
        )
        require(self.finish_reason in FINISH_REASONS, f"finish_reason {self.finish_reason!r} is unknown")
        check_experts(self.experts, num_tokens=length)
        check_support(self.support, num_tokens=length)
        check_likeliest(self.likeliest, num_tokens=length, name="likeliest")
        check_likeliest(self.teacher_likeliest, num_tokens=length, name="teacher_likeliest")
        sampled = int(np.count_nonzero(self.response_mask))
        require(0 <= self.resumed <= sampled, f"resumed is {self.resumed}, of {sampled} sampled tokens")
        require(_ALONE <= self.rollout < _MAX_GROUP, f"rollout must be >= 0 and < {_MAX_GROUP}, got {self.rollout}")
        require(self.part >= 0, f"part must be >= 0, got {self.part}")
        if len(self.teacher_logprobs):
            self._check_teacher(length)
        if self.images:
            check_images(self.images, num_tokens=2**31)  # a prompt of the group's is not known here
        if self.turn_rewards:
            turns = [turn.start for turn in self.turn_rewards]
            require(
                turns == sorted(set(turns)) and turns[-1] < length and bool(self.response_mask[turns].all()),
                f"turn_rewards must start at tokens that the policy sampled, and rise, got {turns}",
            )

    def _check_teacher(self, length: int) -> None:
        count = len(self.teacher_logprobs)
        require(count == length, f"teacher_logprobs has {count} of {length} tokens")
        require(bool(np.isfinite(self.teacher_logprobs).all()), "teacher_logprobs holds NaN or infinity")
        require(float(self.teacher_logprobs.max()) <= _POSITIVE_LOGPROB, "teacher_logprobs holds a value above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """All answers to one prompt, with rewards.  Topic ``trajectories``: rollout workers -> learner.

    trajectories    trajectories of all rollouts, sorted by (rollout, part); all parts of a rollout have the same reward
    error           why the group failed; a failed group has no trajectories, is counted, and frees its place in the
                    window
    seconds         time from the start of generation to the reward
    cancelled       missing rollouts: cut off so that the others could be trained (rollout.group_seconds), or
                    failed (rollout.min_group)
    failed_samples  number of ``cancelled`` rollouts that failed
    extra_samples   rollouts that were started in addition to the requested ones
    label           ``label_text`` of the prompt's label, for people who read the answers
    began           start of generation in Unix seconds of the worker's clock; 0 if unknown
    reward_seconds  the part of ``seconds`` that the reward took
    temperature     of the row, if it has one of its own; 0: rollout.temperature
    engine          name and version of the engine that sampled it, as "sglang 0.5.16"; empty if unknown
    image_files     by digest, the files of images that an environment showed; those of the data are not sent
    """

    group_id: int
    prompt_tokens: NDArray[np.int32]
    trajectories: tuple[Trajectory, ...]
    epoch: int = 0
    worker: str = ""
    seconds: float = 0.0
    error: str = ""
    cancelled: int = 0
    failed_samples: int = 0
    extra_samples: int = 0
    began: float = 0.0
    reward_seconds: float = 0.0
    label: str = ""
    temperature: float = 0.0
    engine: str = ""
    image_files: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_array(self, "prompt_tokens", np.int32)
        require(len(self.label) <= LONGEST_LABEL, f"a label has {len(self.label):,} characters")
        require(len(self.engine) <= _LONGEST_ENGINE and self.engine.isprintable(), "engine is no name of an engine")
        check_counts(self, "group_id", "epoch", "cancelled", "failed_samples", "extra_samples")
        require(
            self.failed_samples <= self.cancelled,
            f"failed_samples is {self.failed_samples}, of {self.cancelled} rollouts that are missing",
        )
        require(bool(self.trajectories) != bool(self.error), "a group has either trajectories or an error")
        require(0 <= self.temperature < math.inf, f"temperature must be >= 0, got {self.temperature}")
        if any(one.rollout != _ALONE or one.part for one in self.trajectories):
            self._check_rollouts()

    def _check_rollouts(self) -> None:
        places = [(one.rollout, one.part) for one in self.trajectories]
        require(places[0][0] != _ALONE, "a trajectory does not say which rollout it is a part of")
        require(
            all(before < after for before, after in zip(places, places[1:], strict=False)),
            f"trajectories must be sorted by rollout and part, without duplicates, got {places[:20]}",
        )
        for parts in self.rollouts:
            require(
                all(_same_reward(parts[0], other) for other in parts[1:]),
                f"rollout {parts[0].rollout} has different rewards in its parts",
            )

    @property
    def rollouts(self) -> tuple[tuple[Trajectory, ...], ...]:
        """The trajectories of each rollout, in order. All trajectories of a rollout have one reward."""
        if all(one.rollout == _ALONE for one in self.trajectories):
            return tuple((one,) for one in self.trajectories)
        return tuple(tuple(parts) for _, parts in itertools.groupby(self.trajectories, lambda one: one.rollout))

    @property
    def rewards(self) -> list[float]:
        """The reward of each rollout."""
        return [parts[0].reward for parts in self.rollouts]

    def prompt_of(self, trajectory: Trajectory) -> NDArray[np.int32]:
        """The tokens before one of the group's trajectories, i32[P]."""
        return trajectory.prompt_tokens if len(trajectory.prompt_tokens) else self.prompt_tokens


def _same_reward(one: Trajectory, other: Trajectory) -> bool:
    """Whether the rewards are equal. NaN stands for no reward and equals NaN."""
    if one.reward_parts.keys() != other.reward_parts.keys():
        return False
    pairs = [(one.reward, other.reward), *((one.reward_parts[n], other.reward_parts[n]) for n in one.reward_parts)]
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def label_text(label: Any) -> str:
    """The correct answer as readable text; "" if unknown. Half of a surrogate pair cannot be sent, and becomes "?"."""
    return "" if label is None else str(label)[:LONGEST_LABEL].encode(errors="replace").decode()


def failed_group(group_id: int, *, worker: str, error: str, prompt: PromptGroup | None = None) -> TrajectoryGroup:
    """Return a group that stands for one that could not be made or trained. ``error`` is cut to LONGEST_ERROR.

    Half of a surrogate pair in ``error`` is not valid text and cannot be sent, so it becomes "?".
    """
    return TrajectoryGroup(
        group_id=group_id,
        prompt_tokens=prompt.prompt_tokens if prompt is not None else np.zeros(0, np.int32),
        trajectories=(),
        epoch=prompt.epoch if prompt is not None else 0,
        worker=worker,
        label=label_text(prompt.label) if prompt is not None else "",
        error=error[:LONGEST_ERROR].encode(errors="replace").decode(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSegment:
    """Consecutive tokens of one call of ``generate``.

    index              index of the sample whose rollout function made the call
    prompt_digest      hash of the tokens that the call continues
    call               number of this call among the sample's calls that continue the same tokens, from 0
    start              number of tokens of the call before these
    tokens             i32[T]
    behavior_logprobs  f32[T]
    version_spans      as in a trajectory, counted from ``start``
    finish_reason      empty unless these are the last tokens of the call
    experts            experts of these tokens and some before them (messages/routing.py)
    support            of these tokens (messages/support.py)
    likeliest          at their places (messages/likeliest.py)
    """

    index: int
    call: int
    prompt_digest: bytes
    start: int
    tokens: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str = ""
    experts: ExpertArray = field(default_factory=lambda: NO_EXPERTS)
    support: Support = WHOLE
    likeliest: Likeliest = NONE

    def __post_init__(self) -> None:
        check_array(self, "tokens", np.int32)
        check_array(self, "behavior_logprobs", np.float32)
        for name in ("index", "call", "start"):
            require(getattr(self, name) >= 0, f"{name} must be >= 0, got {getattr(self, name)}")
        require(self.finish_reason in ("", *FINISH_REASONS), f"finish_reason {self.finish_reason!r} is unknown")
        Trajectory(  # the checks are the same
            tokens=self.tokens,
            response_mask=np.ones(len(self.tokens), np.bool_),
            behavior_logprobs=self.behavior_logprobs,
            version_spans=self.version_spans,
            experts=self.experts,
            support=self.support,
            likeliest=self.likeliest,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSegment:
    """What was sampled for an unfinished prompt group since its last segment.

    Topic ``segments``, key WORKER/GROUP/ATTEMPT/SEGMENT: rollout worker -> the worker that takes the prompt over.

    proof  shows that the writer received the group's prompt (actors/rollout/partial_rollouts.py); empty if prompts have
           no tickets
    """

    group_id: int
    worker: str
    calls: tuple[CallSegment, ...]
    proof: str = ""

    def __post_init__(self) -> None:
        require(len(self.proof) <= 64, "proof is longer than 64 digits")
