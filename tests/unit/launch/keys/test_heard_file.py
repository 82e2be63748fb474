"""Records of other actors' messages survive restarts and parallel processes, in a file that does not grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.launch.keys import heard_file
from asyncrl.messages.freshness import Freshness

W0, W1 = ("actors", "w0", "key of w0"), ("actors", "w1", "key of w1")


def test_it_is_the_newest_of_what_each_process_heard(tmp_path: Path) -> None:
    heard_file.save(tmp_path, {W0: (5, 7), W1: (1, 1)})
    heard_file.save(tmp_path, {W0: (4, 99)})
    assert heard_file.load(tmp_path) == {W0: (5, 7), W1: (1, 1)}


@pytest.mark.parametrize("text", ["", "nonsense", "[[1]]", "{}", '[["a", "b", "c", "x", 1]]', "7"])
def test_a_damaged_file_is_written_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "heard").write_text(text)
    assert heard_file.load(tmp_path) == {}
    heard_file.save(tmp_path, {W0: (5, 7)})
    assert heard_file.load(tmp_path) == {W0: (5, 7)}


def test_it_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone with the bus's password can make any number of keys."""
    monkeypatch.setattr(heard_file, "MOST", 10)
    for number in range(5):
        heard_file.save(
            tmp_path, {("actors", f"evil-{number}-{one}", "key"): (1, 1) for one in range(8)} | {W0: (5, number)}
        )
    assert len(heard_file.load(tmp_path)) == 10
    assert heard_file.load(tmp_path)[W0] == (5, 4)


async def test_it_is_saved_at_the_end_of_a_process(tmp_path: Path) -> None:
    heard = Freshness()
    async with heard_file.kept(tmp_path, heard):
        assert not heard.is_old(W0, (5, 7), seconds_to_live=15.0)
    assert heard_file.load(tmp_path) == {W0: (5, 7)}


async def test_a_disk_that_does_not_take_it_at_the_end_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard, folder = Freshness(), tmp_path / "keys"
    folder.mkdir()
    async with heard_file.kept(folder, heard):
        assert not heard.is_old(W0, (5, 7), seconds_to_live=15.0)
        folder.rmdir()
        folder.touch()  # no file can be created inside a file
    assert caplog.messages[-1] == f"{folder / 'heard'}: cannot be written: File exists; what was heard last is not kept"
