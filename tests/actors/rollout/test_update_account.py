"""Each weight load accounts for the tokens of the answers in progress: carried, lost or sampled again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncrl.actors.rollout.update_account import UpdateAccount
from asyncrl.bus.port import Bus
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.errors import EngineError
from asyncrl.messages import VersionSpan
from tests.harness.partial_rollouts import Worker, publish_prompt


def generation(tokens: list[int], *, finish_reason: str = "stop") -> Generation:
    return Generation(
        tokens=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=0),) if tokens else (),
        finish_reason=finish_reason,
    )


class Growing:
    """An engine's view of a generation in progress."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def so_far(self, begin: int = 0) -> Generation:
        return generation(self.tokens[begin:], finish_reason="")


def after_load(at_load: list[int], in_the_end: list[int]) -> dict[str, float]:
    account, partial = UpdateAccount(), PartialGeneration()
    partial.follow(Growing(*at_load))
    with account.following(partial) as ended:
        with account.load():
            pass
        ended.append(generation(in_the_end))
    return {name.removeprefix("weights/"): value for name, value in account.numbers().items()}


def test_an_answer_that_goes_on_after_a_load_has_lost_and_repeated_nothing() -> None:
    """The newest token is not counted, because only the engine knows whether it counts."""
    assert after_load([5, 6, 7, 8], [5, 6, 7, 9, 9]) == {"carried_tokens": 3, "lost_tokens": 0, "resampled_tokens": 0}


def test_tokens_that_an_answer_lacks_after_a_load_are_lost() -> None:
    assert after_load([5, 6, 7, 8], [5]) == {"carried_tokens": 3, "lost_tokens": 2, "resampled_tokens": 0}


def test_tokens_that_are_others_after_a_load_were_sampled_twice() -> None:
    assert after_load([5, 6, 7, 8], [5, 4, 4, 9]) == {"carried_tokens": 3, "lost_tokens": 0, "resampled_tokens": 2}


def test_what_an_engine_had_that_fails_in_a_load_is_lost() -> None:
    account, partial = UpdateAccount(), PartialGeneration()
    partial.follow(Growing(5, 6, 7))
    with pytest.raises(EngineError), account.load(), account.following(partial):
        raise EngineError("not of a load that began before it")
    assert account.lost == 0
    with pytest.raises(EngineError), account.following(partial), account.load():
        raise EngineError("the load has ended")
    assert account.lost == 0
    load: Any = account.load()
    with pytest.raises(EngineError), account.following(partial):
        load.__enter__()
        raise EngineError("in the load")
    assert account.lost == 2


async def test_a_worker_counts_each_answer_that_a_load_went_through(bus: Bus) -> None:
    await publish_prompt(bus, 0)
    worker = Worker(bus, "w0")
    async with worker.working() as working:
        await working.begun(2)
        await worker.engine.steps(21)
        with working.follower.account.load():
            pass
        await working.until_published(bus, 1)
        numbers = working.follower.account.numbers()
    assert numbers == {"weights/carried_tokens": 40, "weights/lost_tokens": 0, "weights/resampled_tokens": 0}
