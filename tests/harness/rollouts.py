"""Inputs for tests of rollout and reward functions: prompts, a scripted model, samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl import config
from asyncrl.engines.generation import Generation
from asyncrl.environments.load import load_rollout
from asyncrl.environments.port import Generate, RolloutFn
from asyncrl.messages import PromptGroup, SamplingParams, VersionSpan
from asyncrl.rewards.port import Sample
from tests.harness import groups


def load(name: str, *, tokenizer: Any = None, **options: Any) -> RolloutFn:
    """Return the rollout function that a run file with this name and options loads."""
    return load_rollout(config.RolloutSection(function=name, options=options))(tokenizer)


def on_demo(demo: Path) -> list[str]:
    """Return overrides for the demo's model and prompts."""
    return [f"model.path={demo / 'model'}", f"data.path={demo / 'prompts.jsonl'}"]


def prompt_of(text: str, tokenizer: Any, *, label: Any, max_new_tokens: int) -> PromptGroup:
    return PromptGroup(
        group_id=0,
        prompt_tokens=np.array(tokenizer.encode(text), np.int32),
        group_size=1,
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        prompt=text,
        label=label,
    )


def saying(*texts: str, tokenizer: Any) -> Generate:
    """Return a model that says these texts one after the other, cut to its token limit."""
    left = list(texts)

    async def generate(tokens: NDArray[np.int32], *, max_new_tokens: int | None = None) -> Generation:
        said = np.array(tokenizer.encode(left.pop(0))[:max_new_tokens], np.int32)
        return Generation(
            tokens=said,
            logprobs=np.full(len(said), -1.0, np.float32),
            version_spans=(VersionSpan(start=0, incarnation=0, policy_version=0),),
            finish_reason="stop",
        )

    return generate


def sample_of(completion: str = "", *, label: Any = None, length: int = 1, reward: float = 0.0) -> Sample:
    return Sample(
        prompt="",
        completion=completion,
        label=label,
        metadata={},
        trajectory=groups.trajectory(length=length, reward=reward),
        prompt_tokens=np.zeros(1),
    )
