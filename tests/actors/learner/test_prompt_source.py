"""What a resumed prompt source makes of the prompts of its checkpoint."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from asyncrl.actors.learner.prompt_source import PromptSource
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.data.prompts import PromptRow
from asyncrl.errors import HopelessError
from asyncrl.messages import SamplingParams
from asyncrl.policies.groups import saved_table
from asyncrl.policies.groups.saved import LearnerState, PromptState
from asyncrl.policies.staleness.admission import Admission
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES


async def test_resume_ends_with_the_remedy_if_a_prompt_is_too_long_by_now() -> None:
    """It was not when it was published: the limits of the run file, or what the engine takes, have changed."""

    class Rows:
        def at(self, position: int) -> PromptRow:
            return PromptRow(epoch=0, prompt="long", tokens=np.array([], np.int32))

    fresh = LearnerState.fresh()
    state = dataclasses.replace(
        fresh, incarnation=1, prompts=PromptState(next_group_id=4, position=4, outstanding={3: 2})
    )
    source = PromptSource(
        *("prompts", MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)),
        rows=Rows(),  # type: ignore[arg-type]
        admission=Admission(mode="async", groups_per_batch=4, max_staleness=1, total_groups=100),
        sampling=SamplingParams(max_new_tokens=4),
        group_size=2,
        table=saved_table.restore(state),
    )
    with pytest.raises(HopelessError, match="row 2 of group 3 is longer than prompts may be now; resume with"):
        await asyncio.wait_for(source.run(), 60)
