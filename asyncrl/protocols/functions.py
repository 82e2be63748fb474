"""User-supplied functions, "package.module:object" in the run file. Built-in ones: rewards/, rollouts/builtin.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import PromptGroup, Trajectory
from asyncrl.policies.trust.validation import MOST_PARTS as MOST_PARTS
from asyncrl.policies.trust.validation import part_problem as part_problem
from asyncrl.protocols.generation import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A reward function's view of one rollout.

    prompt      as tokenised, chat template included
    completion  all the trajectory's tokens decoded, without special tokens; includes what an environment wrote
    dataset     name of the evaluation's data set; in training of the file that the row is of, where there are several
    reward      name of the row's own reward (data.reward_key); empty: reward.kind
    trajectory  its reward and reward_parts are those set by the rollout function; NaN and empty if it set none. Of a
                rollout that has several parts, the last one
    parts       all trajectories of the rollout, in order
    """

    prompt: str
    completion: str
    label: Any
    metadata: Mapping[str, Any]
    trajectory: Trajectory
    prompt_tokens: NDArray[np.int32]
    dataset: str = ""
    reward: str = ""
    parts: tuple[Trajectory, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """At most MOST_PARTS parts, with names as ``part_problem`` wants them: each is the metric reward/NAME."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


class DataSource(Protocol):
    """data.source: rows of the user's own. Made once in the learner's process, with the class's ``Options`` if it has
    one, from [data.options].

        def __init__(self)              or  def __init__(self, options)
        def at(self, position)

    Nothing of it is saved: a run that is resumed goes on at the position after the last row that it took, and may ask
    again for earlier ones whose prompts were lost.
    """

    def at(self, position: int) -> Mapping[str, Any] | None:
        """Row ``position``, from 0: a table with the columns that [data] names. The same row for the same position in
        every process, or the groups of a resumed run are refused. None: the data has ended before it."""
        ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that asyncrl itself needs; rollout functions get the whole object."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str: ...


class RewardFn(Protocol):
    """Rewards one group. If it raises, the group fails with the reason; it never ends the worker."""

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Reward]: ...

    async def close(self) -> None: ...


class Generate(Protocol):
    """Continues a token sequence with the group's sampling; bound to one sample of one group."""

    @property
    def context_tokens(self) -> int:
        """That fit into the engine's model, prompt and answer together."""
        ...

    @property
    def attempt(self) -> int:
        """How often the group was begun, this time included: above 1 another worker left it, or died."""
        ...

    async def __call__(self, tokens: NDArray[np.int32], *, max_new_tokens: int | None = None) -> Generation:
        """The answer to ``tokens``, which include the prompt. Call it once a turn; each call has its own seed.

        ``max_new_tokens``: overrides the group's, for example to keep a budget over several turns. A trajectory with
        more than rollout.max_new_tokens in all may not fit into a message; then its group fails.
        """
        ...


class RolloutFn(Protocol):
    """Makes one rollout of one prompt: a trajectory, or several. The default generates one answer; multi-turn and tool
    use are other RolloutFns (trajectory_builder.py).

    Several trajectories are the parts of one rollout, for contexts that do not continue each other: after a compaction,
    of sub-agents, of a rewritten history. Each says its ``prompt_tokens``; every sampled token belongs into one part
    only. The rollout's reward is that of all its parts, and its last part is the one that reward functions look at.
    ``rollout`` and ``part`` are numbered by the worker.

    An ``async def`` function is used directly. A class is constructed once per worker, with the worker's Hugging Face
    tokenizer and, if its module has an ``Options``, with those from [rollout.options]; its instance is then called:

        def __init__(self, tokenizer)             def __init__(self, tokenizer, options)
        async def __call__(self, prompt, generate, *, index)

    If it raises, the group fails with the reason; it never ends the worker.

    Attributes of the function or class, where it has them, tell the checks of the run file more:

        samples = False     it calls no engine: its answers come from the data, and no policy sampled them
        gives_one = True    always one trajectory, behind the group's prompt, of at most rollout.max_new_tokens
        runs_programs = True  its options say which: a machine that joins takes them from its own command only
        has_harness = True  its samples end in time by themselves: a worker that waits for one is not restarted for it
    """

    async def __call__(
        self, prompt: PromptGroup, generate: Generate, *, index: int
    ) -> Trajectory | Sequence[Trajectory]:
        """``index``: number of this sample in its group, 0 to group_size - 1.

        It runs again if its worker dies, and must then call ``generate`` with the same arguments, given the same
        answers, if perhaps in another order: seed any randomness with group_id and index
        (actors/rollout/partial_rollouts.py). With reward.kind = "none" a trajectory must have a
        reward: one of the parts, or all of them the same.
        """
        ...
