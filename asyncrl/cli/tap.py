"""`asyncrl tap RUN TOPIC`: prints messages on a topic as they arrive, one per line, from any machine.

It connects as an observer, which may only read. It takes no message from any consumer and delays none. New entries of a
log and new values of a state appear within a second. Messages of a work topic belong to their consumers; only their
counts are shown, as they change. The command ends with the `asyncrl run` whose server it reads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import difflib
import json
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING, Any, Final

from asyncrl.cli import arguments
from asyncrl.config import RunConfig
from asyncrl.config.secret_values import HIDDEN
from asyncrl.errors import ConfigError, NoSuchRun
from asyncrl.logs import printable
from asyncrl.messages.topics import ALL, Topic

if TYPE_CHECKING:
    from asyncrl.bus.port import Bus

LOOK_SECONDS: Final = 0.5
"""Seconds between two reads of states and counts; longer if a read takes long, to limit the load of a large fleet on
the bus."""
LONGEST_LINE: Final = 2000
MOST_ITEMS: Final = 16
"""Maximum number of items of an array or list that one line shows."""

TOPICS: Final = {topic.name: topic for topic in ALL}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_existing_run(parser)
    parser.add_argument("topic", metavar="TOPIC", help=f"one of {', '.join(sorted(TOPICS))}")
    parser.add_argument("--key", help="show only messages with this key")
    parser.add_argument("--limit", type=int, metavar="N", help="stop after N messages (default: at Ctrl-C)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, with no field shortened")


def run(options: argparse.Namespace) -> int:
    if (topic := TOPICS.get(options.topic)) is None:
        near = difflib.get_close_matches(options.topic, TOPICS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(TOPICS))}"
        raise ConfigError(f"TOPIC {options.topic!r} is unknown; {hint}")
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit {options.limit}: must be 1 or more")

    from asyncrl.audit import run_folder  # imports numpy; --help works without

    run_config = run_folder.run_at(options.where, options.overrides, verb="tap")
    asyncio.run(_tap(run_config, topic, options))
    return 0


async def _tap(run_config: RunConfig, topic: Topic[Any], options: argparse.Namespace) -> None:
    from asyncrl.audit import run_folder

    async with run_folder.observing(run_config, token=arguments.bus_token(run_config)) as bus:
        try:
            async with asyncio.TaskGroup() as group:
                showing = group.create_task(_show(bus, topic, options), name="tap.show")
                over = group.create_task(until_over(run_config), name="tap.until_over")
                await asyncio.wait((showing, over), return_when=asyncio.FIRST_COMPLETED)
                if not showing.done():
                    print("asyncrl tap: the run is over", file=sys.stderr)
                showing.cancel()
                over.cancel()
        except ExceptionGroup as error:
            raise error.exceptions[0] from None


async def _show(bus: Bus, topic: Topic[Any], options: argparse.Namespace) -> None:
    so_far = None
    if topic.kind == "log":
        so_far = await bus.last_sequence(topic)
        said = f"asyncrl tap: {topic.name} had {so_far:,} messages so far; what is published from now on is shown"
        print(said, file=sys.stderr, flush=True)
    left = options.limit
    async with contextlib.aclosing(flow(bus, topic, after=so_far)) as messages:
        async for key, message, problem in messages:
            if options.key is not None and key != options.key:
                continue
            show = as_json if options.json else as_line
            print(show(key, message, problem), flush=True)
            left = None if left is None else left - 1
            if left == 0:
                return


async def until_over(run_config: RunConfig) -> None:
    """Return when the server that `asyncrl run` started no longer belongs to this run; never for a server of the user.

    waits for: the run's folder    woken by: the clock
    """
    from asyncrl.adapters.registry import bus_address

    with contextlib.suppress(NoSuchRun):
        first = bus_address(run_config, token="")
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if bus_address(run_config, token="") != first:
                return


Flowing = tuple[str, Any, str]
"""Key, message, and the reason if there is no message."""


async def flow(bus: Bus, topic: Topic[Any], *, after: int | None = None) -> AsyncGenerator[Flowing, None]:
    """Yield new messages on the topic, without end. For a state, yield its current values first.

    after: yield the messages of a log after this sequence number

    waits for: a message    woken by: the bus; for a state or a work topic: the clock
    """
    if topic.kind == "log":
        after = await bus.last_sequence(topic) if after is None else after
        async with bus.read(topic, after=after) as records:
            async for record in records:
                yield record.key, record.message, record.problem
    known: dict[str, Any] = {}
    now: dict[str, Any]
    while True:
        started = time.monotonic()
        if topic.kind == "work":
            now = {"": {"stored": await bus.depth(topic), "published": await bus.last_sequence(topic)}}
        else:
            now = await bus.states(topic)
        for key, message in now.items():
            if key not in known or json.dumps(plain(known[key])) != json.dumps(plain(message)):
                yield key, message, ""
        for key in known.keys() - now.keys():
            yield key, None, "removed"
        known = now
        await asyncio.sleep(max(LOOK_SECONDS, 4 * (time.monotonic() - started)))


# -- what a person sees ------------------------------------------------------------------------------------------------


def as_json(key: str, message: Any, problem: str) -> str:
    shown: dict[str, Any] = {"time": time.time(), "key": key, "message": plain(message)}
    return json.dumps(shown | ({"problem": problem} if problem else {}))


def as_line(key: str, message: Any, problem: str) -> str:
    """Format a message as one line, truncated if it is long."""
    fields = plain(message, most_items=MOST_ITEMS)
    words = [f"{name} {_word(value)}" for name, value in (fields or {}).items() if value not in ("", [], {}, None)]
    text = printable("   ".join([time.strftime("%H:%M:%S"), key, *words, *([problem] if problem else [])]))
    return text if len(text) <= LONGEST_LINE else f"{text[:LONGEST_LINE]}... ({len(text):,} characters)"


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def plain(value: Any, *, most_items: int = 0) -> Any:
    """Convert a message to JSON values, without its secrets.

    most_items  maximum items of each array and list; 0 is all
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(its if field.repr or not its else HIDDEN, most_items=most_items)
            for field in dataclasses.fields(value)
            for its in (getattr(value, field.name),)
        }
    if isinstance(value, dict):
        return {str(name): plain(item, most_items=most_items) for name, item in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return list(_items(value, most_items))
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def _items(values: list[Any] | tuple[Any, ...], most_items: int) -> Iterator[Any]:
    shown = values[:most_items] if most_items and len(values) > most_items else values
    yield from (plain(item, most_items=most_items) for item in shown)
    if len(shown) < len(values):
        yield f"... {len(values) - len(shown):,} more"
