"""Keeps the life and sequence of the newest messages of others (messages/freshness.py) in keys/heard, across restarts.

Without this file, recorded heartbeats of a worker could be replayed to a learner that has just started. Several
processes write the file; each merges the newest of its own and the stored entries.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from asyncrl.launch.keys import key_files
from asyncrl.messages.freshness import MOST, Freshness, Order, Place

SAVE_SECONDS: Final = 10.0
_NAME: Final = "heard"

log = logging.getLogger("asyncrl.keys")


def load(folder: Path) -> dict[Place, Order]:
    """Load the file; empty if it cannot be read.

    Without it, old messages are recognised only by comparison with those heard from now on.
    """
    try:
        rows = json.loads((folder / _NAME).read_bytes())
        return {(str(topic), str(key), str(signer)): (int(a), int(b)) for topic, key, signer, a, b in rows}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s: cannot be read: %s; it is written again", folder / _NAME, error)
        return {}


def save(folder: Path, newest: dict[Place, Order]) -> None:
    """Merge ``newest`` into the file. Raises OSError."""
    before = load(folder)
    of_others = {place: order for place, order in before.items() if place not in newest}
    merged = of_others | {place: max(order, before.get(place, order)) for place, order in newest.items()}
    if merged != before:
        rows = [[*place, *order] for place, order in list(merged.items())[-MOST:]]
        key_files.write(folder / _NAME, json.dumps(rows), mode=0o600)


async def keep(folder: Path, heard: Freshness) -> None:
    """Save until cancelled. waits for: the clock"""
    problem = ""
    while True:
        await asyncio.sleep(SAVE_SECONDS)
        try:
            await asyncio.to_thread(save, folder, heard.newest())
            problem = ""
        except OSError as error:
            if str(error) != problem:
                log.warning("%s: cannot be written: %s; tried again", folder / _NAME, error.strerror)
            problem = str(error)


@contextlib.asynccontextmanager
async def kept(folder: Path, heard: Freshness) -> AsyncIterator[None]:
    """In this context, save every SAVE_SECONDS, and once more at the end."""
    keeping = asyncio.ensure_future(keep(folder, heard))
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait((keeping,))
        try:
            save(folder, heard.newest())
        except OSError as error:  # the next life accepts messages that this one would have rejected as old
            log.warning("%s: cannot be written: %s; what was heard last is not kept", folder / _NAME, error.strerror)
