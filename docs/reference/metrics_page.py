"""docs/reference/metrics.md: every metric and its meaning, from the schema."""

from __future__ import annotations

from itertools import groupby
from typing import Final

from asyncrl.metrics.schema import SCHEMA

HEAD: Final = """# Metrics

Every number of a step, generated from `asyncrl/metrics/schema.py` by `python docs/reference/make.py`. Each step writes
one JSON object to `metrics.jsonl` in the run's folder; W&B gets the same with `metrics.wandb = true`. `*` stands for
the name of a worker, of a reward's part, or of whatever else the row says. A metric that does not apply to a run is
absent. A test fails when a metric is logged that is not listed here.
"""


def page() -> str:
    parts = [HEAD]
    for prefix, rows in groupby(
        sorted(SCHEMA.items(), key=lambda row: _prefix(row[0])), key=lambda row: _prefix(row[0])
    ):
        lines = [f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |" for name, meaning in rows]
        parts.append(f"\n## {prefix}\n\n| metric | meaning |\n|---|---|\n" + "\n".join(lines) + "\n")
    return "".join(parts)


def _prefix(name: str) -> str:
    return name.split("/")[0] if "/" in name else "of the step"
