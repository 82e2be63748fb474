"""[launcher.options] of the Ray launcher: the cluster, and what each role takes of its machines."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from asyncrl.errors import ConfigError
from asyncrl.launch.launchers.ray_placement import Strategy

_REACH_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Resources that each process of a role takes of its machine."""

    cpus: float = 1.0
    """CPUs to reserve; Ray also sets OMP_NUM_THREADS to this number."""
    gpus: float = -1.0
    """-1: a GPU for each rank of the learner (tensor_parallel for each worker), none if the cluster has none or the
    role's device is "cpu". A fraction shares one."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Labels that its machine must have (`ray start --labels`), with Ray's operators: "H100", "in(a,b)", "!b"."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """Custom resources that it takes; {"node:10.0.0.7" = 0.001} puts it on that machine."""

    def __post_init__(self) -> None:
        if not self.cpus > 0:
            raise ConfigError(f"cpus must be > 0, got {self.cpus}")
        if self.gpus < 0 and self.gpus != -1:
            raise ConfigError(f"gpus must be >= 0, or -1 for what the run file says, got {self.gpus}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """[launcher.options] of the Ray launcher."""

    address: str = ""
    """HOST:PORT of the cluster's head. Empty: RAY_ADDRESS, else the cluster that this machine is a node of, else a new
    one of this machine alone, for this run. "auto": the same, and refused if there is none."""
    strategy: Strategy = "PACK"
    """How processes are placed on machines (launch/launchers/ray_placement.py)."""
    learner: Role = field(default_factory=Role)
    """Resources of the learner: cpus, gpus, labels, resources."""
    rollout_worker: Role = field(default_factory=Role)
    """Resources of each rollout worker, likewise."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that processes get from `asyncrl run`; others are those of their own machine."""
    wait_for_nodes: bool = False
    """Wait for machines that will join (Ray's autoscaler) instead of refusing what the cluster cannot hold now."""


def require_answer(address: str) -> None:
    """Fail early if no cluster answers: Ray itself tries for minutes. Raises ConfigError."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"launcher.options: address {address}: `asyncrl run` must be on a node of the cluster, so ray:// does not "
            "work; start it there and give HOST:PORT of the head"
        )
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"launcher.options: address {address}: no Ray cluster answers ({error.strerror or error}); "
            "start one with `ray start --head`"
        ) from None
