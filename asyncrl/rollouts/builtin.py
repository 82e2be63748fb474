"""The built-in RolloutFns: one answer of the model, or the answer in the data."""

from __future__ import annotations

import numpy as np

from asyncrl.messages import ANY_INCARNATION, PromptGroup, Trajectory, VersionSpan
from asyncrl.protocols import Generate
from asyncrl.rollouts.load import described
from asyncrl.rollouts.trajectory_builder import TrajectoryBuilder

UNJUDGED = 0.0
"""What the reward of a built-in function's trajectory is until a reward function sets it."""


@described(gives_one=True)
async def single_turn(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
    """The default RolloutFn: the model answers once, and every token of the answer is trained."""
    turns = TrajectoryBuilder(prompt.prompt_tokens)
    turns.answered(await generate(turns.tokens))
    return turns.trajectory(reward=UNJUDGED)


@described(samples=False, gives_one=True)
async def given(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
    """The RolloutFn of supervised fine-tuning: the answer in the data, or the rest of a conversation, cut to
    max_new_tokens. Generates nothing.

    No policy sampled the answer: its behavior logprobs are 0 and mean nothing, so the loss must be a supervised one.
    Its version is the learner's when the prompt was published, in whichever incarnation it is trained.
    """
    tokens = prompt.response_tokens[: prompt.sampling.max_new_tokens]
    if len(tokens) == 0:
        raise ValueError("the prompt has no response; set data.response_key")
    mask = prompt.response_mask[: len(tokens)] if len(prompt.response_mask) else np.ones(len(tokens), np.bool_)
    return Trajectory(
        tokens=tokens,
        response_mask=mask,
        behavior_logprobs=np.zeros(len(tokens), np.float32),
        version_spans=(VersionSpan(start=0, incarnation=ANY_INCARNATION, policy_version=prompt.policy_version),),
        reward=UNJUDGED,
        finish_reason="stop" if len(tokens) == len(prompt.response_tokens) else "length",
    )
