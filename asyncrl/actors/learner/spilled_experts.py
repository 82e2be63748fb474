"""Keeps the experts of groups that wait to be trained in files instead of memory (learner.experts_directory).

A token of a large mixture carries hundreds of bytes of experts (48 layers x 8), a hundred times what the rest of it
takes. The file of a group is deleted as soon as it is mapped, so nothing is left of a learner that dies, and its disk
is free when the group is. The kernel reads pages ahead when a batch is packed, and drops them when memory is short.
As slime's --rollout-routed-experts-store-dir. Test: tests/actors/learner/test_spilled_experts.py.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from asyncrl.messages import TrajectoryGroup
from asyncrl.messages.routing import ExpertArray


def spill(group: TrajectoryGroup, folder: Path) -> TrajectoryGroup:
    """Return the group with its experts in a file of ``folder``; unchanged if it has none. Raises OSError."""
    arrays = [trajectory.experts for trajectory in group.trajectories]
    if not any(map(len, arrays)):
        return group
    mapped = _map([np.ascontiguousarray(array) for array in arrays], folder)
    trajectories = tuple(
        dataclasses.replace(trajectory, experts=experts)
        for trajectory, experts in zip(group.trajectories, mapped, strict=True)
    )
    return dataclasses.replace(group, trajectories=trajectories)


def _map(arrays: list[ExpertArray], folder: Path) -> list[ExpertArray]:
    """Write arrays to a file and return them as views of it. One mapping a group, and no open file."""
    handle, name = tempfile.mkstemp(prefix="experts-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            for array in arrays:
                file.write(array.data)
        size = sum(array.nbytes for array in arrays)
        whole = torch.from_file(name, shared=False, size=size, dtype=torch.uint8).numpy()  # mmap, without a descriptor
    except RuntimeError as error:  # torch's for an mmap that fails, as with more than vm.max_map_count of them
        raise OSError(str(error)) from error
    finally:
        os.unlink(name)
    whole.flags.writeable = False
    ends = np.cumsum([array.nbytes for array in arrays])
    return [
        whole[end - array.nbytes : end].view(array.dtype).reshape(array.shape)
        for array, end in zip(arrays, ends, strict=True)
    ]
