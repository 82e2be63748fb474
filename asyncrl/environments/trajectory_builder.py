"""Build the trajectory of a conversation between the model and an environment, turn by turn.

    turns = TrajectoryBuilder(prompt.prompt_tokens)
    question = turns.add_answer(await generate(turns.tokens, max_new_tokens=64))
    turns.add_observation(tokenizer.encode(result_of(question), add_special_tokens=False))
    turns.add_answer(await generate(turns.tokens, max_new_tokens=prompt.sampling.max_new_tokens - turns.num_tokens))
    return turns.trajectory()

The model's tokens are trained, with the logprobs and policy versions from sampling. The environment's tokens are masked
out.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation import Generation
from asyncrl.messages import Trajectory, TurnReward, VersionSpan, likeliest, replace
from asyncrl.messages.images import ImageRef
from asyncrl.messages.likeliest import NONE, Likeliest
from asyncrl.messages.routing import NO_EXPERTS, ExpertArray, join, keep_last, unrouted_rows
from asyncrl.messages.support import WHOLE, Support
from asyncrl.messages.support import join as join_supports


class TrajectoryBuilder:
    """Takes any number of turns in any order; at least one must be the model's.

    An observation takes the policy version of the answer before it, or of the first answer if it comes first. It never
    makes a trajectory older (tests/unit/environments/test_trajectory_builder.py,
    test_an_observation_has_no_version_of_its_own).
    """

    def __init__(self, prompt_tokens: NDArray[np.int32], *, images: Sequence[ImageRef] = ()) -> None:
        """
        prompt_tokens  tokens before the first turn, i32[P]: the group's prompt, or the context of another part
        images         images that they show, in order; of the group's prompt they need not be given, unless an
                       observation shows others
        """
        self._images = list(images)
        self._num_prompt_tokens = len(prompt_tokens)
        self._tokens = np.asarray(prompt_tokens, np.int32)
        self._logprobs = np.zeros(0, np.float32)
        self._mask = np.zeros(0, np.bool_)
        self._spans: list[VersionSpan] = []
        self._finish_reason = ""
        self._experts: ExpertArray = NO_EXPERTS
        self._supports: list[tuple[int, Support]] = []  # number of tokens of each turn, and its support
        self._likeliest: list[tuple[int, Likeliest]] = []
        self._turn_rewards: dict[int, float] = {}
        self._turn = -1  # start of the model's last turn

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The prompt and all turns so far, i32[P + T]: the input for ``generate``."""
        return self._tokens

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """The images that ``tokens`` show, for ``generate``."""
        return tuple(self._images)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all turns so far, without the prompt. Must stay within rollout.max_new_tokens."""
        return len(self._mask)

    def add_answer(self, answer: Generation) -> Generation:
        """Add a turn of the model, as ``generate`` returned it, and return it. Raises TypeError without ``await``."""
        given: object = answer
        if inspect.iscoroutine(given):
            given.close()  # else Python warns of it, too
            raise TypeError("add_answer() needs an answer, and generate() was not awaited: write `await generate(...)`")
        for span in answer.version_spans:
            start = self.num_tokens + span.start if self._spans else 0
            if not self._spans or _version(span) != _version(self._spans[-1]):
                self._spans.append(replace(span, start=start))
        self._experts = self._routed(answer)
        self._turn = self.num_tokens
        self._supports.append((len(answer.tokens), answer.support))
        self._likeliest.append((len(answer.tokens), answer.likeliest))
        self._append(answer.tokens, answer.logprobs, is_sampled=True)
        self._finish_reason = answer.finish_reason
        return answer

    def add_observation(self, token_ids: Sequence[int] | NDArray[np.int32], *, images: Sequence[ImageRef] = ()) -> None:
        """Add a turn of the environment, [T], possibly empty. Raises ValueError unless it is a flat list of ids.

        images  that it shows, as ``generate.images.show`` gives them
        """
        found = np.asarray(token_ids)
        if found.ndim != 1:
            raise ValueError(f"an observation must be a flat list of token ids, got shape {found.shape}")
        if len(found) and (found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= 2**31):
            raise ValueError(
                f"an observation must be a list of token ids, whole numbers >= 0, got {found[:8].tolist()}"
            )
        tokens = found.astype(np.int32)
        if len(self._experts):
            self._experts = np.concatenate([self._experts, unrouted_rows(len(tokens), like=self._experts)])
        self._images += images
        self._supports.append((len(tokens), WHOLE))
        self._likeliest.append((len(tokens), NONE))
        self._append(tokens, np.zeros(len(tokens), np.float32), is_sampled=False)

    def add_reward(self, reward: float) -> None:
        """Add to the reward of the model's last turn, separate from the rollout's reward. Repeated calls add up.

        Used by advantages that look at single turns, such as ``gae`` and ``turn_grpo``.
        Raises ValueError before the model's first turn.
        """
        if self._turn < 0:
            raise ValueError(
                "a turn's reward needs an answer of the model: pass what generate returned to add_answer()"
            )
        self._turn_rewards[self._turn] = self._turn_rewards.get(self._turn, 0.0) + reward

    def trajectory(
        self,
        *,
        reward: float = math.nan,
        reward_parts: Mapping[str, float] | None = None,
        finish_reason: str = "",
        metadata: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """Return the trajectory of all turns so far.

        reward         used if reward.kind is "none" (required there, or the group fails) or has a part of kind "none";
                       any other reward.kind replaces it
        reward_parts   each becomes the metric reward/NAME for every reward.kind; a part of the same name from the
                       reward function wins
        finish_reason  empty: that of the last answer; use "length" for a conversation that was cut off
        metadata       left for hooks and filters: texts, numbers, lists and tables

        Raises ValueError if no turn is the model's.
        """
        if not self._spans:
            raise ValueError("a trajectory needs an answer of the model: pass what generate returned to add_answer()")
        return Trajectory(
            tokens=self._tokens[self._num_prompt_tokens :],
            response_mask=self._mask,
            behavior_logprobs=self._logprobs,
            version_spans=tuple(self._spans),
            reward=reward,
            reward_parts=dict(reward_parts or {}),
            finish_reason=finish_reason or self._finish_reason,
            experts=self._experts,
            support=join_supports(self._supports),
            likeliest=likeliest.join(self._likeliest),
            prompt_tokens=self._tokens[: self._num_prompt_tokens],
            turn_rewards=tuple(TurnReward(start=at, reward=value) for at, value in self._turn_rewards.items()),
            images=self.images,
            metadata=dict(metadata or {}),
        )

    def _routed(self, answer: Generation) -> ExpertArray:
        """Return the experts of all turns including ``answer``.

        If ``generate`` was called with another context, keep only the experts of the answer's own tokens.
        """
        rows = len(self._tokens) + len(answer.tokens)
        told = keep_last(answer.experts, len(answer.tokens) if len(answer.experts) != rows else rows)
        found = join(self._experts, told, len(answer.tokens))
        return np.concatenate([unrouted_rows(rows - len(found), like=found), found]) if len(found) else found

    def _append(self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], *, is_sampled: bool) -> None:
        """Append by making new arrays, because callers may hold the old ones."""
        self._tokens = np.concatenate([self._tokens, tokens])
        self._logprobs = np.concatenate([self._logprobs, logprobs])
        self._mask = np.concatenate([self._mask, np.full(len(tokens), is_sampled)])


def _version(span: VersionSpan) -> tuple[int, int]:
    return (span.incarnation, span.policy_version)
