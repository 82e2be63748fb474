"""A function that makes all samples of a group in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.environments.whole_group import WholeGroup
from asyncrl.messages import PromptGroup, SamplingParams


class Generate:
    """Only what tells calls apart."""

    attempt, context_tokens = 1, 8

    def __init__(self, number: int) -> None:
        self.number = number


def prompt(group_id: int, size: int = 3) -> PromptGroup:
    return PromptGroup(
        group_id=group_id,
        prompt_tokens=[1],  # type: ignore[arg-type]
        group_size=size,
        sampling=SamplingParams(max_new_tokens=4),
    )


def of(function: Any) -> WholeGroup:
    return WholeGroup(function)


async def play(made: WholeGroup, group_id: int, order: Sequence[int] = (0, 1, 2)) -> list[Any]:
    calls = [made(prompt(group_id), Generate(10 * group_id + index), index=index) for index in order]  # type: ignore[arg-type]
    return await asyncio.gather(*calls, return_exceptions=True)


async def test_each_sample_gets_its_part_of_one_call_and_groups_may_wait_for_each_other() -> None:
    both, calls = asyncio.Barrier(2), list[list[int]]()

    async def together(prompt: PromptGroup, generates: Sequence[Any]) -> list[str]:
        calls.append([one.number for one in generates])
        await both.wait()
        return [f"{prompt.group_id}.{one.number}" for one in generates]

    made = of(together)
    first, second = await asyncio.gather(play(made, 1, (2, 0, 1)), play(made, 2))
    assert (first, second) == (["1.12", "1.10", "1.11"], ["2.20", "2.21", "2.22"])
    assert sorted(calls) == [[10, 11, 12], [20, 21, 22]]
    assert made._joining == {}


@pytest.mark.parametrize("returned", [None, ["only one"], "abc"])
async def test_every_sample_fails_with_what_was_wrong_and_may_run_again(returned: Any) -> None:
    tries = list[int]()

    async def wrong(prompt: PromptGroup, generates: Sequence[Any]) -> Any:
        tries.append(1)
        if len(tries) == 1 and returned is None:
            raise OSError("away")
        return returned if len(tries) == 1 else ["a", "b", "c"]

    made = of(wrong)
    assert {type(error) for error in await play(made, 1)} == {OSError if returned is None else ValueError}
    assert await play(made, 1) == ["a", "b", "c"]


async def test_a_cancelled_group_leaves_nothing_behind() -> None:
    made = of(None)
    waiting = [asyncio.create_task(made(prompt(1), Generate(n), index=n)) for n in range(2)]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert made._joining == {}
