"""Models whose tensor-parallel ranks exchange rows beside their products train as models without do.

Two processes have windows in shared memory and gloo's barriers; on GPUs see test_two_gpus.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from asyncrl.backends.megatron import overlapped_linear, process_groups
from asyncrl.backends.megatron.job import Command, Job, Options
from asyncrl.backends.megatron.overlapped_linear import Exchange
from asyncrl.backends.megatron.rank import MegatronRank
from asyncrl.backends.megatron.rank_group import RankInfo, open_store
from asyncrl.backends.models import POLICY, AuxiliaryModel
from asyncrl.backends.optimizer_settings import Lora
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching.packing import MicroBatch
from tests.harness.backends import LAYOUTS, LEARNING_RATE, SETTINGS, sequences, shares, tiny_model
from tests.harness.ports import free_ports

KIND = "megatron-tp2"
ROWS = (sequences(0), sequences(1, (3, 5)), sequences(2, (33, 12, 7, 39, 22)))
"""Of one step each. Later rows are shorter or longer, so that windows grow."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "frozen": {"freeze": ("model.embed_tokens*", "model.layers.0.*")},
    "experts": {"architecture": "qwen3_moe", "recompute": "full"},
    "latent attention": {"architecture": "deepseek_v3"},
    "adapters": {"lora": Lora(rank=4, alpha=8.0, modules=("all-linear",)), "recompute": "selective"},
}


class Window:
    """See overlapped_linear.Memory."""

    def __init__(self, folder: Path, numbers: itertools.count[int], group: Any, num_bytes: int) -> None:
        self.num_bytes, self._group = num_bytes, group
        number = next(numbers)
        files = [folder / f"{number}.{rank}" for rank in range(group.size())]
        files[group.rank()].write_bytes(b"\xff" * num_bytes)
        dist.barrier(group)
        self._memory = [torch.from_file(str(file), shared=True, size=num_bytes, dtype=torch.uint8) for file in files]

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made: torch.Tensor = self._memory[rank][: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
        return made

    def barrier(self) -> None:
        dist.barrier(self._group)


def trained(rank: int, job: Job, port: int, rows: list[list[MicroBatch]]) -> list[torch.Tensor]:
    """Return the logprobs before each step (of rank 0), and the weights of this rank after all."""
    info = RankInfo(rank=rank, ranks=2, host="127.0.0.1", port=port, timeout_seconds=60.0)
    one, logprobs = MegatronRank(job, info, store=open_store(info)), []
    for share in map(tuple, rows):
        told = one.execute(Command(name="forward", micro_batches=share))
        logprobs += [torch.from_numpy(one) for one in told.rows] if told else []
        one.execute(Command(name="step", micro_batches=share, learning_rate=LEARNING_RATE))
    found = [tensor.detach().clone() for tensor in one._loaded[POLICY].tensors()]
    one.close()
    return [*logprobs, *found]


def work(rank: int, jobs: dict[str, tuple[Job, Job]], ports: list[int], folder: Path) -> None:
    """Write to a file what each pair of jobs made, and how many windows the second used."""
    overlapped_linear._STEP_BYTES = 4096
    numbers = itertools.count()
    process_groups._make_exchange = lambda group, layout: Exchange(
        partial(Window, folder, numbers, group), rank=rank, size=2, device=torch.device("cpu")
    )
    rows = [shares(KIND, each, max_tokens=120)[0] for each in ROWS]
    made = {}
    for number, (name, (plain, overlapped)) in enumerate(jobs.items()):
        expected = trained(rank, plain, ports[2 * number], rows)
        before = next(numbers)
        got = trained(rank, overlapped, ports[2 * number + 1], rows)
        made[name] = (expected, got, next(numbers) - before - 1)
    torch.save(made, folder / f"made.{rank}")


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_ranks_that_exchange_rows_during_products_train_the_same(tmp_path: Path) -> None:
    jobs = {}
    for name, case in CASES.items():
        settings = dict(case)
        recompute = settings.pop("recompute", "none")
        architecture = settings.pop("architecture", "qwen3")
        if not (folder := tmp_path / architecture).exists():
            tiny_model(folder, architecture=architecture)
        policy = AuxiliaryModel(
            path=folder,
            objective=resolve(ALGORITHMS["grpo"]),
            optimizer=dataclasses.replace(SETTINGS, **settings),
        )
        plain = Job(
            models={POLICY: policy},
            temperature=1.0,
            device="cpu",
            dtype="float32",
            threads=1,
            layout=LAYOUTS[KIND],
            options=Options(distributed_optimizer=False, overlap_tensor_parallel=False, recompute=recompute),
        )
        overlapping = dataclasses.replace(plain.options, overlap_tensor_parallel=True)
        jobs[name] = (plain, dataclasses.replace(plain, options=overlapping))
    # the server of this pytest process, which imports for several tests
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["asyncrl.backends.megatron.rank", "transformers.models.auto.modeling_auto"]
    )
    start_processes(  # type: ignore[no-untyped-call]
        work, args=(jobs, free_ports(2 * len(jobs)), tmp_path), nprocs=2, start_method="forkserver"
    )
    for rank in range(2):
        made = torch.load(tmp_path / f"made.{rank}", weights_only=True)
        assert made.keys() == CASES.keys()
        for expected, got, num_windows in made.values():
            assert num_windows > 2, "windows grow"
            assert len(expected) > (0 if rank else len(ROWS))
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
