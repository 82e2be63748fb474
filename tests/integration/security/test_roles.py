"""Everything a role could try on a real server, compared with the table of rights (asyncrl/bus/nats_server/rights.py).

The attacker speaks the NATS protocol itself and has two kinds of users: the role's own, and a user in the role's
account with all permissions. The second kind checks that what accounts alone must prevent is prevented even without
permissions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from asyncrl.messages.codec import encode
from asyncrl.messages.topics import PROGRESS, ROLES, SEGMENTS
from tests.harness.attacker import (
    LAYOUT,
    OTHERS,
    RUN,
    STREAMS,
    WORKER,
    Attacked,
    May,
    api_subjects,
    other_subjects,
    settled,
    stored_subjects,
    subjects_of,
    through,
    unharmed,
    until,
)
from tests.harness.buses import progress
from tests.harness.roles import connected, end


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    made = Attacked(tmp_path_factory.mktemp("nats") / "server")
    yield made
    end(made.process)


@pytest.fixture
async def attacked(bare: Attacked) -> AsyncIterator[Attacked]:
    """A server whose learner is up and has stored something under every subject."""
    async with connected(bare, "learner") as learner:
        await asyncio.to_thread(learner.objects().put, "x", [b"data"], metadata={})
        async with bare.raw("learner") as client:
            client.subscribe("stored.*")
            seeded = set(stored_subjects()) - set(subjects_of(LAYOUT.objects_stream))
            for number, subject in enumerate(seeded):
                client.publish(subject, b"seed", reply=f"stored.{number}")
            # a PONG only shows that messages are read, not stored
            await until(client, lambda: len(client.heard) >= len(seeded))
        yield bare


BOTH = pytest.mark.parametrize("is_open", [False, True], ids=["permitted", "open"])
EACH = pytest.mark.parametrize("role", OTHERS)


@EACH
@BOTH
async def test_a_role_reaches_what_the_table_says_and_nothing_else(
    attacked: Attacked, role: str, is_open: bool
) -> None:
    """Try every request of the JetStream API, every subject of every stream, and every other subject."""
    may = May(role, is_open=is_open)
    tried = [*api_subjects(), *stored_subjects(), *other_subjects()]
    inbox = f"_INBOX.{RUN}.{role}.{WORKER}.mine"
    async with unharmed(attacked, may) as ear, attacked.raw(role, is_open=is_open) as client:
        for number, subject in enumerate(tried):
            client.publish(subject, b"{}", reply=f"{inbox}.{number}")
        await client.flush()
        await settled(attacked, role)
        with contextlib.suppress(TimeoutError):  # what a stream announces comes once it has stored it
            await until(ear, lambda: through(ear) >= may.reach())
        assert through(ear) == may.reach()
    if not is_open:
        refused = {subject for line in client.refused for subject in re.findall('Publish to "([^"]+)"', line)}
        assert refused == set(tried) - may.publish() - may.ask() - may.ack() - may.among_themselves()


@EACH
@BOTH
async def test_no_answer_comes_where_a_role_may_not_publish(attacked: Attacked, role: str, is_open: bool) -> None:
    """Try every request that a role may make, with every subject as reply subject."""
    may = May(role, is_open=is_open)
    targets = [*stored_subjects(), *other_subjects(), *(f"$JS.API.STREAM.{verb}" for verb in ("LIST", "CREATE.new"))]
    targets += [f"$JS.API.STREAM.{verb}.{stream}" for verb in ("DELETE", "PURGE", "UPDATE") for stream in STREAMS]
    async with unharmed(attacked, may) as ear, attacked.raw(role, is_open=is_open) as client:
        for subject, target in itertools.product(sorted(may.ask() | may.publish() | may.ack()), targets):
            client.publish(subject, b'{"seq": 1}', reply=target)
        await client.flush()
        await settled(attacked, role)
        await ear.flush()
        assert through(ear) <= may.reach()


@EACH
@BOTH
async def test_whoever_asks_itself_answers_nobody_else(attacked: Attacked, role: str, is_open: bool) -> None:
    """Send a request with a foreign reply subject to a service of the role's own: the answer goes nowhere."""
    may = May(role, is_open=is_open)
    targets = [*stored_subjects(), *other_subjects(), *api_subjects()]
    async with unharmed(attacked, may) as ear, attacked.raw(role, is_open=is_open) as client:
        own = sorted(may.among_themselves()) or [f"_INBOX.{RUN}.{role}.{WORKER}.own"]
        for service in own:
            client.subscribe(service)
        await client.flush()
        for service, target in itertools.product(own, targets):
            client.publish(service, reply=target)
        await client.flush()
        for message in tuple(client.heard):
            client.publish(message.reply, b"{}")
        await client.flush()
        await settled(attacked, role)
        await ear.flush()
        assert through(ear) <= may.reach()


@EACH
@BOTH
async def test_headers_do_no_more_than_a_message(attacked: Attacked, role: str, is_open: bool) -> None:
    """Try headers that make the server send a message elsewhere, or remove other messages."""
    may = May(role, is_open=is_open)
    async with unharmed(attacked, may) as ear, attacked.raw(role, is_open=is_open) as client:
        for subject in sorted(may.publish() | may.ask()):
            for target in (*stored_subjects(), *other_subjects()):
                client.publish(subject, b"{}", headers={"Nats-Trace-Dest": target})
            for value in ("all", "sub"):
                client.publish(subject, b"{}", headers={"Nats-Rollup": value})
        await client.flush()
        await settled(attacked, role)
        await ear.flush()
        assert through(ear) <= may.reach()


@EACH
@BOTH
async def test_a_role_hears_what_the_table_says_and_nothing_else(attacked: Attacked, role: str, is_open: bool) -> None:
    """Subscribe to everything while the learner and the other roles publish everywhere and get answers."""
    may = May(role)
    others = [other for other in ROLES if other != role]
    written = [subject for subject in stored_subjects() if f"{LAYOUT.objects_bucket}.M" not in subject]
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(attacked.raw(role, is_open=is_open))
        for subject in (
            ">",
            "*.>",
            *stored_subjects(),
            *other_subjects(),
            "$JS.API.>",
            "$JS.ACK.>",
            "_INBOX.>",
            "$KV.>",
        ):
            client.subscribe(subject)
        await client.flush()
        for other in others:
            busy = await stack.enter_async_context(attacked.raw(other))
            busy.subscribe(f"_INBOX.{RUN}.{other}.{WORKER}.>")
            for number, subject in enumerate((*written, *other_subjects(), "$JS.API.INFO")):
                busy.publish(subject, b"{}", reply=f"_INBOX.{RUN}.{other}.{WORKER}.{number}")
            await busy.flush()
            await settled(attacked, other)
        await client.flush()
        assert {message.subject for message in client.heard} == may.follow()


async def test_a_server_that_lets_everybody_in_one_account_would_not_pass(tmp_path: Path) -> None:
    """Shows what these tests detect: with all roles in one account, an answer is stored in a stream."""
    attacked = Attacked(tmp_path / "server", in_one_account=True)
    try:
        async with connected(attacked, "learner"), attacked.ear() as ear, attacked.raw("observer") as client:
            assert LAYOUT.republish_subject(PROGRESS, "") not in through(ear)
            client.publish("$JS.API.INFO", reply=LAYOUT.subject(PROGRESS, ""))
            await client.flush()
            await until(ear, lambda: LAYOUT.republish_subject(PROGRESS, "") in through(ear))
    finally:
        end(attacked.process)


async def test_nobody_is_told_what_was_not_stored(attacked: Attacked) -> None:
    """A worker gets the server to deliver a message it wrote to another stream to the subject where workers follow
    progress."""
    forged = encode(progress(99))
    segment = f"{LAYOUT.prefix(SEGMENTS)}{WORKER}.forged"
    own = {"Nats-Stream": LAYOUT.stream(PROGRESS), "Nats-Subject": LAYOUT.subject(PROGRESS, ""), "Nats-Sequence": "99"}
    async with connected(attacked, "learner") as learner, connected(attacked, "rollout-worker") as worker:
        await learner.put(PROGRESS, progress(1))
        async with worker.watch(PROGRESS) as states, attacked.raw("rollout-worker") as client:
            assert (await anext(states)).step == 1
            for _ in range(3000):  # its sequence exceeds that of the progress
                client.publish(segment, forged, headers=own)
            await client.flush()
            await settled(attacked, "rollout-worker")
            direct = f"$JS.API.DIRECT.GET.{LAYOUT.stream(SEGMENTS)}.{segment}"
            client.publish(direct, reply=LAYOUT.republish_subject(PROGRESS, ""))
            await client.flush()
            await settled(attacked, "rollout-worker")
            await learner.put(PROGRESS, progress(2))
            assert (await anext(states)).step == 2
