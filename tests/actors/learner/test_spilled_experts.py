"""Experts of groups that wait lie in files, not in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.actors.learner.spilled_experts import spill
from asyncrl.actors.learner.trajectory_reader import TrajectoryReader
from asyncrl.bus.port import Record
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.messages.routing import NO_EXPERTS


def group(*experts: np.ndarray) -> TrajectoryGroup:
    made = tuple(
        Trajectory(
            tokens=np.arange(4, 7, dtype=np.int32),
            response_mask=np.ones(3, np.bool_),
            behavior_logprobs=np.zeros(3, np.float32),
            version_spans=(VersionSpan(start=0, incarnation=0, policy_version=0),),
            reward=0.0,
            finish_reason="stop",
            experts=one,
        )
        for one in experts
    )
    return TrajectoryGroup(group_id=1, prompt_tokens=np.array([1], np.int32), trajectories=made, error="")


def mapped_files(folder: Path) -> list[str]:
    """Files of the folder that this process has mapped. Deleted ones are listed, too."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def test_spilled_experts_are_the_same_and_their_file_goes_with_the_group(tmp_path: Path) -> None:
    # 3 x 5 x 1 bytes end at an odd place, where the next array's 16-bit numbers begin.
    small = np.arange(15, dtype=np.uint8).reshape(3, 5, 1)
    large = np.arange(300, 330, dtype=np.uint16).reshape(3, 5, 2)
    kept = group(small, NO_EXPERTS, large)
    spilled = spill(kept, tmp_path)
    assert list(tmp_path.iterdir()) == []  # deleted as soon as it is mapped
    assert len(mapped_files(tmp_path)) == 1
    for ours, theirs in zip(spilled.trajectories, kept.trajectories, strict=True):
        np.testing.assert_array_equal(ours.experts, theirs.experts)
        assert (ours.experts.dtype, ours.experts.shape) == (theirs.experts.dtype, theirs.experts.shape)
        assert dataclasses.replace(ours, experts=NO_EXPERTS).reward == theirs.reward
    assert not spilled.trajectories[0].experts.flags.writeable
    del spilled, ours
    gc.collect()
    assert mapped_files(tmp_path) == []


def test_many_groups_need_no_open_files(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    groups = [spill(group(np.full((3, 2, 1), number, np.uint8)), tmp_path) for number in range(50)]
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert [int(one.trajectories[0].experts[0, 0, 0]) for one in groups] == list(range(50))


def test_a_file_that_cannot_be_mapped_is_an_error_of_the_disk_and_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("unable to mmap 6 bytes: Cannot allocate memory (12)")

    monkeypatch.setattr(torch, "from_file", fails)
    with pytest.raises(OSError, match="unable to mmap"):
        spill(group(np.zeros((3, 2, 1), np.uint8)), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_group_without_experts_is_left_alone(tmp_path: Path) -> None:
    plain = group(NO_EXPERTS, NO_EXPERTS)
    assert spill(plain, tmp_path) is plain


def reader(folder: Path) -> TrajectoryReader:
    others: Any = None
    return TrajectoryReader(
        others,
        table=others,
        validator=others,
        remover=others,
        progress=others,
        changed=asyncio.Event(),
        reconciled=asyncio.Event(),
        experts_in=folder,
    )


async def test_the_learner_keeps_the_experts_of_what_it_reads_on_disk(tmp_path: Path) -> None:
    experts = np.arange(6, dtype=np.uint8).reshape(3, 1, 2)
    record = Record(sequence=7, key="1", message=group(experts), num_bytes=11)
    read = await reader(tmp_path)._spill(record, tmp_path)
    assert (read.sequence, read.num_bytes) == (7, 11)
    assert read.message is not None
    np.testing.assert_array_equal(read.message.trajectories[0].experts, experts)
    assert len(mapped_files(tmp_path)) == 1
    torn: Record[TrajectoryGroup] = Record(sequence=8, key="2", message=None, problem="torn")
    assert await reader(tmp_path)._spill(torn, tmp_path) is torn


async def test_a_disk_that_takes_nothing_leaves_the_experts_in_memory_and_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = Record(sequence=7, key="1", message=group(np.zeros((3, 1, 2), np.uint8)))
    with caplog.at_level(logging.WARNING, logger="asyncrl.learner"):
        assert await reader(tmp_path)._spill(record, tmp_path / "gone") is record
    assert ["learner.experts_directory: " in line and "stay in memory" in line for line in caplog.messages] == [True]
