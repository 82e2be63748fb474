"""Replayed messages are told apart from late ones by what a reader has heard and by its own clock."""

from __future__ import annotations

import pytest

from asyncrl.messages import freshness
from asyncrl.messages.freshness import LAG_SECONDS, LIVES, Freshness

W0 = ("actors", "w0", "key of w0")
W1 = ("actors", "w1", "key of w1")
SECONDS_TO_LIVE = 15.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Reader:
    def __init__(self) -> None:
        self.clock = Clock()
        self.heard = Freshness(clock=self.clock)

    def takes(self, *order: int, of: tuple[str, str, str] = W0) -> bool:
        return not self.heard.is_old(of, (order[0], order[1]), seconds_to_live=SECONDS_TO_LIVE)


@pytest.fixture
def reader() -> Reader:
    return Reader()


def test_what_is_said_is_heard_as_often_as_it_is_read(reader: Reader) -> None:
    for number in range(100):
        assert reader.takes(1, number) and reader.takes(1, number)
        reader.clock.now += 1.0


def test_an_answer_may_lag_by_some_seconds(reader: Reader) -> None:
    for number in range(100):
        assert reader.takes(1, number)
        assert reader.takes(1, max(0, number - 4))
        reader.clock.now += 1.0


def test_what_was_said_before_that_is_old(reader: Reader) -> None:
    for number in range(30):
        assert reader.takes(1, number)
        reader.clock.now += 1.0
    too_old = int(30 - 2 * LAG_SECONDS) - 1
    assert not any(reader.takes(1, number) for number in range(too_old))
    assert reader.takes(1, 30)


def test_a_newer_life_of_its_process_makes_all_of_the_one_before_old(reader: Reader) -> None:
    assert reader.takes(1, 1000)
    reader.clock.now += 1.0
    assert reader.takes(2, 1)
    reader.clock.now += LAG_SECONDS
    assert not reader.takes(1, 1001)


def test_who_is_gone_is_not_kept_alive_by_what_it_said(reader: Reader) -> None:
    """No message keeps a gone speaker alive. Its last message counts only for as long as the bus may keep it."""
    for number in range(10):
        assert reader.takes(1, number)
        reader.clock.now += 1.0
    reader.clock.now += LAG_SECONDS
    assert not reader.takes(1, 8)
    assert reader.takes(1, 9)
    reader.clock.now += LIVES * SECONDS_TO_LIVE
    assert not reader.takes(1, 9)
    assert reader.takes(1, 10)  # the speaker is back


def test_one_speaker_says_nothing_of_another(reader: Reader) -> None:
    assert reader.takes(9, 9)
    assert reader.takes(1, 1, of=W1)


def test_what_was_heard_holds_after_a_restart(reader: Reader) -> None:
    assert reader.takes(5, 7)
    after = Reader()
    after.heard.remember(reader.heard.newest())
    assert not after.takes(5, 6) and not after.takes(4, 99)
    assert after.takes(5, 7) and after.takes(5, 8)


def test_no_more_speakers_are_remembered_than_there_is_room_for(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Active speakers are kept; the speaker that was silent the longest is forgotten first."""
    monkeypatch.setattr(freshness, "MOST", 100)
    assert reader.takes(5, 100)
    for number in range(1000):
        assert reader.takes(1, 1, of=("actors", f"evil-{number}", "key"))
        if number % 50 == 0:
            assert reader.takes(5, 100 + number)
    assert len(reader.heard.newest()) == 100
    assert reader.heard.newest()[W0] == (5, 1050)
