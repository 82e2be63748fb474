"""The ranks of a learner leave their GPUs: all of them before anyone else gets one, and without exported weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.backends.megatron import backend as megatron
from asyncrl.backends.megatron import followers
from asyncrl.backends.megatron.held_parts import HeldParts, RemotePart
from asyncrl.backends.megatron.rank_commands import Command, Left, Place, left_behind
from asyncrl.messages import codec
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.tensors.snapshot import Snapshot
from tests.harness.backends import LAYOUTS, SETTINGS

KEPT = Left(kept_bytes=1, used_bytes=2)


class Rank:
    """Is on its GPU, with parts of two exports, until it is told to leave."""

    def __init__(self) -> None:
        self.is_there = True
        self.parts = HeldParts()
        for export in (1, 2):
            self.parts.hold(export, Snapshot.of([("weight", torch.ones(2))]))

    def obey(self, command: Command) -> Left:
        assert command.name == "offload"
        self.parts.forget(but=command.held)
        self.is_there = False
        return KEPT

    def close(self) -> None: ...


class LateLink:
    """A link to a follower that is far behind: it gets to its commands only while the leader waits for an answer."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.gone, self.problem = threading.Event(), ""
        self.parts = NoOrders()
        self._commands: list[bytes] = []
        self._answers: list[bytes] = []

    def send_bytes(self, data: bytes) -> None:
        self._commands.append(data)

    def poll(self, timeout: float | None = 0.0) -> bool:
        followers.obey(self.rank, FollowersEnd(self._commands, self._answers), patience=60.0)  # type: ignore[arg-type]
        return bool(self._answers)

    def recv_bytes(self) -> bytes:
        return self._answers.pop(0)

    def close(self) -> None: ...


class NoOrders:
    def recv_bytes(self) -> bytes:
        raise EOFError


class FollowersEnd:
    def __init__(self, commands: list[bytes], answers: list[bytes]) -> None:
        self.parts = NoOrders()
        self._commands, self._answers = commands, answers

    def may_be_silent(self, seconds: float) -> None: ...

    def recv_bytes(self) -> bytes:
        if not self._commands:
            raise EOFError
        return self._commands.pop(0)

    def send_bytes(self, data: bytes) -> None:
        self._answers.append(data)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[tuple[megatron.MegatronBackend, list[Rank]]]:
    arguments: dict[str, Any] = {"algorithm": resolve(ALGORITHMS["grpo"]), "optimizer": SETTINGS}
    backend = megatron.MegatronBackend(
        tmp_path,
        temperature=1.0,
        device="cpu",
        dtype="float32",
        threads=1,
        options=megatron.Options(),
        layout=LAYOUTS["megatron-2"],
        **arguments,
    )
    leader, follower = Rank(), Rank()
    place = Place(rank=1, ranks=2, host="", port=0, timeout_seconds=60.0)
    link: Any = LateLink(follower)
    backend._own = leader  # type: ignore[assignment]
    backend._followers = followers.Followers([("learner rank 1", place, link)], end=lambda code: None)
    yield backend, [leader, follower]
    backend.close()


def test_a_learner_has_left_once_its_last_rank_has(ranks: tuple[megatron.MegatronBackend, list[Rank]]) -> None:
    """No collective makes the leader wait, and an engine that resumes beside a rank that is still there dies."""
    backend, both = ranks
    backend.offload()
    assert [rank.is_there for rank in both] == [False, False]


def test_parts_of_exports_that_nobody_needs_leave_as_well(
    ranks: tuple[megatron.MegatronBackend, list[Rank]],
) -> None:
    backend, (_, follower) = ranks
    needed = RemotePart(backend._followers.parts[1], 2)  # type: ignore[union-attr]
    backend._parts.add(needed)
    backend.offload()
    assert list(follower.parts._parts) == [2]
    del needed
    backend.offload()
    assert list(follower.parts._parts) == []


def test_the_memory_in_use_after_leaving_is_a_metric_of_each_rank() -> None:
    assert codec.decode(codec.encode(KEPT), Left) == KEPT
    assert left_behind([Left(kept_bytes=3, used_bytes=4), KEPT]) == {
        "learner/rank0/kept_memory_bytes": 3.0,
        "learner/rank0/used_memory_bytes": 4.0,
        "learner/rank1/kept_memory_bytes": 1.0,
        "learner/rank1/used_memory_bytes": 2.0,
    }
    assert left_behind([Left()]) == {}
