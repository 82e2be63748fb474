"""A rank that fails says why and ends the learner; a rank that a signal asks to end goes on for the learner."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl import os_process
from asyncrl.backends.megatron.rank_commands import Command
from asyncrl.errors import BackendError, CheckpointError, StepFailed
from tests.harness.backends import LEARNING_RATE, RANKS, documents, shares, started, tiny_model
from tests.harness.ranks import Ends, follower_pid

pytestmark = list(RANKS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_the_reason_why_a_rank_failed_is_given_beside_the_leader_s_own(folder: Path) -> None:
    """The leader waits in a collective, which fails since the other rank is gone."""
    with started("megatron-2", folder) as backend:
        own: Any = backend
        own._followers._end_process = Ends()
        own._followers.send([Command(name="step", model="unknown")])
        reasons = r"rank 1 \(pid \d+\) .*: KeyError: 'unknown'; RuntimeError: .*[Cc]onnection"
        with pytest.raises(BackendError, match=reasons):
            backend.step(shares("megatron-2", documents()), learning_rate=LEARNING_RATE)


def test_a_step_that_failed_on_ranks_that_are_all_there_waits_for_the_end_of_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = documents()
    made[0] = dataclasses.replace(made[0], tokens=np.full_like(made[0].tokens, 10**6))  # they have no embedding
    waits: list[float] = []
    with started("megatron-2", folder) as backend:
        own: Any = backend
        condition = own._followers._losing
        monkeypatch.setattr(condition, "wait_for", lambda _, seconds: waits.append(seconds))
        with pytest.raises(StepFailed):
            backend.step(shares("megatron-2", made), learning_rate=LEARNING_RATE)
    assert waits == [0.0]


def test_a_rank_that_fails_while_it_writes_its_part_of_a_checkpoint_ends_the_leader_at_once(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A FIFO that nobody reads stands in for a slow disk."""
    ends = Ends()
    with started("megatron-2", folder) as backend:
        own: Any = backend
        own._followers._end_process = ends
        os.mkfifo(tmp_path / "__1_0.distcp")
        own.begin_save(tmp_path)
        follower = own._followers._processes[0][1]
        own._followers.send([Command(name="step", model="unknown")])
        assert ends.ended.wait(60)
        follower.join()  # the leader ends with it
    assert re.search(r"rank 1 \(pid \d+\) is gone: it failed: KeyError: 'unknown'", capfd.readouterr().err)


def test_a_checkpoint_of_a_larger_model_is_refused_before_any_rank_is_told(folder: Path, tmp_path: Path) -> None:
    larger = tiny_model(tmp_path / "larger", num_layers=3)
    with started("megatron-1", larger) as backend:
        backend.save(tmp_path / "saved")
    ends = Ends()
    with started("megatron-2", folder) as backend:
        own: Any = backend
        own._followers._end_process = ends
        with pytest.raises(CheckpointError, match="which the model or its adapters lack"):
            backend.restore(tmp_path / "saved")
        backend.step(shares("megatron-2", documents()), learning_rate=LEARNING_RATE)  # all ranks are there
    assert not ends.codes


def test_ranks_go_on_after_a_sigterm_to_every_process_so_that_the_leader_can_drain(folder: Path) -> None:
    with started("megatron-2", folder) as backend:
        backend.step(shares("megatron-2", documents(0)), learning_rate=LEARNING_RATE)
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        for pid in (server, follower_pid(backend)):
            os.kill(pid, signal.SIGTERM)
        backend.step(shares("megatron-2", documents(1)), learning_rate=LEARNING_RATE)
        assert os_process.is_alive(server)
