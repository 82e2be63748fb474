"""What users bring: "package.module:object" in the run file. Those that come along: rewards/, actors/rollouts.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.generation import Generation
from asyncrl.messages import PromptGroup, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a reward function sees of one trajectory.

    prompt      as it was tokenised, chat template included
    completion  all of the trajectory's tokens decoded, without special ones; those that an environment wrote too
    trajectory  its reward and reward_parts are what the rollout function set: NaN and none, mostly
    """

    prompt: str
    completion: str
    label: Any
    metadata: Mapping[str, Any]
    trajectory: Trajectory
    prompt_tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that asyncrl itself needs; rollout functions get the whole object."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str: ...


class RewardFn(Protocol):
    """Rewards one group. What it raises buries the group with the reason; it never ends the worker."""

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Reward]: ...

    async def close(self) -> None: ...


class Generate(Protocol):
    """Continues a token sequence with the group's sampling; bound to one sample of one group."""

    async def __call__(self, tokens: NDArray[np.int32], *, max_new_tokens: int | None = None) -> Generation:
        """The answer to ``tokens``, the prompt included. Call it once a turn; each call has a seed of its own.

        ``max_new_tokens``: instead of the group's, to keep a budget over several turns; None takes the group's. A
        trajectory longer than rollout.max_new_tokens in all may not fit into a message, and is buried then.
        """
        ...


class RolloutFn(Protocol):
    """One trajectory of one prompt. The default answers once; multi-turn and tools are other RolloutFns (turns.py).

    An ``async def`` function is called as it is. A class is made once a worker, with the worker's tokenizer (Hugging
    Face's), and with its module's ``Options``, if it has one, built from [rollout.options]; then it is called:

        def __init__(self, tokenizer)             def __init__(self, tokenizer, options)
        async def __call__(self, prompt, generate, *, index)

    What it raises buries the group with the reason; it never ends the worker.
    """

    async def __call__(self, prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        """``index``: which sample of the group this is, 0 to group_size - 1.

        It runs anew when its worker died, and must then ask ``generate`` the same, given the same answers: what comes
        by chance comes from a seed of group_id and index (actors/salvage.py). A reward that it sets in its trajectory
        stands with reward.kind = "none".
        """
        ...
