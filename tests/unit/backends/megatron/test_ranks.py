"""Ranks of the Megatron backend: processes that start, agree, save, and end together."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.backends import huggingface, weight_cuts
from asyncrl.backends.megatron.followers import ChildRanks
from asyncrl.backends.megatron.rank_commands import Job, Place
from asyncrl.config.layout import Layout
from asyncrl.errors import BackendError, CheckpointError, ConfigError, StepFailed
from tests import ROOT
from tests.harness.backends import (
    LEARNING_RATE,
    critic,
    distance,
    documents,
    shares,
    started,
    tiny_model,
    weights,
)
from tests.harness.ranks import Ends, follower_pid

pytestmark = pytest.mark.xdist_group("layouts")


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


def test_ranks_of_one_machine_find_each_other_without_listening_to_others(folder: Path) -> None:
    own = os.getpid()
    before = listening(own)
    with started("megatron-1", folder):
        opened = [one for one in listening(own) if one not in before]
    assert {"0.0.0.0", "::"}.isdisjoint(one.ip for one in opened), opened
    assert "127.0.0.1" in {one.ip for one in opened}


def listening(pid: int) -> list[Any]:
    """Return the addresses at which a process listens."""
    return [one.laddr for one in psutil.Process(pid).net_connections() if one.status == psutil.CONN_LISTEN]


def test_a_backend_that_is_not_started_says_so(folder: Path) -> None:
    with started("megatron-1", folder) as backend:
        pass
    with pytest.raises(BackendError, match="not started"):
        backend.export()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"distributed_optimizer": False}, {}], ids=["replicated", "distributed"])
def test_a_checkpoint_restores_on_another_number_of_ranks(
    folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    with started("megatron-2", folder, options=options) as backend:
        backend.step(shares("megatron-2", documents(0)), learning_rate=LEARNING_RATE)
        backend.save(tmp_path / "two")
        backend.step(shares("megatron-2", documents(1)), learning_rate=LEARNING_RATE)
        expected = weights(backend)
    with started("megatron-1", folder) as backend:
        backend.restore(tmp_path / "two")
        backend.save(tmp_path / "one")
        backend.step(shares("megatron-1", documents(1)), learning_rate=LEARNING_RATE)
        assert distance(weights(backend), expected) < 1e-5
    with started("megatron-2", folder, options=options) as backend:
        backend.restore(tmp_path / "one")
        backend.step(shares("megatron-2", documents(1)), learning_rate=LEARNING_RATE)
        assert distance(weights(backend), expected) == 0.0


@pytest.mark.slow
def test_two_models_on_two_ranks_each_train_as_one(folder: Path) -> None:
    """Data parallelism and tensor parallelism at once, with several micro-batches per rank."""
    results = {}
    for kind in ("reference", "megatron-4"):
        with started(kind, folder) as backend:
            for step in range(2):
                backend.step(shares(kind, documents(step), max_tokens=30), learning_rate=LEARNING_RATE)
            results[kind] = weights(backend)
    assert distance(results["reference"], results["megatron-4"]) < 1e-5


def test_a_model_that_cannot_be_cut_so_often_is_a_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads, 2"):
        weight_cuts.require_divisible(huggingface.read_shape(folder), 4)


@pytest.mark.slow
def test_ranks_that_cannot_write_all_try_again_together(folder: Path, tmp_path: Path) -> None:
    """A folder blocks the file of rank 1, but not the leader's. Once it is gone, all ranks save while a step runs."""
    with started("megatron-2", folder) as backend:
        backend.step(shares("megatron-2", documents(0)), learning_rate=LEARNING_RATE)
        taken = tmp_path / "one" / "__1_0.distcp"
        taken.mkdir(parents=True)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="1 other ranks could not write their part"):
                backend.save(tmp_path / "one")
        taken.rmdir()
        expected = weights(backend)
        beside: Any = backend
        beside.begin_save(tmp_path / "one")
        backend.step(shares("megatron-2", documents(1)), learning_rate=LEARNING_RATE)
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
def test_an_index_that_cannot_be_written_leaves_the_ranks_together(folder: Path, tmp_path: Path) -> None:
    """Only the leader writes the index. Its write fails for the policy; the critic's save comes next."""
    with started("megatron-2", folder, auxiliary={"critic": critic(folder)}) as backend:
        taken = tmp_path / "one" / "backend.json"
        taken.mkdir(parents=True)
        with pytest.raises(CheckpointError, match=r"cannot write backend\.json"):
            backend.save(tmp_path / "one")
        before = weights(backend)
        metrics = backend.step(shares("megatron-2", documents(0)), learning_rate=LEARNING_RATE).metrics
        taken.rmdir()
        backend.save(tmp_path / "one")
        backend.restore(tmp_path / "one")
    with started("megatron-1", folder) as backend:
        assert distance(before, weights(backend)) == 0.0
        expected = backend.step(shares("megatron-1", documents(0)), learning_rate=LEARNING_RATE).metrics
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["stepping", "scoring"])
def test_a_rank_that_fails_without_those_that_hold_the_same_copy_ends_the_backend(folder: Path, moment: str) -> None:
    """The other ranks wait for the failed rank within a layer, so the batch cannot be retried with fewer groups."""

    def fail(*_: Any) -> None:
        raise MemoryError("too little on this rank")

    with started("megatron-tp2", folder) as backend:
        own: Any = backend
        own._own._agreement._wait = timedelta(seconds=0.2)
        own._own._loaded["policy"]._outputs = fail
        with pytest.raises(BackendError, match="too little on this rank") as caught:
            if moment == "stepping":
                backend.step(shares("megatron-tp2", documents()), learning_rate=LEARNING_RATE)
            else:
                backend.score(shares("megatron-tp2", documents()))
        assert not isinstance(caught.value, StepFailed)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["waiting", "scoring", "saving"])
def test_a_dead_follower_is_an_error_and_not_a_hang(folder: Path, tmp_path: Path, moment: str) -> None:
    """The follower is killed while it waits for a command."""
    with started("megatron-2", folder) as backend:
        own: Any = backend
        own._followers._end_process = Ends()
        if moment == "waiting":
            os.kill(follower_pid(backend), signal.SIGKILL)
            with pytest.raises(BackendError, match="rank 1.*exit code -9"):
                backend.step(shares("megatron-2", documents()), learning_rate=LEARNING_RATE)
        elif moment == "scoring":  # scoring uses no collective
            os.kill(follower_pid(backend), signal.SIGKILL)
            with pytest.raises(BackendError, match="rank 1.*exit code -9"):
                backend.score(shares("megatron-2", documents()))
        else:
            backend.save(tmp_path)
            os.kill(follower_pid(backend), signal.SIGKILL)
            with pytest.raises(BackendError, match="rank 1.*exit code -9"):
                backend.save(tmp_path)


@pytest.mark.slow
def test_a_stopped_follower_ends_the_leader_in_one_line_that_names_it(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The leader asks for nothing meanwhile. A stopped follower ends with its leader all the same."""
    ends = Ends()
    with started("megatron-2", folder) as backend:
        own: Any = backend
        own._followers._end_process = ends
        for number in range(2):  # in its first step, which may compile kernels, a rank may be silent for longer
            backend.step(shares("megatron-2", documents(number)), learning_rate=LEARNING_RATE)
        pid = follower_pid(backend)
        os.kill(pid, signal.SIGSTOP)
        assert ends.ended.wait(300)
        own._followers._processes[0][1].join()
    assert ends.codes == [1]
    line = f"asyncrl learner: learner rank 1 (pid {pid}) is gone: it hangs: no sign of life for 6 s"
    assert line in capfd.readouterr().err.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["megatron-2", "megatron-tp2", "megatron-4"])
def test_a_rank_that_never_joins_a_collective_ends_the_leader_in_one_line(
    folder: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Like one whose GPU never ends a kernel, it gives signs of life. It never hears of the step here."""
    ends = Ends()
    with started(kind, folder) as backend:
        own: Any = backend
        own._followers._end_process = ends
        backend.step(shares(kind, documents(0)), learning_rate=LEARNING_RATE)
        own._own._agreement._wait = timedelta(seconds=0.2)
        send, own._timeout_seconds = own._followers.send, 2.0
        own._followers.send = lambda commands: send([None, *commands[1:]])
        capfd.readouterr()
        with pytest.raises(BackendError):  # the leader is not killed here; its followers are
            backend.step(shares(kind, documents(1)), learning_rate=LEARNING_RATE)
        assert ends.ended.wait(60)
    assert ends.codes[0] == 1
    assert capfd.readouterr().err.splitlines()[0] == (
        "asyncrl learner: step stands still for 2 s (learner.options.timeout_seconds): the learner's ranks wait for "
        "one that does not go on (look at the GPUs of all ranks), or that has much more to do than rank 0 (raise the "
        "timeout)"
    )


@pytest.mark.parametrize("lacking", ["descriptors", "processes", "threads", "watches"])
def test_ranks_of_which_one_cannot_be_started_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """The first rank starts, and is killed once the second one does not. The leader does not end with them."""
    layout = Layout(ranks=3)
    job = Job(  # on a GPU, so that each process is a new one
        models={},
        temperature=1.0,
        device="cuda",
        dtype="float32",
        threads=1,
        layout=layout,
        is_distributed_optimizer=False,
        recompute="none",
        is_offloading=False,
        transformer={},
    )
    places = [Place(rank=rank, ranks=3, host="127.0.0.1", port=1, timeout_seconds=60.0) for rank in (1, 2)]
    resource_tracker.ensure_running()  # the first process would start it, and it stays
    owner, name = {"descriptors": (socket, "socketpair"), "processes": (SpawnProcess, "start")}.get(
        lacking, (threading.Thread, "start")
    )
    failing = {"threads": ("rank-link", 4), "watches": ("rank-watch", 2)}  # a link has two threads
    of, number = failing.get(lacking, ("", 2))
    works, calls = getattr(owner, name), list[object]()

    def fail_second(*arguments: Any) -> Any:
        if not of or arguments[0].name == of:
            calls.append(arguments)
            if len(calls) == number:
                raise RuntimeError("no threads") if of else OSError(errno.EMFILE, f"too many {lacking}")
        return works(*arguments)

    def links() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name in ("rank-link", "rank-watch")]

    monkeypatch.setattr(owner, name, fail_second)
    before, open_before = links(), os.listdir("/proc/self/fd")
    problem = (
        "the learner cannot watch its ranks: no threads" if lacking == "watches" else "rank 2 cannot be started: .*"
    )
    ends = Ends()
    with pytest.raises(BackendError, match=problem):
        ChildRanks(job, places, end=ends)
    assert not multiprocessing.active_children()
    for thread in set(links()) - set(before):
        thread.join(60)
        assert not thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) == len(open_before)
    assert not ends.codes


@pytest.mark.slow
def test_a_leader_ends_with_a_follower_that_ends_before_it_has_joined(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The follower finds no GPU, or no leader to join, and ends. The leader asks for nothing meanwhile."""
    ends = Ends()
    with started("megatron-1", folder) as backend:
        job = dataclasses.replace(backend._job, device="cuda")  # type: ignore[attr-defined]
    place = Place(rank=1, ranks=2, host="127.0.0.1", port=1, timeout_seconds=100.0)
    ranks = ChildRanks(job, [place], end=ends)
    assert ends.ended.wait(300)
    assert ends.codes == [1]
    line = r"^asyncrl learner: learner rank 1 \(pid \d+\) is gone: it failed: \w+: .+$"
    assert re.search(line, capfd.readouterr().err, re.MULTILINE)
    ranks.close_links()
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["is killed", "exits without closing them"])
def test_followers_end_with_a_leader_that(folder: Path, end: str) -> None:
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.harness.backends import started
if __name__ == "__main__":
    kept = started("megatron-2", Path({str(folder)!r}))
    backend = kept.__enter__()
    print(backend._followers._processes[0][1].pid, flush=True)
    sys.stdin.read()
    import builtins
    builtins.kept = kept  # otherwise the generator would close the backend
"""
    path = folder.parent / "leader.py"
    path.write_text(script)
    with subprocess.Popen(
        [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as leader:
        assert leader.stdin is not None
        assert leader.stdout is not None
        follower = os.pidfd_open(int(leader.stdout.readline()))
        if end == "is killed":
            leader.kill()
        else:
            leader.stdin.close()
        ended = select.poll()  # select() takes no descriptor above 1,023
        ended.register(follower, select.POLLIN)
        is_over = ended.poll(30_000)
        os.close(follower)
        leader.wait(60)
    assert is_over


def test_a_child_rank_whose_learner_has_ended_in_its_start_says_so_in_one_line() -> None:
    program = """
import socket
from asyncrl.backends.megatron.followers import follow
from asyncrl.backends.megatron.rank_commands import Place

learner, own = socket.socketpair()
learner.close()
follow(None, Place(rank=3, ranks=4, host="127.0.0.1", port=1, timeout_seconds=60.0), own)
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1
    assert re.fullmatch(r"asyncrl learner: rank 3: the learner has ended: .*\n", ended.stderr), ended.stderr
