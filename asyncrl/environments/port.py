"""The port of rollout functions, "package.module:object" in the run file. Built-in: builtin.py, agent/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation import Generation
from asyncrl.images.store import ImageFile
from asyncrl.messages import PromptGroup, Trajectory
from asyncrl.messages.control import ServerAddress
from asyncrl.messages.images import ImageRef


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that asyncrl itself needs; rollout functions get the complete object."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str: ...


class Images(Protocol):
    """The images that a sample may show: those of its prompt, and those of its environment."""

    @property
    def prompt(self) -> tuple[ImageRef, ...]:
        """The images of the group's prompt, in order."""
        ...

    async def files(self, images: Sequence[ImageRef]) -> Sequence[ImageFile]:
        """Return images of this sample with their files. Raises PromptError, or EngineError while the bus is away."""
        ...

    def place(
        self, tokens: NDArray[np.int32] | Sequence[int], files: Sequence[bytes], *, start: int = 0
    ) -> tuple[NDArray[np.int32], tuple[ImageRef, ...]]:
        """As ``show``; blocks while images are decoded, for a thread of its own."""
        ...

    async def show(
        self, tokens: NDArray[np.int32] | Sequence[int], files: Sequence[bytes], *, start: int = 0
    ) -> tuple[NDArray[np.int32], tuple[ImageRef, ...]]:
        """Return tokens that have the model's placeholder once for each image with as many as the image has, i32[T],
        and where the images are.

        files  the images' files, PNG, JPEG and the like;  start: number of tokens before these in the context

        Raises ImageError for a file that is no image, is too large, or has no place.
        """
        ...


class Generate(Protocol):
    """Continues a token sequence with the group's sampling; bound to one sample of one group."""

    @property
    def context_tokens(self) -> int:
        """Tokens that the engine takes in one call, prompt and answer together; at most the model's context."""
        ...

    @property
    def servers(self) -> Mapping[str, ServerAddress]:
        """Address of each server of [servers] by name, as in Sample (rewards/port.py)."""
        ...

    @property
    def attempt(self) -> int:
        """How often the group was begun, including this time. Above 1, an earlier worker returned it or died."""
        ...

    @property
    def images(self) -> Images | None:
        """The images of this sample; None for a model that reads text alone."""
        ...

    async def __call__(
        self,
        tokens: NDArray[np.int32],
        *,
        max_new_tokens: int | None = None,
        images: Sequence[ImageRef] | None = None,
    ) -> Generation:
        """Return the answer to ``tokens``, which include the prompt. Call it once per turn; each call has its own seed.

        ``max_new_tokens`` overrides the group's, for example to keep a budget over several turns. A trajectory with
        more than rollout.max_new_tokens in total may not fit into a message; then its group fails.

        ``images`` are all that ``tokens`` show, in order; None: those of the group's prompt, with which ``tokens``
        begin.
        """
        ...


class RolloutFn(Protocol):
    """Makes one rollout of one prompt: a trajectory, or several. The default generates one answer; multi-turn and tool
    use are other RolloutFns (trajectory_builder.py).

    Several trajectories are the parts of one rollout, for contexts that do not continue each other: after a compaction,
    of sub-agents, or of a rewritten history. Each part sets its ``prompt_tokens``; every sampled token belongs to
    exactly one part. The rollout's reward applies to all its parts; reward functions look at the last part. The worker
    numbers ``rollout`` and ``part``.

    An ``async def`` function is used directly. A class is constructed once per worker, with the worker's Hugging Face
    tokenizer and, if its module has an ``Options``, with options from [rollout.options]; its instance is then called:

        def __init__(self, tokenizer)             def __init__(self, tokenizer, options)
        async def __call__(self, prompt, generate, *, index)

    If it raises, the group fails with the reason; the worker continues.

    Optional attributes of the function or class inform the checks of the run file:

        samples = False     it calls no engine: its answers come from the data, not from a policy
        gives_one = True    it always returns one trajectory, after the group's prompt, within rollout.max_new_tokens
        makes_groups = True it makes all samples of a group in one call (whole_group.py)
        has_harness = True  its samples have their own time limit: a worker that waits for one is not restarted for it
    """

    async def __call__(
        self, prompt: PromptGroup, generate: Generate, *, index: int
    ) -> Trajectory | Sequence[Trajectory]:
        """Make sample number ``index`` of its group, 0 to group_size - 1.

        It runs again if its worker dies. It must then call ``generate`` with the same arguments if it gets the same
        answers, though the order of calls may differ: seed any randomness with group_id and index
        (actors/rollout/partial_rollouts.py). With reward.kind = "none" the rollout must have a reward: on one of its
        parts, or the same on all of them.
        """
        ...
