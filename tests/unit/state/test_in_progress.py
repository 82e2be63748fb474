"""What an incarnation of the learner was working on when it ended, as later incarnations see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.state.in_progress import InProgress, LogEntry

A, B, C = LogEntry(7, "5", "w0"), LogEntry(8, "6", "w1"), LogEntry(9, "7", "w0")


def test_an_entry_that_two_incarnations_in_a_row_ended_with_is_set_aside_by_the_third(tmp_path: Path) -> None:
    path = tmp_path / "in_progress.json"
    InProgress(path).train([A, B])
    second = InProgress(path)
    assert (second.suspects, second.aside) == ({A.identity, B.identity}, {})
    second.train([B, C])
    third = InProgress(path)
    assert set(third.aside) == {B.identity}
    assert third.suspects == {C.identity}
    assert set(InProgress(path).aside) == {B.identity}  # and in every later incarnation


def test_an_entry_that_was_being_decoded_is_one_too(tmp_path: Path) -> None:
    path = tmp_path / "in_progress.json"
    for _ in range(2):
        InProgress(path).decode(7, "5")
    assert set(InProgress(path).aside) == {A.identity}


def test_an_incarnation_that_ended_with_nothing_in_progress_starts_the_count_again(tmp_path: Path) -> None:
    path = tmp_path / "in_progress.json"
    InProgress(path).train([A])
    InProgress(path)
    InProgress(path).train([A])
    assert InProgress(path).aside == {}


def test_what_was_done_is_no_longer_in_progress(tmp_path: Path) -> None:
    path = tmp_path / "in_progress.json"
    for _ in range(3):
        notes = InProgress(path)
        assert (notes.aside, notes.suspects) == ({}, set())
        notes.decode(7, "5")
        notes.decoded()
        notes.train([A, B, C])
        notes.trained()


def test_an_entry_of_another_log_is_another_entry(tmp_path: Path) -> None:
    path = tmp_path / "in_progress.json"
    InProgress(path).train([A])
    InProgress(path).train([LogEntry(7, "6"), LogEntry(8, "5")])
    assert InProgress(path).aside == {}
    InProgress(path).train([A])
    notes = InProgress(path)
    notes.start_new_log()
    notes.train([A])
    assert InProgress(path).aside == {}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"training": 3}', '{"training": [[1, 2], "x"], "aside": {}}', "\0" * 99]
)
def test_a_damaged_file_is_an_empty_one(text: str, tmp_path: Path) -> None:
    path = tmp_path / "in_progress.json"
    path.write_text(text)
    notes = InProgress(path)
    assert (notes.aside, notes.suspects) == ({}, set())
    notes.train([A])
    assert InProgress(path).suspects == {A.identity}


def test_a_shorter_note_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    path = tmp_path / "in_progress.json"
    notes = InProgress(path)
    notes.train([LogEntry(number, str(number), "worker") for number in range(1000)])
    notes.train([A])
    assert InProgress(path).suspects == {A.identity}


def test_an_entry_that_was_cleared_alone_is_set_aside_by_the_fourth(tmp_path: Path) -> None:
    """Incarnations end for other reasons, so two kills in the same step may be chance."""
    path = tmp_path / "in_progress.json"
    InProgress(path).train([A, B])
    for _ in range(2):
        notes = InProgress(path)
        assert notes.aside == {}
        notes.tried(A, is_cleared=True)
        notes.tried(B, is_cleared=True)
        notes.train([A, B])
    assert set(InProgress(path).aside) == {A.identity, B.identity}


def test_an_entry_that_only_its_scores_speak_for_is_not_cleared(tmp_path: Path) -> None:
    path = tmp_path / "in_progress.json"
    InProgress(path).train([A])
    notes = InProgress(path)
    notes.tried(A, is_cleared=False)
    assert notes.suspects == set()
    notes.train([A])
    assert set(InProgress(path).aside) == {A.identity}


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_somebody_removes_is_put_back(
    is_replaced: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "in_progress.json"
    notes = InProgress(path)
    path.unlink()
    if is_replaced:
        path.write_text("another's " * 99)
    notes.train([A])
    notes.train([B])
    assert caplog.messages == [f"{path}: was removed or replaced while it is in use; put back"]
    assert InProgress(path).suspects == {B.identity}


def test_a_folder_in_the_place_of_the_file_ends_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "in_progress.json"
    notes = InProgress(path)
    path.unlink()
    path.mkdir()
    notes.train([A])
    notes.train([B])
    assert caplog.messages == [f"{path}: cannot be written: Is a directory"]
    path.rmdir()
    notes.train([C])
    assert InProgress(path).suspects == {C.identity}
