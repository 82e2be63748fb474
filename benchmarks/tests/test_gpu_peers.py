"""What benchmarks.gpu.peers reads off a peer's run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.peers.processes import Family
from benchmarks.gpu.peers.window import engine, measure_areal, staleness, standstills

STEPS = [
    {"time": 10.0 * (step + 1), "step": step, "timeperf/train_step": 3.0, "timeperf/recompute_logp": 1.0}
    for step in range(4)
]
TRAINED = [{"version": step, "counts": [0, 100, 0, 0, 0, 0, 100]} for step in range(4)]
LOOKS = [(10.0, 4, 0), (20.0, 0, 2), (25.0, 0, 2), (30.0, 4, 0), (40.0, 4, 0)]


def test_only_steps_behind_the_warmup_count() -> None:
    row = measure_areal(STEPS, TRAINED, LOOKS, warmup=1, bound=4)
    assert row["steps"] == 3
    assert row["tokens_per_second"] == pytest.approx(3 * 200 / 30)
    assert row["learner_busy"] == pytest.approx(0.4)


def test_tokens_past_the_bound_are_a_share_of_all() -> None:
    found = staleness([[0, 100, 0, 0, 0, 0, 100]], bound=4)
    assert (found["staleness_mean"], found["staleness_max"], found["tokens_over_bound_share"]) == (3.5, 6, 0.5)


def test_an_engine_at_zero_counts_by_time() -> None:
    found = engine(LOOKS, begin=10.0, end=40.0)
    assert found["engine_at_zero"] == pytest.approx(1 / 3)
    assert standstills(LOOKS) == [10.0]


def test_nothing_behind_the_warmup_is_an_error() -> None:
    with pytest.raises(ValueError, match="warm-up"):
        measure_areal(STEPS[:1], TRAINED, LOOKS, warmup=1, bound=4)


def test_what_a_family_started_ends_with_it_though_it_left_the_session(tmp_path: Path) -> None:
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
    log = tmp_path / "log"
    with Family([sys.executable, "-c", parent], environment=os.environ, cwd=tmp_path, log=log):
        subprocess.run(["sh", "-c", f"until test -s {log}; do sleep 0.05; done"], check=True, timeout=30)
    pid = int(log.read_text())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
