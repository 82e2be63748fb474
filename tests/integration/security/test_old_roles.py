"""A server with roles written by an older asyncrl: which roles it refuses, and how it gets new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.nats_server.accounts import account_name
from asyncrl.errors import ConfigError
from asyncrl.messages.topics import PROGRESS, PROMPTS, ROLES
from tests.harness.buses import progress, prompt, taken
from tests.harness.roles import RUNS, Server, connected


@pytest.fixture
def old_server(tmp_path: Path) -> Iterator[Server]:
    """A server as an older asyncrl configured it: one account for all roles, in which workers make their consumer."""
    made = Server(tmp_path / "server", layout=one_account)
    yield made
    made.close()


def one_account(config: dict[str, Any]) -> dict[str, Any]:
    for run in RUNS:
        users = [user for role in ROLES for user in config["accounts"].pop(account_name(run, role))["users"]]
        for user in users[1:]:
            allowed = user["permissions"]["publish"]["allow"]
            user["permissions"]["publish"]["allow"] = [one for one in allowed if "CONSUMER.INFO" not in one]
        config["accounts"][run] = {"jetstream": "enabled", "users": users}
    return config


async def test_roles_of_an_older_version_are_refused_in_one_line_that_mends_them(old_server: Server) -> None:
    async with connected(old_server, "learner") as learner, connected(old_server, "observer") as observer:
        await learner.put(PROGRESS, progress(1))
        assert (await observer.states(PROGRESS))[""].step == 1
        with pytest.raises(ConfigError, match="write the server's roles again with bin/nats-config") as error:
            async with asyncio.timeout(60), connected(old_server, "rollout-worker"):
                pass
    assert "\n" not in str(error.value)


async def test_a_server_gets_new_roles_by_two_reloads_and_loses_nothing(old_server: Server) -> None:
    """nats-server connects accounts that a reload added only at the next reload."""
    async with connected(old_server, "learner") as learner:
        await learner.publish(PROMPTS, prompt(1), key="1")
        old_server.write_again()
        await asyncio.to_thread(old_server.reload)
        with pytest.raises(ConfigError, match="after bin/nats-config, reload it twice"):
            async with asyncio.timeout(60), connected(old_server, "rollout-worker"):
                pass
        await asyncio.to_thread(old_server.reload)
        async with connected(old_server, "rollout-worker") as rollout, taken(rollout, 1) as (delivery,):
            assert delivery.key == "1"
            await delivery.ack()
        assert await learner.depth(PROMPTS) == 0
