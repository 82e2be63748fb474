"""Links between two ranks, over TCP and between processes of one machine: messages, and detection of a rank's end."""

from __future__ import annotations

import socket
import threading
from collections import deque

import pytest

from asyncrl.backends.megatron import followers
from asyncrl.backends.megatron.followers import Followers
from asyncrl.backends.megatron.held_parts import HeldParts
from asyncrl.backends.megatron.rank_commands import Command, Place
from asyncrl.backends.megatron.rank_link import HUNG_SECONDS, RankLink
from asyncrl.errors import BackendError
from asyncrl.messages import codec

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(params=["tcp", "unix"])
def pair(request: pytest.FixtureRequest) -> Pair:
    if request.param == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        return listener.accept()[0], theirs


def test_a_learner_whose_rank_is_gone_ends_and_names_the_rank(pair: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    """The learner notices at any time; this test never asks the rank for anything."""
    ends: list[int] = []
    ended = threading.Event()

    def end(code: int) -> None:
        ends.append(code)
        ended.set()

    ours, theirs = pair
    place = Place(rank=1, ranks=2, host="", port=0, timeout_seconds=60.0)
    ranks = Followers([("learner rank 1 on host-b (pid 5)", place, RankLink(ours, patience=60))], end=end)
    theirs.close()
    assert ended.wait(60)
    assert ends == [1]
    assert capfd.readouterr().err == (
        "asyncrl learner: learner rank 1 on host-b (pid 5) is gone: its connection has ended\n"
    )
    with pytest.raises(BackendError, match=r"rank 1 on host-b \(pid 5\) is gone"):
        ranks.scores([1])
    ranks.close_links()


def test_a_rank_that_fails_says_why_after_all_that_it_has_sent(pair: Pair) -> None:
    ours, theirs = (RankLink(end, patience=60) for end in pair)
    theirs.send_bytes(b"scores")
    theirs.fail(RuntimeError("\nCUDA error:\n\n  an illegal memory access\n" + "x" * 1000))
    assert ours.gone.wait(60)
    assert ours.recv_bytes() == b"scores"
    start = "it failed: RuntimeError: CUDA error: an illegal memory access xxx"
    assert ours.problem.startswith(start)
    assert ours.problem.endswith("xxx...")
    assert len(ours.problem) < 350
    ours.close()
    assert theirs.gone.wait(60)
    theirs.close()


def test_what_one_end_sends_does_not_wait_for_the_other_to_listen(pair: Pair) -> None:
    """Send more bytes than any kernel buffer holds."""
    ours, theirs = (RankLink(end, patience=60) for end in pair)
    large = bytes(64 << 20)
    ours.send_bytes(large)
    ours.send_bytes(b"next")
    ours.parts.send_bytes(b"beside")
    assert theirs.parts.recv_bytes() == b"beside", "it does not wait for commands that nobody reads yet"
    assert theirs.recv_bytes() == large
    assert theirs.recv_bytes() == b"next"
    ours.close()
    for lane in (theirs, theirs.parts):
        with pytest.raises(EOFError):
            lane.recv_bytes()
    theirs.close()


def test_a_rank_that_hangs_is_gone_once_it_was_silent_for_longer_than_it_said(pair: Pair) -> None:
    """The test ticks the link itself, so that a pause of this process does not count as silence of the peer."""
    ours, raw = pair
    link = RankLink(ours, patience=3, tick_seconds=60)
    link.tick()  # 60 of the link's seconds have passed
    assert link.gone.wait(60)
    assert link.problem == "it hangs: no sign of life for 3 s"
    raw.close()


def test_a_rank_that_reads_nothing_for_long_is_gone_as_well(pair: Pair) -> None:
    """It is stopped while it may be silent for long: signs of life fill the buffers, and nobody waits for it."""
    ours, raw = pair
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel makes it as small as it can
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    link = RankLink(ours, patience=100 * 60, tick_seconds=60)
    for _ in range(100):
        link.tick()
    assert not link.gone.is_set()
    link.tick()
    assert link.gone.wait(60)
    raw.close()


def test_a_rank_is_given_the_time_that_it_announced(pair: Pair) -> None:
    ours, theirs = (RankLink(end, patience=600, tick_seconds=60) for end in pair)
    theirs.may_be_silent(100)
    theirs.send_bytes(b"now it is known")
    ours.recv_bytes()
    ours.tick()
    assert not ours.gone.is_set()  # 60 of 100 s have passed
    theirs.tick()  # a message is heard and resets the count
    theirs.send_bytes(b"")
    ours.recv_bytes()
    ours.tick()
    assert not ours.gone.is_set()
    ours.tick()
    assert ours.gone.wait(60)
    assert ours.problem == "it hangs: no sign of life for 100 s"
    theirs.close()


def test_a_rank_may_be_silent_while_it_compiles_or_reads_files_and_at_no_other_time() -> None:
    """A rank that is stopped while it saves or exports is noticed as soon as one that is stopped in a later step."""
    said: list[tuple[str, float]] = []
    names = ("step", "step", "export", "save", "saved", "restore")

    class NoOrders:
        def recv_bytes(self) -> bytes:
            raise EOFError

    class Link:
        parts = NoOrders()
        commands = deque([codec.encode(Command(name=name)) for name in names] + [followers.GOODBYE])

        def may_be_silent(self, seconds: float) -> None:
            said.append(("may be silent", seconds))

        def recv_bytes(self) -> bytes:
            return self.commands.popleft()

    class Rank:
        parts = HeldParts()

        def obey(self, command: Command) -> None:
            said.append((command.name, 0))

        def close(self) -> None: ...

    assert followers.obey(Rank(), Link(), patience=600)  # type: ignore[arg-type]
    silent = "may be silent"
    assert said == [
        (silent, HUNG_SECONDS),
        *((silent, 600), ("step", 0), (silent, HUNG_SECONDS)),
        *(("step", 0), ("export", 0), ("save", 0), ("saved", 0)),
        *((silent, 600), ("restore", 0), (silent, HUNG_SECONDS)),
    ]
