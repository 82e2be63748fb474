"""The trajectory of a conversation between the model and an environment, put together turn by turn.

    turns = Turns(prompt.prompt_tokens)
    question = turns.answered(await generate(turns.tokens, max_new_tokens=64))
    turns.observed(tokenizer.encode(result_of(question), add_special_tokens=False))
    turns.answered(await generate(turns.tokens, max_new_tokens=prompt.sampling.max_new_tokens - turns.num_tokens))
    return turns.trajectory()

What the model said is trained, with the logprobs and versions it was sampled with; what the environment said is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.generation import Generation
from asyncrl.messages import Trajectory, VersionSpan, replace


class Turns:
    """Turns in any order and number, one of them the model's.

    An observation belongs to the version that sampled what is before it, before the first answer to that answer's: it
    makes no trajectory older (tests/test_turns.py, test_an_observation_has_no_version_of_its_own).
    """

    def __init__(self, prompt_tokens: NDArray[np.int32]) -> None:
        self._num_prompt_tokens = len(prompt_tokens)
        self._tokens = np.asarray(prompt_tokens, np.int32)
        self._logprobs = np.zeros(0, np.float32)
        self._mask = np.zeros(0, np.bool_)
        self._spans: list[VersionSpan] = []
        self._finish_reason = ""

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The prompt and all turns so far, i32[P + T]: what to ask ``generate`` to continue."""
        return self._tokens

    @property
    def num_tokens(self) -> int:
        """Of all turns so far, without the prompt: T, which must stay within rollout.max_new_tokens."""
        return len(self._mask)

    def answered(self, answer: Generation) -> Generation:
        """The model's turn, as ``generate`` gave it. Gives it back."""
        for span in answer.version_spans:
            start = self.num_tokens + span.start if self._spans else 0
            if not self._spans or _version(span) != _version(self._spans[-1]):
                self._spans.append(replace(span, start=start))
        self._append(answer.tokens, answer.logprobs, is_sampled=True)
        self._finish_reason = answer.finish_reason
        return answer

    def observed(self, token_ids: Sequence[int] | NDArray[np.int32]) -> None:
        """The environment's turn, [T]; it may be empty. Raises ValueError when it is no flat list of token ids."""
        tokens = np.asarray(token_ids, np.int32)
        if tokens.ndim != 1:
            raise ValueError(f"an observation must be a flat list of token ids, got shape {tokens.shape}")
        self._append(tokens, np.zeros(len(tokens), np.float32), is_sampled=False)

    def trajectory(
        self, *, reward: float = math.nan, reward_parts: Mapping[str, float] | None = None, finish_reason: str = ""
    ) -> Trajectory:
        """All turns so far.

        reward         stands with reward.kind = "none"; any other kind's replaces it, and its parts
        finish_reason  empty takes the last answer's; "length" is for a conversation that was cut off

        Raises ValueError when there is no answer of the model in it.
        """
        if not self._spans:
            raise ValueError("a trajectory needs an answer of the model: give answered() what generate gave")
        return Trajectory(
            tokens=self._tokens[self._num_prompt_tokens :],
            response_mask=self._mask,
            behavior_logprobs=self._logprobs,
            version_spans=tuple(self._spans),
            reward=reward,
            reward_parts=dict(reward_parts or {}),
            finish_reason=finish_reason or self._finish_reason,
        )

    def _append(self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], *, is_sampled: bool) -> None:
        """Makes new arrays: who was given the old ones keeps them as they were."""
        self._tokens = np.concatenate([self._tokens, tokens])
        self._logprobs = np.concatenate([self._logprobs, logprobs])
        self._mask = np.concatenate([self._mask, np.full(len(tokens), is_sampled)])


def _version(span: VersionSpan) -> tuple[int, int]:
    return (span.run_epoch, span.policy_version)
