"""The contract of every bus for trajectory groups that are larger than one message."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.bus.port import Bus
from asyncrl.errors import BusFull, MessageTooLarge
from asyncrl.messages.codec import encode
from asyncrl.messages.pieces import InPieces, Piece, digest_of
from asyncrl.messages.topics import PIECES, TRAJECTORIES, Topic
from tests.harness.buses import first, group, publish_groups

pytestmark = pytest.mark.usefixtures("no_blocking")

LARGE = 300_000  # tokens of 9 bytes each; a message has room for 2**20 bytes
ROOM = 2**25
NAMES = Topic("trajectories", "log", InPieces)  # what a writer of pieces stores in place of the group


@pytest.fixture
async def bus(bus_factory: Any) -> Bus:
    """An empty bus of each kind, with room for a dozen large groups."""
    return await bus_factory(max_log_bytes=ROOM)


async def publish_in_pieces(bus: Bus, number: int, data: bytes, *, left_out: int = -1, longer: int = 0) -> None:
    """Publish as a bus does, but leave out the piece ``left_out``."""
    parts = [data[start : start + 100_000] for start in range(0, len(data), 100_000)]
    digests = [digest_of(part) for part in parts]
    for index, (part, digest) in enumerate(zip(parts, digests, strict=True)):
        if index != left_out:
            await bus.publish(PIECES, Piece(data=part), key=f"{number}/{digest.hex()}")
    await bus.publish(NAMES, InPieces(num_bytes=len(data) + longer, digests=b"".join(digests)), key=str(number))


def owners(keys: set[str]) -> set[str]:
    """Return the groups that own these pieces."""
    return {key.split("/")[0] for key in keys}


async def test_group_larger_than_a_message_arrives_whole(bus_factory: Any) -> None:
    bus, other = await bus_factory(max_log_bytes=ROOM), await bus_factory(max_log_bytes=ROOM)
    large = group(2, tokens=LARGE)
    await publish_groups(bus, 1)
    assert await bus.publish(TRAJECTORIES, large, key="2")
    await publish_groups(bus, 3)
    records = await first(other, 3)
    assert [record.message.group_id for record in records] == [1, 2, 3]
    assert encode(records[1].message) == encode(large)
    assert records[1].num_bytes == len(encode(large)) > bus.max_message_bytes
    assert await bus.depth(PIECES) == 3


async def test_a_small_group_takes_no_pieces(bus: Bus) -> None:
    await publish_groups(bus, 1)
    assert await bus.depth(PIECES) == 0


async def test_a_large_group_is_published_once(bus_factory: Any) -> None:
    bus, other = await bus_factory(max_log_bytes=ROOM), await bus_factory(max_log_bytes=ROOM)
    assert await bus.publish(TRAJECTORIES, group(1, tokens=LARGE), key="1")
    assert not await other.publish(TRAJECTORIES, group(1, tokens=LARGE), key="1")
    assert not await other.publish(TRAJECTORIES, group(1, tokens=LARGE + 1), key="1")
    (record,) = await first(bus, 1)
    assert len(record.message.trajectories[0].tokens) == LARGE


async def test_only_groups_over_the_users_limit_are_refused(bus_factory: Any) -> None:
    bus = await bus_factory(max_log_bytes=ROOM, max_group_bytes=2 * 2**20)
    with pytest.raises(MessageTooLarge, match=r"trajectories 1: .* bytes.*bus\.max_group_bytes.*group_size"):
        await bus.publish(TRAJECTORIES, group(1, tokens=LARGE), key="1")
    assert await bus.depth(TRAJECTORIES) == await bus.depth(PIECES) == 0


async def test_no_group_may_take_more_than_half_of_the_log(bus_factory: Any) -> None:
    bus = await bus_factory(max_log_bytes=5 * 2**20)
    with pytest.raises(MessageTooLarge, match=r"2,621,440 are allowed.*bus\.max_log_bytes"):
        await bus.publish(TRAJECTORIES, group(1, tokens=LARGE), key="1")


async def test_writer_continues_with_its_stored_pieces_after_a_full_log(bus_factory: Any) -> None:
    bus = await bus_factory(max_log_bytes=6 * 2**20)
    await bus.publish(TRAJECTORIES, group(1, tokens=LARGE), key="1")
    await bus.publish(TRAJECTORIES, group(2, tokens=LARGE), key="2")
    with pytest.raises(BusFull, match="pieces"):
        await bus.publish(TRAJECTORIES, group(3, tokens=LARGE), key="3")
    await bus.trim(TRAJECTORIES, through=1, is_over=lambda key: True)
    assert await bus.publish(TRAJECTORIES, group(3, tokens=LARGE), key="3")
    (record,) = await first(bus, 1, after=2)
    assert len(record.message.trajectories[0].tokens) == LARGE
    assert await bus.last_sequence(PIECES) == 9  # no piece is stored twice


async def test_trim_removes_the_pieces_of_its_entries(bus: Bus) -> None:
    for number in (1, 2):
        await bus.publish(TRAJECTORIES, group(number, tokens=LARGE), key=str(number))
    await bus.trim(TRAJECTORIES, through=1, is_over=lambda key: True)
    assert owners(await bus.keys(PIECES)) == {"2"}
    (record,) = await first(bus, 1)
    assert record.message.group_id == 2
    await bus.trim(TRAJECTORIES, through=2, is_over=lambda key: True)
    assert await bus.depth(PIECES) == 0


async def test_trim_removes_pieces_without_an_entry_once_their_group_is_over(bus: Bus) -> None:
    """A writer was killed before it referred to its pieces, and another worker answered the group."""
    for number in (1, 2):
        await bus.publish(PIECES, Piece(data=b"ab"), key=f"{number}/{digest_of(b'ab').hex()}")
    await bus.publish(TRAJECTORIES, group(3, tokens=LARGE), key="3-" + 32 * "a")
    await bus.trim(TRAJECTORIES, through=0, is_over=lambda key: key in ("1", "3"))
    assert owners(await bus.keys(PIECES)) == {"2", "3"}  # group 3 is in the log
    assert (await first(bus, 1))[0].message.group_id == 3


async def test_no_key_of_a_piece_holds_a_ticket(bus: Bus) -> None:
    """Every role sees the keys of every stream, and anyone with a ticket may answer."""
    await bus.publish(TRAJECTORIES, group(3, tokens=LARGE), key="3-" + 32 * "a")
    assert not any(32 * "a" in key for key in await bus.keys(PIECES))


async def test_a_group_whose_pieces_are_gone_does_not_decode(bus: Bus) -> None:
    data = encode(group(1, tokens=LARGE))
    await publish_in_pieces(bus, 1, data, left_out=4)
    await publish_groups(bus, 2)
    bad, good = await first(bus, 2)
    assert (bad.key, bad.message, bad.problem) == ("1", None, "pieces of it are not on the bus")
    assert good.message.group_id == 2


async def test_a_group_whose_pieces_are_damaged_does_not_decode(bus: Bus) -> None:
    digest = digest_of(b"what was published")
    await bus.publish(PIECES, Piece(data=b"another"), key=f"1/{digest.hex()}")
    await bus.publish(NAMES, InPieces(num_bytes=18, digests=digest), key="1")
    await publish_in_pieces(bus, 2, encode(group(2, tokens=LARGE)), longer=1)
    for bad, problem in zip(await first(bus, 2), ("piece 0 of it is damaged", "its pieces have 2,7"), strict=True):
        assert bad.message is None
        assert problem in bad.problem


async def test_pieces_of_another_message_do_not_decode(bus: Bus) -> None:
    await publish_in_pieces(bus, 1, encode(Piece(data=b"x")))
    (bad,) = await first(bus, 1)
    assert "not a TrajectoryGroup" in bad.problem


async def test_message_that_claims_to_be_too_large_is_not_joined(bus: Bus) -> None:
    await bus.publish(NAMES, InPieces(num_bytes=2**40, digests=32 * b"a"), key="1")
    (bad,) = await first(bus, 1)
    assert "1,099,511,627,776 bytes in pieces" in bad.problem


async def test_a_piece_is_never_overwritten(bus: Bus) -> None:
    await bus.publish(TRAJECTORIES, group(1, tokens=LARGE), key="1")
    key, *_ = sorted(await bus.keys(PIECES))
    assert not await bus.publish(PIECES, Piece(data=b"other"), key=key)
    assert (await first(bus, 1))[0].message.group_id == 1
