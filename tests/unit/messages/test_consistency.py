"""Messages validate themselves when they are created."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import MessageError
from asyncrl.messages import (
    Event,
    VersionSpan,
    Wait,
    replace,
)
from tests.unit.messages.test_messages import SPANS, TRAJECTORY


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": [], "response_mask": [], "behavior_logprobs": []}, "no tokens"),
        ({"response_mask": [True]}, "response_mask has 1 of 3"),
        ({"behavior_logprobs": [-1.0]}, "behavior_logprobs has 1 of 3"),
        ({"behavior_logprobs": [-1.0, math.nan, 0.0]}, "NaN"),
        ({"behavior_logprobs": [-1.0, -math.inf, 0.0]}, "infinity"),
        ({"behavior_logprobs": [-1.0, 0.5, 0.0]}, "above 0"),
        ({"version_spans": ()}, "version_spans"),
        ({"version_spans": (VersionSpan(start=1, incarnation=0, policy_version=0),)}, "start at 0"),
        ({"version_spans": (SPANS[0], VersionSpan(start=3, incarnation=0, policy_version=9))}, "below 3"),
        ({"version_spans": (SPANS[0], SPANS[0])}, "rise"),
        ({"finish_reason": "tired"}, "tired"),
        ({"tokens": np.zeros(3, np.int64)}, "tokens must have one dimension of int32"),
        ({"tokens": np.zeros((3, 1), np.int32)}, "one dimension"),
    ],
)
def test_a_trajectory_that_contradicts_itself_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MessageError, match=words):
        replace(TRAJECTORY, **changes)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, 1e308, -1e308])
def test_implausible_seconds_are_refused(seconds: float) -> None:
    """Computing with such seconds or showing them would give numbers that JSON or a viewer cannot represent."""
    for make in (
        lambda: Event(kind="joined", actor="w0", time=seconds),
        lambda: Wait(what="prompts", seconds=seconds),
        lambda: Wait(what="prompts", usual=seconds),
        lambda: Wait(what="prompts", limit=seconds),
    ):
        with pytest.raises(MessageError, match="must be seconds"):
            make()
