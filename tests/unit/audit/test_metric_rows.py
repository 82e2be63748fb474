"""Rows of metrics.jsonl are read as they were written."""

from __future__ import annotations

import math
from pathlib import Path

from asyncrl.audit.metric_rows import metrics_of, parse
from asyncrl.metrics.sinks import JsonLines
from asyncrl.policies.metric import histogram


def test_a_row_that_is_written_again_is_the_same(tmp_path: Path) -> None:
    """As those that a branch shares with its run: with numbers, histograms, and what was not finite."""
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write(3, {"loss": 0.5, "grad_norm": math.inf, "length/trained": histogram([1, 2, 5])})
    line = path.read_bytes()
    row = parse(line)
    assert row is not None
    sink.write(3, metrics_of(row))
    sink.close()
    assert path.read_bytes() == 2 * line
