"""Answers from the data: which of their tokens are trained."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.environments.builtin import given
from asyncrl.errors import MessageError
from asyncrl.messages import PromptGroup, SamplingParams
from asyncrl.messages.codec import decode, encode


def prompt(*, mask: list[bool], most: int = 9) -> PromptGroup:
    return PromptGroup(
        group_id=0,
        prompt_tokens=np.array([1, 2], np.int32),
        group_size=1,
        sampling=SamplingParams(max_new_tokens=most),
        response_tokens=np.array([5, 6, 7, 8], np.int32),
        response_mask=np.array(mask, np.bool_),
    )


async def no_engine(*_: object, **__: object) -> None:
    raise AssertionError("nothing is generated")


@pytest.mark.parametrize(
    ("mask", "most", "expected"),
    [
        ([], 9, [True] * 4),
        ([True, False, False, True], 9, [True, False, False, True]),
        ([True, False, False, True], 3, [True, False, False]),
    ],
)
async def test_the_mask_of_the_data_is_the_mask_of_the_trajectory(
    mask: list[bool], most: int, expected: list[bool]
) -> None:
    sent = decode(encode(prompt(mask=mask, most=most)), PromptGroup)
    trajectory = await given(sent, no_engine, index=0)  # type: ignore[arg-type]
    assert trajectory.response_mask.tolist() == expected
    assert trajectory.finish_reason == ("stop" if most == 9 else "length")


def test_a_mask_of_another_length_is_no_message() -> None:
    with pytest.raises(MessageError, match="response_mask has 2 of 4 tokens"):
        prompt(mask=[True, False])
