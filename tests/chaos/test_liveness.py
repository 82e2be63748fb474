"""Faults injected into a run of real processes on a real nats-server: each is named, and faults of our own are
fixed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness.faults.injections import hanging, stopped
from tests.harness.faults.run import prepare, running
from tests.harness.forked import ForkServer

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare(tmp_path)
    return tmp_path


def test_a_hang_or_freeze_is_named_and_its_end_is_reported(folder: Path, forks: ForkServer) -> None:
    # By default, a wait caused by a freeze would keep raising an alarm for ten steps after the freeze ends.
    with running(folder, "metrics.straggler_alarm=0", forks=forks) as run:
        faults = {
            "reward function has not returned": ("reward", hanging(folder, "reward")),
            "engine has not answered": ("engine", hanging(folder, "engine")),
            "worker w1 is stopped (SIGSTOP)": ("frozen", stopped(run.pid("w1"))),
            "learner is stopped (SIGSTOP)": ("frozen", stopped(run.pid("learner"))),
            "nats-server has not answered": ("bus", stopped(run.pid("nats-server"))),
        }
        for text, (fault, injected) in faults.items():
            before = len(run.said)
            with injected, ThreadPoolExecutor(1) as beside:
                # The bus shows a frozen process only until its last heartbeat expires, so start doctor before that.
                early = beside.submit(run.doctor) if fault == "frozen" else None
                run.wait_for(text, after=before)
                if fault in ("reward", "frozen"):
                    code, found = early.result() if early is not None else run.doctor()
                    assert (code, fault in [one["fault"] for one in found["findings"]]) == (1, True)
            run.wait_for(f"over: {fault} (", after=before)
            run.wait_for_steps(2)
        code, found = run.doctor()
        assert code == 0, found["findings"]
        assert run.process.poll() is None


def test_a_worker_that_stays_frozen_is_restarted(folder: Path, forks: ForkServer) -> None:
    with running(folder, "run.stall_seconds=7", forks=forks) as run:
        pid = run.pid("w0")
        with stopped(pid):
            assert "restart 1 of 3" in run.wait_for("w0 ended with signal SIGKILL (worker w0 is stopped")
        run.wait_until(lambda: run.pid("w0") not in (0, pid), "another w0")
        run.wait_for_steps(2)


def test_a_learner_that_cannot_come_back_ends_the_run_with_the_reason(folder: Path, forks: ForkServer) -> None:
    with running(folder, "run.stall_seconds=7", "run.restarts=0", forks=forks) as run, stopped(run.pid("learner")):
        assert "learner is stopped (SIGSTOP)" in run.wait_for("ending the run")
        assert run.process.wait(60) == 1
