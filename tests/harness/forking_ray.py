"""Ray's launcher with processes forked by the server that ASYNCRL_TEST_FORKS names (forks.py): a learner and a worker
of a real model import for seconds each."""

from __future__ import annotations

from typing import Final

from asyncrl.launch.launchers.process_agent import ProcessAgent
from asyncrl.launch.launchers.ray import RayLauncher
from tests.harness.forked import SOCKET

FORKING_RAY: Final = "tests.harness.forking_ray:ForkingRayLauncher"
NAMES_THE_SERVER: Final = f'launcher.options.environment=["{SOCKET}"]'
"""Override that every run with this launcher needs."""


class ForkingAgent(ProcessAgent):
    """Starts a client of the fork server in the place of the process: it ends with the agent, and the fork with it."""

    program = ("-m", "tests.harness.fork_client")


class ForkingRayLauncher(RayLauncher):
    agent_type = ForkingAgent
