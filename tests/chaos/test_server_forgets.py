"""The server loses what it had: streams go, or its disk goes back in time. Noticed, named, mended; nothing is lost.

Real processes on a real nats-server whose store the test takes away.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from asyncrl.bus.nats_server.server import EmbeddedServer
from tests.chaos.test_trouble import assert_is_clean, log_of, storm_on
from tests.harness.forked import ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TIMES = int(os.environ.get("ASYNCRL_FORGETS", "1"))


async def test_a_server_whose_disk_goes_back_in_time_loses_no_group_and_trains_none_twice(
    own_server: EmbeddedServer, tmp_path: Path, forks: ForkServer
) -> None:
    """As after a loss of power: the store is as it was some steps ago, the checkpoints are not."""
    store, image = own_server.directory / "jetstream", tmp_path / "image"
    storm = storm_on(own_server, tmp_path, forks=forks)
    async with storm.up() as seen:
        for number in range(TIMES):
            await asyncio.to_thread(shutil.copytree, store, image)
            before = seen.step
            await storm.until(lambda at=before: seen.step[1] > at[1] + 5, "the run goes on")
            own_server.stop()
            shutil.rmtree(store)
            image.rename(store)
            own_server.start()
            after = seen.step
            await storm.until(lambda at=after: seen.step[1] > at[1] + 5, "the run goes on with the older store")
            assert log_of(storm, "learner").count("the bus lost what it had of the trajectory log") == number + 1
        pids = storm.pids()
        assert {"learner", "w0", "w1", "w2"} <= pids.keys()
    assert_is_clean(await asyncio.to_thread(storm.audit))
