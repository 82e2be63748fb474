"""Dealing GPUs to the processes of a run as the run file says; an impossible run file gets a one-line error."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch.launchers.placement import Asked, Placement, check_memory, place, visible_devices


def placed(num_gpus: int, **changes: Any) -> Placement:
    return place(num_gpus, **({"ranks": 1, "workers": 2, "gpus_per_worker": 1} | changes))


def test_learner_takes_the_first_gpus_and_workers_the_next() -> None:
    assert placed(4, ranks=2) == Placement(learner=(0, 1), workers=((2,), (3,)))
    assert placed(8, ranks=2, workers=3, gpus_per_worker=2) == Placement(
        learner=(0, 1), workers=((2, 3), (4, 5), (6, 7))
    )


def test_workers_share_gpus_when_none_is_left() -> None:
    assert placed(3, workers=5).workers == ((1,), (2,), (1,), (2,), (1,))
    assert placed(4, workers=2, gpus_per_worker=2).workers == ((1, 2), (3, 1))


def test_workers_that_need_more_gpus_than_are_left_share_with_the_learner() -> None:
    assert placed(2, workers=1, gpus_per_worker=2) == Placement(learner=(0,), workers=((0, 1),))


def test_processes_on_the_cpu_get_no_gpu() -> None:
    assert placed(2, ranks=0) == Placement(learner=(), workers=((0,), (1,)))
    assert placed(2, gpus_per_worker=0) == Placement(learner=(0,), workers=((), ()))


def test_servers_and_pools_of_workers_get_gpus_that_nothing_else_has() -> None:
    servers = {"judge": Asked(where="servers.judge", each=2), "small": Asked(where="servers.small", each=0)}
    pools = {"long": Asked(where="rollout.pools.long", each=2, count=1)}
    found = placed(8, servers=servers, pools=pools)
    assert found == Placement(
        learner=(0,),
        servers={"judge": (1, 2), "small": ()},
        pools={"long": ((3, 4),)},
        workers=((5,), (6,)),
    )
    assert str(found) == "learner 0; judge 1, 2; w0 5; w1 6; long-0 3, 4"
    on_its_gpu = {"judge": Asked(where="servers.judge", each=1, given=(0,))}
    assert placed(2, servers=on_its_gpu, workers=1) == Placement(learner=(0,), servers={"judge": (0,)}, workers=((1,),))
    assert placed(0, servers=servers, pools=pools).processes["long-0"] == ()


@pytest.mark.parametrize(
    ("num_gpus", "asked", "says"),
    [
        (
            2,
            Asked(where="servers.judge", each=2),
            "servers.judge: it needs 2 GPUs, and of this machine's 2 the learner",
        ),
        (2, Asked(where="servers.judge", each=1, given=(7,)), "servers.judge.gpus: there is no GPU 7"),
        (4, Asked(where="servers.judge", each=2, given=(1, 2, 3)), "are not the GPUs of processes that take 2 each"),
        (1, Asked(where="servers.judge", each=1, given=(0,)), "servers and pools of workers leave 0"),
    ],
)
def test_a_server_without_room_is_refused(num_gpus: int, asked: Asked, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        placed(num_gpus, servers={"judge": asked})


def test_run_file_overrides_the_assignment() -> None:
    assert placed(4, ranks=2, learner_gpus=(3, 2)) == Placement(learner=(3, 2), workers=((0,), (1,)))
    assert placed(4, rollout_gpus=(3, 1), workers=3).workers == ((3,), (1,), (3,))
    assert placed(4, rollout_gpus=(3, 1, 2), workers=2, gpus_per_worker=2).workers == ((3, 1), (2, 3))
    assert placed(2, learner_gpus=(1,), rollout_gpus=(1,)) == Placement(learner=(1,), workers=((1,), (1,)))


def test_ranks_may_not_share_a_gpu() -> None:
    with pytest.raises(ConfigError, match="2 ranks need 2 GPUs, this machine has 1"):
        placed(1, ranks=2)
    with pytest.raises(ConfigError, match="names a GPU twice"):
        placed(1, ranks=2, learner_gpus=(0, 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learner_gpus": (2,)}, "learner.gpus: there is no GPU 2; this machine has 2, numbered from 0"),
        ({"rollout_gpus": (0, -1)}, "rollout.gpus: there is no GPU -1"),
        ({"num_gpus": 0, "rollout_gpus": (0,)}, "there is no GPU 0; this machine has none that torch sees"),
        ({"ranks": 2, "learner_gpus": (0,)}, "names 1 GPUs for 2 ranks"),
        ({"learner_gpus": (0, 1)}, "names 2 GPUs for 1 ranks"),
        ({"rollout_gpus": (1, 1)}, "names a GPU twice"),
        ({"rollout_gpus": (1,), "gpus_per_worker": 2}, "a worker needs 2 GPUs"),
        ({"gpus_per_worker": 4}, "tensor_parallel: a worker needs 4 GPUs, this machine has 2"),
    ],
)
def test_refuses_impossible_assignments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        placed(**({"num_gpus": 2} | changes))
    assert message in str(refused.value)


def test_refuses_more_processes_than_memory_could_hold() -> None:
    counts = {"ranks": 1, "workers": 60, "evaluation_workers": 3}
    check_memory(**counts, machine_bytes=2**30)  # 64 processes of 16 MiB
    with pytest.raises(
        ConfigError, match="evaluation.workers: 100 processes, and this machine's 1 GiB .* than 64 even"
    ):
        check_memory(**counts | {"evaluation_workers": 100}, machine_bytes=2**30)


def test_child_gets_its_gpus_by_the_names_of_its_parent() -> None:
    assert visible_devices((2, 3), inherited=None) == "2,3"
    assert visible_devices((0, 2), inherited="4, 5,7") == "4,7"
    assert visible_devices((1,), inherited="GPU-aa,GPU-bb") == "GPU-bb"


def test_evaluation_workers_come_last_or_get_their_own_gpus() -> None:
    placed = place(8, ranks=2, workers=3, gpus_per_worker=1, evaluation_workers=2)
    assert placed.processes == {"learner": (0, 1), "w0": (2,), "w1": (3,), "w2": (4,), "e0": (5,), "e1": (6,)}
    given = place(8, ranks=2, workers=3, gpus_per_worker=1, evaluation_workers=2, evaluation_gpus=[7])
    assert (given.workers, given.evaluation_workers) == (placed.workers, ((7,), (7,)))
    assert place(0, ranks=1, workers=1, gpus_per_worker=1, evaluation_workers=1).evaluation_workers == ((),)
    with pytest.raises(ConfigError, match="evaluation.gpus: there is no GPU 9"):
        place(8, ranks=1, workers=1, gpus_per_worker=1, evaluation_workers=1, evaluation_gpus=[9])
