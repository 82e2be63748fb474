"""Rows of metrics.jsonl: a damaged or edited line is none, and every step has one, whatever was resumed."""

from __future__ import annotations

import pytest

from asyncrl.audit.metric_rows import Row, of_newest_history, parsed


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"{", b"[]", b"3", b"null", b"\xff", b"\0" * 9, b"[" * 10_000),
        *(b"{}", b'{"step": "3"}', b'{"step": 3.0}', b'{"step": -1}', b'{"step": true}', b'{"step": null}'),
        *(b'{"step": 3, "loss": NaN}', b'{"step": 3, "loss": 1e999}', b'{"step": 3, "x": -Infinity}'),
        *(b'{"step": 3, "x": 1' + b"0" * 400 + b"}", b'{"step": 3, "x": ' + b"9" * 5000 + b"}"),
        *(b'{"step": 3, "learner/incarnation": "a"}', b'{"step": 3, "learner/incarnation": -1}'),
        b'\xef\xbb\xbf{"step": 3',
    ],
)
def test_other_text_is_no_row(line: bytes) -> None:
    assert parsed(line) is None


def _trained(incarnation: int, step: int) -> Row:
    return {"step": step, "learner/incarnation": incarnation, "loss": 0.1 * incarnation}


def _evaluated(incarnation: int, step: int) -> Row:
    return {"step": step, "learner/incarnation": incarnation, "evaluation/complete": 1.0, "evaluation/a/mean@1": 0.5}


def _by_key(*rows: Row) -> dict[tuple[int, int], Row]:
    return {(row["learner/incarnation"], row["step"]): row for row in rows}


def test_retrained_step_replaces_it_and_all_later_steps() -> None:
    rows = _by_key(*(_trained(0, step) for step in (1, 2, 3, 4)), _trained(1, 3))
    assert of_newest_history(rows) == [_trained(0, 1), _trained(0, 2), _trained(1, 3)]


def test_evaluation_of_a_resumed_version_joins_the_row_of_its_step() -> None:
    rows = _by_key(_trained(0, 1), _trained(0, 2), _evaluated(1, 2), _trained(1, 3))
    assert of_newest_history(rows) == [_trained(0, 1), _evaluated(1, 2) | _trained(0, 2), _trained(1, 3)]


def test_evaluation_before_the_first_step_has_its_own_row() -> None:
    rows = _by_key(_evaluated(0, 0), _trained(0, 1))
    assert of_newest_history(rows) == [_evaluated(0, 0), _trained(0, 1)]


def test_steps_stay_until_they_are_retrained() -> None:
    rows = _by_key(*(_trained(0, step) for step in (1, 2, 3)), _evaluated(1, 1))
    assert [row["step"] for row in of_newest_history(rows)] == [1, 2, 3]
    rows |= _by_key(_trained(1, 2))
    assert of_newest_history(rows) == [_evaluated(1, 1) | _trained(0, 1), _trained(1, 2)]
