"""The RolloutFns that come with asyncrl: one answer of the model, or the one in the data."""

from __future__ import annotations

import numpy as np

from asyncrl.messages import ANY_EPOCH, PromptGroup, Trajectory, VersionSpan
from asyncrl.protocols import Generate
from asyncrl.turns import Turns


async def single_turn(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
    """The default RolloutFn: the model answers once, and every token of the answer is trained."""
    turns = Turns(prompt.prompt_tokens)
    turns.answered(await generate(turns.tokens))
    return turns.trajectory()


async def given(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
    """The RolloutFn of supervised fine-tuning: the answer in the data, cut to max_new_tokens; nothing is generated.

    No policy sampled it, so its behavior logprobs are 0 and mean nothing: the loss must be a supervised one. Its
    version is the one that the learner was at when the prompt was published, whatever run epoch trains it.
    """
    tokens = prompt.response_tokens[: prompt.sampling.max_new_tokens]
    if len(tokens) == 0:
        raise ValueError("the prompt has no response; set data.response_key")
    return Trajectory(
        tokens=tokens,
        response_mask=np.ones(len(tokens), np.bool_),
        behavior_logprobs=np.zeros(len(tokens), np.float32),
        version_spans=(VersionSpan(start=0, run_epoch=ANY_EPOCH, policy_version=prompt.policy_version),),
        finish_reason="stop" if len(tokens) == len(prompt.response_tokens) else "length",
    )
