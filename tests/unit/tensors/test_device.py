"""CPU threads where nobody says how many: torch's default, within what a container may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.tensors import device


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("limit", "cpus"), [("max 100000", 8), ("50000 100000", 1), ("250000 100000", 3), ("6400000 100000", 8), (None, 8)]
)
def test_by_default_torch_computes_with_no_more_threads_than_the_container_has_cpus(
    limit: str | None, cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_CPU_LIMIT", tmp_path / "cpu.max")
    if limit is not None:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    device.set_threads(0)
    assert torch.get_num_threads() == device.count_cpus() == cpus
    device.set_threads(5)
    assert torch.get_num_threads() == 5
