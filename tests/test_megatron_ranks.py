"""The Megatron backend's ranks: processes that start, agree, save, and end together."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.backends import huggingface
from asyncrl.errors import BackendError, CheckpointError, ConfigError
from tests.backend_fixtures import LEARNING_RATE, distance, documents, shares, started, tiny_model, weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_a_second_backend_in_one_process_is_refused(folder: Path) -> None:
    with started("megatron-1", folder), pytest.raises(BackendError, match="in use"), started("megatron-1", folder):
        pass


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
    """Data-parallel and tensor-parallel at once, several micro-batches a rank."""
    results = {}
    for kind in ("reference", "megatron-4"):
        with started(kind, folder) as backend:
            for step in range(2):
                backend.step(shares(kind, documents(step), max_tokens=30), learning_rate=LEARNING_RATE)
            results[kind] = weights(backend)
    assert distance(results["reference"], results["megatron-4"]) < 1e-5


@pytest.mark.slow
def test_a_checkpoint_of_other_shards_is_refused_with_the_setting_that_reads_it(folder: Path, tmp_path: Path) -> None:
    with started("megatron-tp2", folder) as backend:
        backend.save(tmp_path)
    with (
        started("megatron-1", folder) as backend,
        pytest.raises(CheckpointError, match="learner.tensor_parallel = 2"),
    ):
        backend.restore(tmp_path)


def test_a_model_that_cannot_be_cut_so_often_is_a_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads, 2"):
        huggingface.require_divisible(huggingface.read_shape(folder), 4)


def follower_pid(backend: Any) -> int:
    return int(backend._followers._links[0][2].pid)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["waiting", "scoring", "restoring"])
def test_a_dead_follower_is_an_error_and_not_a_hang(folder: Path, tmp_path: Path, moment: str) -> None:
    """Killed while it waits for a command, or by an error of its own in the midst of one (rank 0 waits for it then)."""
    with started("megatron-2", folder) as backend:
        if moment == "waiting":
            os.kill(follower_pid(backend), signal.SIGKILL)
            with pytest.raises(BackendError, match="rank 1.*exit code -9"):
                backend.step(shares("megatron-2", documents()), learning_rate=LEARNING_RATE)
        elif moment == "scoring":  # which meets in no collective
            os.kill(follower_pid(backend), signal.SIGKILL)
            with pytest.raises(BackendError, match="rank 1.*exit code -9"):
                backend.score(shares("megatron-2", documents()))
        else:
            (tmp_path / "rank-00001.safetensors").mkdir()  # a file cannot be written there
            with pytest.raises(BackendError, match="rank 1.*exit code 1"):
                backend.save(tmp_path)


@pytest.mark.slow
def test_followers_die_with_a_killed_leader(folder: Path) -> None:
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from tests.backend_fixtures import started
if __name__ == "__main__":
    with started("megatron-2", Path({str(folder)!r})) as backend:
        print(backend._followers._links[0][2].pid, flush=True)
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
        is_over, _, _ = select.select([follower], [], [], 30.0)
        os.close(follower)
    assert is_over
