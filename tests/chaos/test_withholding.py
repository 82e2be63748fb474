"""A client that takes prompts and keeps them without answering delays the run, but does not stop it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.actors.learner.history import HISTORY_FILE, last_incarnation
from tests.harness.faults.run import prepare, running
from tests.harness.forked import ForkServer

pytestmark = pytest.mark.slow

REQUESTS = 400
"""Concurrent requests of the client. nats-server queues at most 512 and the workers use two, so the client gets nearly
every prompt."""


@contextlib.contextmanager
def keeping(folder: Path, count: int, *, pause: float = 0.0, requests: int = 1) -> Iterator[None]:
    """While the context is open, a client takes ``count`` prompts and keeps them.

    It has ``requests`` concurrent consumers, and each pauses ``pause`` seconds after a prompt.
    """
    words = [sys.executable, "-m", "tests.chaos.keeper", str(folder), str(count), str(pause), str(requests)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        try:
            assert keeper.stdout.readline()
            yield
        finally:
            keeper.kill()


def test_prompts_that_somebody_keeps_hold_up_no_step_and_restart_nobody(tmp_path: Path, forks: ForkServer) -> None:
    """No worker has begun these groups, so they do not age. The learner waits only for groups that workers have
    begun."""
    prepare(tmp_path)
    settings = ("run.stall_seconds=7", "run.restarts=0", "staleness.wait_seconds=25", "rollout.reissue_seconds=0")
    with running(tmp_path, *settings, forks=forks) as run, keeping(tmp_path, 2):
        run.wait_for_steps(10)
        metrics = (tmp_path / "runs" / "faults" / "metrics.jsonl").read_text().splitlines()
        assert max(json.loads(line)["learner/straggler_wait_seconds"] for line in metrics) < 25
        assert not [line for line in run.said if "the window is full" in line]


def test_a_client_that_keeps_every_prompt_again_and_again_stops_the_run_until_it_is_gone_and_no_longer(
    tmp_path: Path, forks: ForkServer
) -> None:
    """No restart is spent, however long the client stays."""
    prepare(tmp_path)
    settings = ("run.stall_seconds=2", "run.restarts=0", "rollout.reissue_seconds=2")
    with running(tmp_path, *settings, forks=forks) as run:
        with keeping(tmp_path, 100_000, requests=REQUESTS):
            for _ in range(2):
                run.wait_for("prompts are not answered", after=len(run.said))
        run.wait_for_steps(10)
    assert last_incarnation(tmp_path / "runs" / "faults" / HISTORY_FILE) == 0


def test_a_client_that_keeps_a_prompt_of_the_last_step_does_not_keep_the_run_from_its_end(
    tmp_path: Path, forks: ForkServer
) -> None:
    prepare(tmp_path)
    settings = ("run.restarts=0", "rollout.reissue_seconds=1", "run.steps=20")
    with running(tmp_path, *settings, forks=forks) as run:
        (tmp_path / "step").touch()  # the learner hangs until the client is connected
        with keeping(tmp_path, 1000, pause=0.5):
            (tmp_path / "step").unlink()
            assert run.process.wait(240) == 0
    assert last_incarnation(tmp_path / "runs" / "faults" / HISTORY_FILE) == 0
