"""Ranks of the Megatron backend: processes that start, agree, save, and end together."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl import os_process
from asyncrl.backends.megatron.job import Command
from asyncrl.backends.megatron.rank_group import COMMAND, RankGroup, RankInfo, open_store
from asyncrl.backends.megatron.rank_process import ChildRanks
from asyncrl.errors import BackendError, CheckpointError
from asyncrl.messages import codec
from tests import ROOT
from tests.harness.backends import (
    LEARNING_RATE,
    distance,
    sequences,
    shares,
    started,
    tiny_model,
    weights,
)
from tests.harness.ranks import Ends, child_pid

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_a_second_backend_in_one_process_is_refused(folder: Path) -> None:
    with (
        started("megatron-1", folder),
        pytest.raises(BackendError, match="already initialised"),
        started("megatron-1", folder),
    ):
        pass


def test_unstarted_backend_raises(folder: Path) -> None:
    with started("megatron-1", folder) as backend:
        pass
    with pytest.raises(BackendError, match="not started"):
        backend.export()


@pytest.mark.slow
def test_a_checkpoint_restores_on_another_number_of_ranks(folder: Path, tmp_path: Path) -> None:
    """From ranks that each keep the whole optimizer; test_layouts.py moves checkpoints of a distributed one."""
    options = {"distributed_optimizer": False}
    with started("megatron-2", folder, options=options) as backend:
        backend.step(shares("megatron-2", sequences(0)), learning_rate=LEARNING_RATE)
        backend.save(tmp_path / "two")
        backend.step(shares("megatron-2", sequences(1)), learning_rate=LEARNING_RATE)
        expected = weights(backend)
    with started("megatron-1", folder) as backend:
        backend.restore(tmp_path / "two")
        backend.save(tmp_path / "one")
        backend.step(shares("megatron-1", sequences(1)), learning_rate=LEARNING_RATE)
        assert distance(weights(backend), expected) < 1e-5
    with started("megatron-2", folder, options=options) as backend:
        backend.restore(tmp_path / "one")
        backend.step(shares("megatron-2", sequences(1)), learning_rate=LEARNING_RATE)
        assert distance(weights(backend), expected) == 0.0


@pytest.mark.slow
def test_failed_save_can_be_repeated_on_all_ranks(folder: Path, tmp_path: Path) -> None:
    """A folder blocks the file of rank 1, but not the leader's. Once it is gone, all ranks save while a step runs."""
    with started("megatron-2", folder) as backend:
        backend.step(shares("megatron-2", sequences(0)), learning_rate=LEARNING_RATE)
        taken = tmp_path / "one" / "__1_0.distcp"
        taken.mkdir(parents=True)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="learner rank 1 cannot write its part"):
                backend.save(tmp_path / "one")
        taken.rmdir()
        expected = weights(backend)
        beside: Any = backend
        beside.begin_save(tmp_path / "one")
        backend.step(shares("megatron-2", sequences(1)), learning_rate=LEARNING_RATE)
        hashed = beside.finish_save(tmp_path / "one", wait=True)
        assert sorted(path.name for path in hashed) == ["__0_0.distcp", "__1_0.distcp"]
        assert distance(weights(backend), expected) > 0.0
        (other := tmp_path / "other").mkdir()
        (other / "backend.json").write_text('{"format": "reference"}')
        with pytest.raises(CheckpointError, match="is not a distributed checkpoint"):
            backend.restore(other)  # refused before any rank is told, so no rank ends
        backend.restore(tmp_path / "one")
        assert distance(weights(backend), expected) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["megatron-2", "megatron-pp2"])
def test_a_rank_that_fails_in_a_step_ends_the_backend_with_its_name_and_reason(folder: Path, kind: str) -> None:
    """The other ranks wait for it in a collective, which fails since the rank is gone."""
    made = sequences()
    if kind == "megatron-2":  # the last share is that of rank 1
        cut = shares(kind, made)
        broken = dataclasses.replace(cut[1][0], tokens=np.full_like(cut[1][0].tokens, 10**6))  # without an embedding
        cut[1][0] = broken
    with started(kind, folder) as backend:
        own: Any = backend
        own._group._end = ends = Ends()
        if kind == "megatron-2":
            with pytest.raises(BackendError, match=r"learner rank 1 \(pid \d+\) failed: IndexError"):
                backend.step(cut, learning_rate=LEARNING_RATE)
        else:
            own._group.send(codec.encode(Command(name="step", model="unknown")), 1, COMMAND)
            with pytest.raises(BackendError, match=r"learner rank 1 \(pid \d+\) failed: KeyError: 'unknown'"):
                backend.step(shares(kind, made), learning_rate=LEARNING_RATE)
    assert not ends.codes  # the learner has ended by itself


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["stepping", "scoring", "saving"])
def test_a_killed_rank_is_an_error_with_its_exit_code(folder: Path, tmp_path: Path, moment: str) -> None:
    with started("megatron-2", folder) as backend:
        own: Any = backend
        own._group._end = Ends()
        os.kill(child_pid(backend), signal.SIGKILL)
        with pytest.raises(BackendError, match=r"learner rank 1 \(pid \d+\) is gone: it ended with exit code -9"):
            if moment == "stepping":
                backend.step(shares("megatron-2", sequences()), learning_rate=LEARNING_RATE)
            elif moment == "scoring":  # scoring uses no collective
                backend.forward(shares("megatron-2", sequences()))
            else:
                backend.save(tmp_path)


@pytest.mark.slow
def test_a_stopped_rank_ends_the_backend_within_the_timeout(folder: Path) -> None:
    with started("megatron-2", folder, options={"timeout_seconds": 3.0}) as backend:
        own: Any = backend
        own._group._end = Ends()
        os.kill(child_pid(backend), signal.SIGSTOP)
        with pytest.raises(BackendError, match="^step failed on learner rank 0: .*[Tt]ime"):
            backend.step(shares("megatron-2", sequences()), learning_rate=LEARNING_RATE)


@pytest.mark.slow
def test_a_checkpoint_of_a_larger_model_is_refused_before_any_rank_is_told(folder: Path, tmp_path: Path) -> None:
    larger = tiny_model(tmp_path / "larger", num_layers=3)
    with started("megatron-1", larger) as backend:
        backend.save(tmp_path / "saved")
    with started("megatron-2", folder) as backend:
        with pytest.raises(CheckpointError, match="which the model or its adapters lack"):
            backend.restore(tmp_path / "saved")
        backend.step(shares("megatron-2", sequences()), learning_rate=LEARNING_RATE)  # all ranks are there


@pytest.mark.slow
def test_ranks_go_on_after_a_sigterm_to_every_process_so_that_the_learner_can_drain(folder: Path) -> None:
    with started("megatron-2", folder) as backend:
        backend.step(shares("megatron-2", sequences(0)), learning_rate=LEARNING_RATE)
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        for pid in (server, child_pid(backend)):
            os.kill(pid, signal.SIGTERM)
        backend.step(shares("megatron-2", sequences(1)), learning_rate=LEARNING_RATE)
        assert os_process.is_alive(server)


def test_ranks_and_their_fork_server_start_with_sigterm_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """multiprocessing unblocks it when it starts its resource tracker, which it does at the first process."""
    masks: list[set[Any]] = []
    is_tracking = False

    def track() -> None:
        nonlocal is_tracking
        if not is_tracking:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        is_tracking = True

    class Process(SimpleNamespace):
        def start(self) -> None:
            track()
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

        def kill(self) -> None: ...
        def join(self) -> None: ...
        def close(self) -> None: ...

    context = SimpleNamespace(Process=Process, set_forkserver_preload=lambda names: None)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    monkeypatch.setattr(resource_tracker, "ensure_running", track)
    job: Any = SimpleNamespace(device="cpu")
    ChildRanks(job, RankInfo(ranks=3, timeout_seconds=1.0)).kill()
    assert [signal.SIGTERM in mask for mask in masks] == [True, True]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.slow
def test_a_rank_that_cannot_start_ends_the_start_in_a_line_that_names_it(folder: Path) -> None:
    """It finds no GPU."""
    with started("megatron-1", folder) as backend:
        job = dataclasses.replace(backend._job, device="cuda")  # type: ignore[attr-defined]
    info = RankInfo(ranks=2, timeout_seconds=100.0)
    store = open_store(info)
    ranks = ChildRanks(job, dataclasses.replace(info, port=store.port))
    group = RankGroup(store, info, why_ended=ranks.why_ended, end=Ends())
    assert re.fullmatch(r"learner rank 1 \(pid \d+\) failed: \w+: .+", group.lost(within=300.0))
    group.close()
    ranks.close()


@pytest.mark.slow
def test_ranks_end_with_rank_0_that_is_killed(folder: Path) -> None:
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.harness.backends import started
if __name__ == "__main__":
    with started("megatron-2", Path({str(folder)!r})) as backend:
        print(backend._children._processes[1].pid, flush=True)
        sys.stdin.read()
"""
    path = folder.parent / "leader.py"
    path.write_text(script)
    with subprocess.Popen(
        [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as leader:
        assert leader.stdout is not None
        follower = os.pidfd_open(int(leader.stdout.readline()))
        leader.kill()
        ended = select.poll()  # select() takes no descriptor above 1,023
        ended.register(follower, select.POLLIN)
        is_over = ended.poll(60_000)
        os.close(follower)
        leader.wait(60)
    assert is_over
