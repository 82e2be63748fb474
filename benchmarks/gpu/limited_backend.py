"""The learner of an arm under MPS (mps.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from asyncrl.backends.megatron.backend import MegatronBackend
from asyncrl.config.adapter import RunConfig

_PERCENT: Final = "60"


class LimitedBackend(MegatronBackend):
    """The Megatron backend in a process that may use 60 % of the GPU's multiprocessors."""

    @classmethod
    def environments(cls, run: RunConfig, *, port: int) -> Sequence[Mapping[str, str]]:
        limit = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": _PERCENT}
        return tuple({**one, **limit} for one in super().environments(run, port=port))
