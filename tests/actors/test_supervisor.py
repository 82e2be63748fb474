"""Actors that do not stop: asyncrl ends a process of its own, but never one that belongs to the caller."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from typing import Any

import pytest

from asyncrl.actors.base import Actor
from asyncrl.actors.supervisor import supervise


class Done(Actor):
    async def run(self) -> None:
        pass


class Deaf(Actor):
    """An actor that ignores its first cancellations."""

    lost = 0

    async def run(self) -> None:
        while self.lost < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.lost += 1


async def test_an_actor_that_lost_its_cancel_is_cancelled_again_where_the_process_is_somebody_elses(
    bus: Any, caplog: pytest.LogCaptureFixture
) -> None:
    deaf = Deaf("deaf", bus)
    await supervise(Done("done", bus), deaf, stop_seconds=0.05, owns_process=False)
    assert deaf.lost == 3
    assert {record.levelno for record in caplog.records} == {logging.CRITICAL}
    assert "still running 0 s after stop: deaf; cancelling it again" in caplog.text


OWN = """
import asyncio
from asyncrl.actors.supervisor import supervise
from tests.actors.test_supervisor import Deaf, Done

asyncio.run(supervise(Done("done", None), Deaf("deaf", None), stop_seconds=0.05))
"""


def test_a_process_of_its_own_ends_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", OWN], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert "still running 0 s after stop: deaf; exiting" in done.stderr
