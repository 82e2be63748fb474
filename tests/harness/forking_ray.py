"""Ray's launcher with processes forked by the server that ASYNCRL_TEST_FORKS names (forks.py): a learner and a worker
of a real model import for seconds each."""

from __future__ import annotations

import dataclasses
from typing import Final

from asyncrl.launch.launchers.process_agent import LaunchRequest
from asyncrl.launch.launchers.ray import RayLauncher
from asyncrl.launch.port import ProcessSpec
from tests.harness.forked import SOCKET

FORKING_RAY: Final = "tests.harness.forking_ray:ForkingRayLauncher"
NAMES_THE_SERVER: Final = f'launcher.options.environment=["{SOCKET}"]'
"""Override that every run with this launcher needs."""


class ForkingRayLauncher(RayLauncher):
    """Starts a client of the fork server in the place of the process: it ends with its agent, and the fork with it."""

    def _launch_request(self, spec: ProcessSpec) -> LaunchRequest:
        asked = super()._launch_request(spec)
        return dataclasses.replace(asked, arguments=("-m", "tests.harness.fork_client", *spec.arguments))
