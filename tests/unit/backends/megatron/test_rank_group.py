"""How ranks find each other, what they tell each other, and that all of them end when one does."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from asyncrl.backends.megatron.rank_group import (
    COMMAND,
    PART,
    RESULT,
    Hello,
    RankGroup,
    RankInfo,
    address_towards,
    open_store,
    rank_environments,
    rank_from_environment,
)
from asyncrl.backends.megatron.remote_parts import ExportedParts, RemotePart
from asyncrl.errors import BackendError, ConfigError, WeightsError
from asyncrl.messages import codec
from asyncrl.tensors.snapshot import PartWorker, Snapshot
from tests.harness.ports import free_ports
from tests.harness.ranks import Ends


def info(rank: int, port: int, **settings: Any) -> RankInfo:
    return RankInfo(
        **({"rank": rank, "ranks": 2, "host": "127.0.0.1", "port": port, "timeout_seconds": 60.0} | settings)
    )


def join(one: RankInfo, settings: Mapping[str, str] | None = None, **others: Any) -> RankGroup:
    return RankGroup(open_store(one), one, settings=settings, **others)


def joined(ends: Callable[[int], object] = Ends()) -> tuple[RankGroup, RankGroup]:  # noqa: B008
    port = free_ports(1)[0]
    with ThreadPoolExecutor() as threads:
        other = threads.submit(join, info(1, port), end=Ends())
        return join(info(0, port), end=ends), other.result()


def close(*groups: RankGroup, awaited: tuple[int, ...] = (COMMAND, PART)) -> None:
    with ThreadPoolExecutor() as threads:
        goodbyes = [threads.submit(groups[1].receive, 0, kind) for kind in awaited]
        for group in groups:
            threads.submit(group.close)
        assert [goodbye.result() for goodbye in goodbyes] == [b""] * len(awaited)


def test_messages_of_any_size_arrive_whole_and_a_goodbye_is_empty() -> None:
    first, second = joined()
    with ThreadPoolExecutor() as threads:
        for data in (b"step", b"", bytes(range(256)) * 10_000):
            sending = threads.submit(first.send, data, 1, COMMAND)
            assert second.receive(0, COMMAND) == data
            sending.result()
        sending = threads.submit(second.send, b"done", 0, RESULT)
        assert first.receive(1, RESULT) == b"done"
        sending.result()
    close(first, second)


def test_a_rank_that_fails_ends_rank_0_in_one_line_with_its_reason(capfd: pytest.CaptureFixture[str]) -> None:
    ends = Ends()
    _, second = joined(ends)
    second.fail(MemoryError("too little\non this rank"))
    assert ends.ended.wait(60)
    assert ends.codes == [1]
    line = r"^asyncrl learner: learner rank 1 on \S+ \(pid \d+\) failed: MemoryError: too little on this rank$"
    assert re.search(line, capfd.readouterr().err, re.MULTILINE)


def test_a_rank_that_differs_is_refused_and_both_ends_say_in_what() -> None:
    port = free_ports(1)[0]
    with ThreadPoolExecutor() as threads:
        other = threads.submit(join, info(1, port), {"the code of asyncrl": "new", "learner.recompute": "full"})
        with pytest.raises(
            ConfigError, match=r"^learner rank 1 on .* differs from rank 0 in learner\.recompute; start"
        ):
            join(info(0, port), {"the code of asyncrl": "new", "learner.recompute": "none"})
        with pytest.raises(
            ConfigError, match=r"^learner rank 1 is refused: .* differs from rank 0 in learner\.recompute"
        ):
            other.result()


def test_ranks_that_do_not_join_are_named() -> None:
    with pytest.raises(BackendError, match=r"learner rank 1, 2 of 3 has not joined within 0\.1 s"):
        join(info(0, free_ports(1)[0], ranks=3, timeout_seconds=0.1))


def test_a_rank_without_rank_0_says_where_it_looked() -> None:
    with pytest.raises(BackendError, match=r"learner rank 1: no store at 127\.0\.0\.1:\d+ .* is rank 0 up"):
        join(info(1, free_ports(1)[0], timeout_seconds=0.1))


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"WORLD_SIZE": "4"}, "learner.ranks: 2, and torchrun has started 4"),
        ({"RANK": ""}, "needs RANK, from 0 to 1"),
        ({"RANK": "2"}, "needs RANK, from 0 to 1"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR and MASTER_PORT"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK=one: must be a whole number"),
    ],
)
def test_an_impossible_environment_is_refused(environment: dict[str, str], problem: str) -> None:
    (_, right) = rank_environments(ranks=2, machines=2, port=29500)
    with pytest.raises(ConfigError, match=problem):
        rank_from_environment(right | environment, ranks=2, timeout_seconds=60.0)


def test_ranks_of_one_machine_count_from_zero_there() -> None:
    read = [
        rank_from_environment(one, ranks=4, timeout_seconds=60.0)
        for one in rank_environments(ranks=4, machines=2, port=29500)
    ]
    assert [(one.rank, one.local_rank) for one in read if one is not None] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert rank_from_environment({}, ranks=2, timeout_seconds=60.0) is None
    assert rank_from_environment({"WORLD_SIZE": "1", "RANK": "0"}, ranks=2, timeout_seconds=60.0) is None


# -- parts of the weights ----------------------------------------------------------------------------------------------


class Sum(PartWorker):
    def __call__(self, snapshot: Snapshot, order: bytes) -> bytes:
        if order == b"fail":
            raise WeightsError("no such engine")
        return str(sum(float(tensor.sum()) for _, tensor in snapshot.tensors())).encode() + order


def test_parts_of_the_weights_are_processed_where_they_are_until_they_are_forgotten() -> None:
    first, second = joined()
    parts = ExportedParts()
    for export in (1, 2):
        parts.add(export, Snapshot.from_tensors([("weight", torch.full((2,), float(export)))]))
    parts.serve(second)
    one, two = (RemotePart(first, 1, export) for export in (1, 2))
    assert one.run(Sum, b" of one") == b"2.0 of one"
    with pytest.raises(WeightsError, match="learner rank 1: no such engine"):
        two.run(Sum, b"fail")
    parts.keep_only([2])
    assert two.run(Sum, b"") == b"4.0"
    with pytest.raises(WeightsError, match="learner rank 1: this rank no longer holds a part of export 1"):
        one.run(Sum, b"")
    with pytest.raises(WeightsError, match="is not a PartWorker"):
        two.run(Ends, b"")  # type: ignore[arg-type]
    close(first, second, awaited=(COMMAND,))


def test_ranks_meet_at_the_address_from_which_they_reach_the_first_one() -> None:
    assert address_towards("127.0.0.1", 29500) == "127.0.0.1"
    assert address_towards("127.0.0.2", 29500).startswith("127.0.0.")


def test_a_name_that_is_a_loopback_address_on_the_first_machine_is_said_where_ranks_cannot_meet() -> None:
    """Debian has the machine's own name as 127.0.1.1 in /etc/hosts."""
    one = info(0, free_ports(1)[0], host="localhost", timeout_seconds=1.0)
    store = open_store(one)
    store.set("hello/1", codec.encode(Hello(host="other", pid=1, settings={})))
    with pytest.raises(BackendError, match=r"localhost \(MASTER_ADDR\) is 127\.0\.0\.1 here, where no other machine"):
        RankGroup(store, one, end=Ends())
