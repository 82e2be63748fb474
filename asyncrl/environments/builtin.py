"""The built-in RolloutFns: one model answer, the answer from the data, or none."""

from __future__ import annotations

import asyncio

import numpy as np

from asyncrl.environments.load import describe_rollout
from asyncrl.environments.port import Generate
from asyncrl.environments.trajectory_builder import TrajectoryBuilder
from asyncrl.messages import ANY_INCARNATION, PromptGroup, Trajectory, VersionSpan

UNJUDGED = 0.0
"""Placeholder reward of a built-in function's trajectory, until a reward function sets it."""


@describe_rollout(gives_one=True)
async def single_turn(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
    """Sample one answer and train all of its tokens. The default RolloutFn."""
    turns = TrajectoryBuilder(prompt.prompt_tokens)
    turns.add_answer(await generate(turns.tokens))
    return turns.trajectory(reward=UNJUDGED)


@describe_rollout(gives_one=True)
async def idle(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
    """Hold every sample until the run is stopped: its engines start, and stay idle for whoever asks them by hand."""
    await asyncio.Event().wait()
    raise AssertionError


vars(idle)["has_harness"] = True  # a worker that waits for it is not restarted


@describe_rollout(samples=False, gives_one=True)
async def given(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
    """Return the answer from the data, or the rest of a conversation, cut to max_new_tokens. Generates nothing.

    This is the RolloutFn of supervised fine-tuning. No policy sampled the answer, so its behavior logprobs are 0 and
    meaningless, and the loss must be a supervised one. Its policy version is the learner's version when the prompt was
    published. It has no incarnation of its own, so it does not age when a learner falls back.
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
