"""Ranks that join over TCP: admission, and the reasons that refused ranks are told."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from asyncrl.backends.megatron import joined_ranks, torchrun
from asyncrl.backends.megatron.backend import MegatronBackend
from asyncrl.backends.megatron.followers import Followers
from asyncrl.backends.megatron.options import Options
from asyncrl.backends.megatron.rank_commands import Command, Place
from asyncrl.backends.megatron.rank_link import RankLink
from asyncrl.errors import BackendError, ConfigError
from asyncrl.messages import codec
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from tests.harness.backends import LAYOUTS, SETTINGS, tiny_model
from tests.harness.ports import free_ports

COMMON = {"the code of asyncrl": "a", "learner.recompute": "b"}


def seat(rank: int, *, port: int, ranks: int = 2, secret: str = "secret") -> torchrun.Seat:
    return torchrun.Seat(rank=rank, ranks=ranks, local_rank=rank, host="127.0.0.1", port=port, secret=secret)


def join(one: torchrun.Seat, common: Mapping[str, str] = COMMON, seconds: float = 60.0) -> tuple[RankLink, Place]:
    return joined_ranks._join(one, common, timeout_seconds=seconds)


def gather(one: torchrun.Seat, seconds: float = 60.0) -> Followers:
    return joined_ranks.gather(one, COMMON, port=7, timeout_seconds=seconds)


def test_a_rank_that_joins_gets_commands_and_its_place() -> None:
    port = free_ports(1)[0]
    with ThreadPoolExecutor() as threads:
        learner = threads.submit(gather, seat(0, port=port))
        link, place = join(seat(1, port=port))
        ranks = learner.result()
        ranks.send([Command(name="step")])
        assert codec.decode(link.recv_bytes(), Command).name == "step"
        assert (place.rank, place.local_rank, place.port) == (1, 1, 7)
        ranks.close_links()
        assert link.recv_bytes() == b""  # a goodbye: an orderly end
        link.close()


def test_a_rank_with_another_secret_other_code_or_other_settings_is_refused_and_the_right_one_is_not() -> None:
    port = free_ports(1)[0]
    with ThreadPoolExecutor() as threads:
        learner = threads.submit(gather, seat(0, port=port))
        with pytest.raises(ConfigError, match="rank 1 is refused by 127.0.0.1: it has another ASYNCRL_LEARNER_SECRET"):
            join(seat(1, port=port, secret="guessed"))
        with pytest.raises(ConfigError, match="differs from the learner in the code of asyncrl;"):
            join(seat(1, port=port), COMMON | {"the code of asyncrl": "old"})
        with pytest.raises(ConfigError, match=r"differs from the learner in learner\.recompute; start both"):
            join(seat(1, port=port), COMMON | {"learner.recompute": "other"})
        link, _ = join(seat(1, port=port))
        learner.result().close_links()
        link.close()


@pytest.mark.parametrize("other", ["weights", "configuration"])
def test_a_rank_whose_folder_holds_another_model_is_refused(tmp_path: Path, other: str) -> None:
    """The ranks would train a mixture of both models. Tools that copy a folder may rewrite the version in it."""
    port = free_ports(1)[0]
    folder = tiny_model(tmp_path / "model")
    shutil.copytree(folder, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    changed = config | {"transformers_version": "0"}
    if other == "weights":
        tensors = load_file(folder / "model.safetensors")
        shifted = {name: tensor + 0.01 for name, tensor in tensors.items()}
        save_file(shifted, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    else:
        changed["rms_norm_eps"] = 2 * config["rms_norm_eps"]
    (tmp_path / "other" / "config.json").write_text(json.dumps(changed))

    def made(folder: Path, rank: int) -> MegatronBackend:
        return MegatronBackend(
            folder,
            algorithm=resolve(ALGORITHMS["grpo"]),
            optimizer=SETTINGS,
            temperature=1.0,
            device="cpu",
            dtype="float32",
            threads=1,
            options=Options(timeout_seconds=3.0),
            layout=LAYOUTS["megatron-2"],
            seat=seat(rank, port=port),
        )

    with ThreadPoolExecutor() as threads:
        learner = threads.submit(made(folder, 0).start)
        with pytest.raises(ConfigError, match=rf"differs from the learner in the {other} of model\.path;"):
            made(tmp_path / "other", 1).serve()
        with pytest.raises(BackendError, match="rank 1 of 2 has not joined"):
            learner.result()


def test_a_stranger_that_says_nothing_sensible_keeps_nobody_out() -> None:
    port = free_ports(1)[0]
    with ThreadPoolExecutor() as threads:
        learner = threads.submit(gather, seat(0, port=port))
        with _connected(port) as stranger:
            stranger.sendall(b"\xff" * 64)  # a message of 2 ** 64 bytes
            link, _ = join(seat(1, port=port))
        ranks = learner.result()
        ranks.send([Command(name="step")])
        assert codec.decode(link.recv_bytes(), Command).name == "step"
        ranks.close_links()
        link.close()


def test_a_stranger_that_sends_a_byte_at_a_time_does_not_hold_up_the_learner_past_its_deadline() -> None:
    port = free_ports(1)[0]
    is_over = threading.Event()

    def drip() -> None:
        with _connected(port) as stranger, contextlib.suppress(OSError):
            stranger.sendall((60_000).to_bytes(8, "little"))
            while not is_over.wait(0.02):
                stranger.sendall(b"x")

    with ThreadPoolExecutor() as threads:
        dripping = threads.submit(drip)
        learner = threads.submit(gather, seat(0, port=port), 0.5)
        with pytest.raises(BackendError, match="rank 1 of 2 has not joined within 0.5 s"):
            learner.result(60)  # all bytes would take 20 minutes
        is_over.set()
        dripping.result()


def test_a_second_process_of_one_rank_is_refused_while_the_first_is_there() -> None:
    port = free_ports(1)[0]
    with ThreadPoolExecutor() as threads:
        learner = threads.submit(gather, seat(0, port=port, ranks=3))
        first, _ = join(seat(1, port=port, ranks=3))
        with pytest.raises(ConfigError, match=r"learner rank 1 on .* has joined already"):
            join(seat(1, port=port, ranks=3))
        other, _ = join(seat(2, port=port, ranks=3))
        learner.result().close_links()
        first.close()
        other.close()


def test_the_learner_says_which_ranks_have_not_joined() -> None:
    with pytest.raises(BackendError, match="rank 1, 2 of 3 has not joined within 0.1 s"):
        gather(seat(0, port=free_ports(1)[0], ranks=3), seconds=0.1)


def test_a_learner_whose_port_is_in_use_says_so_before_it_gives_up(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(BackendError, match=rf"cannot listen at 127.0.0.1:{port} \(MASTER_PORT\): .*in use"):
            gather(seat(0, port=port), seconds=0.1)
    assert [f"cannot listen at 127.0.0.1:{port} (MASTER_PORT) yet" in line for line in caplog.messages] == [True]


def test_a_rank_whose_learner_does_not_come_says_so() -> None:
    with pytest.raises(BackendError, match="rank 1: no learner at 127.0.0.1"):
        join(seat(1, port=free_ports(1)[0]), seconds=0.1)


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"WORLD_SIZE": "4"}, "learner.ranks: 2, and torchrun has started 4"),
        ({"RANK": ""}, "needs RANK, from 0 to 1"),
        ({"RANK": "2"}, "needs RANK, from 0 to 1"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR and MASTER_PORT"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK=one: must be a whole number"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(environment: dict[str, str], problem: str) -> None:
    (_, right) = torchrun.environments(ranks=2, machines=2, port=29500)
    with pytest.raises(ConfigError, match=problem):
        torchrun.seat(right | environment, ranks=2, secret="s")


def test_ranks_without_a_secret_are_refused() -> None:
    (first, _) = torchrun.environments(ranks=2, machines=2, port=29500)
    with pytest.raises(ConfigError, match="set ASYNCRL_LEARNER_SECRET"):
        torchrun.seat(first, ranks=2, secret="")


def test_ranks_of_one_machine_count_from_zero_there() -> None:
    seats = [torchrun.seat(one, ranks=4, secret="s") for one in torchrun.environments(ranks=4, machines=2, port=29500)]
    assert [(one.rank, one.local_rank) for one in seats if one is not None] == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_a_process_that_was_started_alone_has_no_seat() -> None:
    assert torchrun.seat({}, ranks=2, secret="") is None
    assert torchrun.seat({"WORLD_SIZE": "1", "RANK": "0"}, ranks=2, secret="") is None


def _connected(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            threading.Event().wait(0.02)  # until the port listens
