"""A process puts its states again if the bus lost them, without delaying the states that it puts at the same time."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.bus.kept_states import KeptStates
from asyncrl.messages import replace
from asyncrl.messages.codec import encode
from asyncrl.messages.signing import UNSIGNED, Signatures, SigningKey
from asyncrl.messages.topics import PROGRESS
from tests.harness.buses import progress


class Kept:
    """The states of a process, and the one place where the bus stores them."""

    def __init__(self) -> None:
        self.signatures = Signatures(run="r", own=SigningKey(b"k" * 32), life=1)
        self.states = KeptStates(self.signatures)
        self.there: bytes | None = None

    async def put(self, text: bytes) -> None:
        data = self.signatures.seal(PROGRESS, "", text)

        async def store() -> None:
            self.there = data

        await self.states.put(PROGRESS, "", data, store)

    async def read(self, *_: Any) -> bytes | None:
        return self.there

    async def store(self, topic: Any, key: str, data: bytes) -> None:
        self.there = data


@pytest.fixture
def kept() -> Kept:
    made = Kept()
    made.signatures.learner = SigningKey(b"k" * 32).public
    return made


async def test_what_is_gone_or_is_an_older_one_is_put_again(kept: Kept) -> None:
    await kept.put(b"1")
    older = kept.there
    await kept.put(b"2")
    newest = kept.there
    assert await kept.states.restore(kept.read, kept.store) == []
    for lost in (None, older):
        kept.there = lost
        assert await kept.states.restore(kept.read, kept.store) == ["progress"]
        assert kept.there == newest


async def test_who_puts_a_newer_one_does_not_wait_for_a_look_and_the_older_is_not_put_again(kept: Kept) -> None:
    await kept.put(b"1")

    async def read(*_: Any) -> bytes | None:
        await kept.put(b"2")  # a put while the read is running
        return None

    assert await kept.states.restore(read, kept.store) == []
    assert kept.there is not None and kept.there.endswith(b"2")


@pytest.mark.parametrize(
    ("there", "is_left"),
    [
        (b"no message", False),
        (encode(progress(1)), False),
        (encode(replace(progress(1), incarnation=2)), True),
    ],
    ids=["not readable", "of an older step", "of a newer learner"],
)
async def test_without_signatures_only_a_newer_incarnation_may_stand_where_we_put_ours(
    there: bytes, is_left: bool
) -> None:
    kept = Kept()
    kept.states = KeptStates(UNSIGNED)

    async def store() -> None: ...

    ours = encode(replace(progress(5), incarnation=1))
    await kept.states.put(PROGRESS, "", ours, store)
    for kept.there in (ours, there):
        left = is_left or kept.there == ours
        assert await kept.states.restore(kept.read, kept.store) == ([] if left else ["progress"])
    assert kept.there == (there if is_left else ours)
