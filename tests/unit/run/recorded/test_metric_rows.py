"""A line of metrics.jsonl that was damaged or edited is no row, and is safe for every reader."""

from __future__ import annotations

import pytest

from asyncrl.run.recorded.metric_rows import parsed


def test_a_row_is_read_by_its_present_names() -> None:
    assert parsed(b'{"step": 3, "learner/run_epoch": 1, "loss": null}') == {
        "step": 3,
        "learner/incarnation": 1,
        "loss": None,
    }


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
def test_anything_else_is_none(line: bytes) -> None:
    assert parsed(line) is None
