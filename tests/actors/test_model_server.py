"""Servers of frozen models: how workers find them, and what teachers say of answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from asyncrl.actors.model_server import ModelServerActor
from asyncrl.actors.rollout.generation_session import GenerationSession
from asyncrl.actors.rollout.server_book import STALE_SECONDS, ServerBook, ServerFollower
from asyncrl.actors.rollout.shared_engine import request_numbers
from asyncrl.actors.rollout.teacher import Teacher, Teachers
from asyncrl.actors.supervisor import supervise
from asyncrl.bus.port import Bus
from asyncrl.config import RolloutSection, ServerSection
from asyncrl.engines.generation import RequestReport
from asyncrl.engines.port import ServedTo
from asyncrl.environments.load import load_rollout
from asyncrl.errors import ConfigError, EngineDied, EngineError, Outage, RewardError
from asyncrl.messages import Progress, PromptGroup, SamplingParams
from asyncrl.messages.control import ServerAddress
from asyncrl.messages.topics import PROGRESS, SERVERS
from tests.harness import fakes
from tests.harness.scripted_backend import answer
from tests.harness.stub_server import StubServer, teacher_logprobs

ADDRESS = ServerAddress(name="judge", url="http://h:1/v1", model="m")
WORDS = [f"word{number}" for number in range(40)]


class Words:
    """A tokenizer of words; ``offset``: of another model."""

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return " ".join(WORDS[token - self._offset] for token in token_ids)


def stub(name: str = "judge", *, texts: list[str] | None = None) -> StubServer:
    to = ServedTo(host="127.0.0.1", log_path=Path("log"), directory=Path(), dtype="float32")
    return StubServer(name, ServerSection(path="model"), None, to=to, texts=texts)


@pytest.fixture
async def served() -> AsyncIterator[Callable[..., Awaitable[tuple[StubServer, dict[str, ServerAddress]]]]]:
    """``await served(NAME, ...)``: a stub that is up, and where it is."""
    started: list[StubServer] = []

    async def one(name: str, **options: Any) -> tuple[StubServer, dict[str, ServerAddress]]:
        started.append(stub(name, **options))
        return started[-1], {name: await started[-1].start()}

    yield one
    for server in started:
        await server.close()


async def test_workers_find_a_server_when_it_is_up_and_wait_for_it_before_and_after(
    bus_factory: Callable[..., Awaitable[Bus]],
) -> None:
    book, server = ServerBook({"judge": None}), stub()
    follower = ServerFollower("w0.servers", await bus_factory(), book=book, servers=("judge",))
    following = asyncio.create_task(follower.run())
    with pytest.raises(Outage, match="server judge is not up"):
        book["judge"]
    actor = ModelServerActor("judge", await bus_factory(), server=server)
    serving = asyncio.create_task(supervise(actor, owns_process=False))
    await fakes.until(lambda: follower_knows(book))
    assert book["judge"].url.endswith("/v1")
    server.ended.set_result("out of memory")
    with pytest.raises(EngineDied, match="server judge has ended: out of memory"):
        await serving
    following.cancel()


async def test_a_server_ends_with_its_run(bus: Bus) -> None:
    actor = ModelServerActor("judge", bus, server=stub())
    serving = asyncio.create_task(supervise(actor, owns_process=False))
    while not await bus.states(SERVERS):
        await asyncio.sleep(0)
    assert not serving.done()
    await bus.put(PROGRESS, Progress(incarnation=0, step=1, policy_version=1, finished=True))
    await serving
    assert serving.exception() is None


def test_an_address_that_is_not_renewed_is_that_of_a_server_that_is_away() -> None:
    now = 0.0
    book = ServerBook({"judge": None, "far": ADDRESS}, clock=lambda: now)
    book.note(ADDRESS)
    now = STALE_SECONDS + 1
    assert book["far"] == ADDRESS, "a server that is up elsewhere has no heartbeat"
    with pytest.raises(Outage, match="judge"):
        book["judge"]
    with pytest.raises(KeyError):
        book["none"]


def follower_knows(book: ServerBook) -> bool:
    try:
        return bool(book["judge"])
    except Outage:
        return False


# -- teachers ----------------------------------------------------------------------------------------------------------


def prompt(temperature: float = 1.0, **metadata: Any) -> PromptGroup:
    sampling = SamplingParams(max_new_tokens=4, temperature=temperature)
    tokens = np.array([1, 2], np.int32)
    return PromptGroup(group_id=0, prompt_tokens=tokens, group_size=1, sampling=sampling, metadata=metadata)


@pytest.mark.parametrize("kind", ["sglang", "openai"])
async def test_a_teacher_gives_each_token_of_an_answer_its_logprob(served: Any, kind: str) -> None:
    _, servers = await served("big", texts=WORDS)
    teacher = Teacher("big", kind=kind, tokenizer=Words())
    tokens = np.array([9, 4, 13], np.int32)
    found = await teacher.score(np.array([3], np.int32), tokens, servers=servers)
    assert found.logprobs.tolist() == teacher_logprobs(tokens).tolist()
    await teacher.close()


@pytest.mark.parametrize("kind", ["sglang", "openai"])
async def test_a_teacher_names_the_likeliest_tokens_at_each_place(served: Any, kind: str) -> None:
    """The first answer of an OpenAI server is compared by its texts, which the others do not have."""
    server, servers = await served("big", texts=WORDS)
    teacher = Teacher("big", kind=kind, tokenizer=Words(), top_logprobs=2)
    tokens = np.array([9, 4, 13], np.int32)
    for _ in range(2):
        found = await teacher.score(np.array([3], np.int32), tokens, servers=servers)
        assert found.logprobs.tolist() == teacher_logprobs(tokens).tolist()
        assert found.likeliest.tokens.tolist() == [[10, 11], [5, 6], [14, 15]]
        assert found.likeliest.logprobs.tolist() == [[-0.5, -1.5]] * 3
    assert len(server.requests) == (2 if kind == "sglang" else 3)
    await teacher.close()
    other = Teacher("big", kind=kind, tokenizer=Words(offset=1), top_logprobs=2)
    with pytest.raises(ConfigError, match="servers.big: its tokenizer is not that of model.path"):
        await other.score(np.array([3], np.int32), tokens, servers=servers)
    await other.close()


async def test_a_server_that_cannot_name_the_likeliest_tokens_is_named_in_one_line(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, servers = await served("big", texts=WORDS)
    monkeypatch.setattr(StubServer, "_table", lambda self, token, top: {f" {WORDS[token]}": -0.5})
    teacher = Teacher("big", kind="openai", tokenizer=Words(), top_logprobs=2)
    with pytest.raises(RewardError, match=r"it does not give the 2 likeliest tokens .* a teacher is SGLang or vLLM"):
        await teacher.score(np.array([3], np.int32), np.array([9], np.int32), servers=servers)
    await teacher.close()


@pytest.mark.parametrize(
    ("kind", "given"), [("openai", None), ("openai", [-0.5]), ("openai", math.nan), ("sglang", 3.0)]
)
async def test_likeliest_tokens_that_cannot_be_are_a_problem_of_the_server_and_not_of_the_worker(
    served: Any, monkeypatch: pytest.MonkeyPatch, kind: str, given: Any
) -> None:
    """No table, another shape, NaN, and a probability over 1."""
    _, servers = await served("big", texts=WORDS)
    is_number = isinstance(given, float)
    monkeypatch.setattr(
        StubServer, "_table", lambda self, token, top: {"token_id:3": given, "token_id:4": -3.0} if is_number else given
    )
    monkeypatch.setattr(StubServer, "_tops", lambda self, ids, count: [[(3, given), (4, -3.0)] for _ in ids[1:]])
    teachers = Teachers(
        {"big": Teacher("big", kind=kind, tokenizer=Words(), top_logprobs=2)}, default="big", key="", servers=servers
    )
    (problem,) = await teachers.score(prompt(), [(answer([5, 6], reward=0.0),)])
    assert isinstance(problem, RewardError)
    assert "server big" in str(problem)
    await teachers.close()


@pytest.mark.parametrize("kind", ["sglang", "openai"])
async def test_a_teacher_with_another_tokenizer_is_refused_in_one_line(served: Any, kind: str) -> None:
    _, servers = await served("big", texts=WORDS)
    teacher = Teacher("big", kind=kind, tokenizer=Words(offset=1))
    says = "servers.big: its tokenizer is not that of model.path: token 9 is 'word9' there and 'word8' here"
    with pytest.raises(ConfigError, match=says):
        await teacher.score(np.array([3], np.int32), np.array([9], np.int32), servers=servers)
    await teacher.close()


async def test_rows_choose_their_teacher(served: Any) -> None:
    sums, first = await served("math")
    code, second = await served("code")
    made = {name: Teacher(name, kind="openai", tokenizer=Words()) for name in ("math", "code")}
    teachers = Teachers(made, default="math", key="teacher", servers=first | second)
    rollouts = [(answer([5, 6], reward=0.0),), (answer([7], reward=0.0), answer([8, 9], reward=0.0))]
    scored = await teachers.score(prompt(teacher="code"), rollouts)
    assert [[part.teacher_logprobs.tolist() for part in parts] for parts in scored if isinstance(parts, tuple)] == [
        [teacher_logprobs(part.tokens).tolist() for part in parts] for parts in rollouts
    ]
    await teachers.score(prompt(), rollouts[:1])
    assert (len(code.requests), len(sums.requests)) == (3, 1)
    away = Teachers(made, default="math", key="", servers=ServerBook({"math": None}))
    with pytest.raises(Outage, match="server math is not up"):  # and the group waits for it
        await away.score(prompt(), rollouts)
    for name in ("art", ["art"]):
        with pytest.raises(RewardError, match="names .*art.* in 'teacher'"):
            await teachers.score(prompt(teacher=name), rollouts)
    with pytest.raises(RewardError, match="temperature 1, not 0.5"):
        await teachers.score(prompt(temperature=0.5), rollouts)
    await teachers.close()


def test_the_times_of_an_engines_last_requests_are_gauges() -> None:
    assert request_numbers([]) == {}
    silent = RequestReport(cached_tokens=20)
    of_all = {
        "rollout/request_seconds": 2.0,
        "rollout/longest_request_seconds": 3.0,
        "rollout/cached_prompt_ratio": 0.5,
    }
    assert request_numbers([(1.0, 10, RequestReport()), (3.0, 30, silent)]) == of_all
    told = RequestReport(queue_seconds=0.25, first_token_seconds=0.5, drafted_tokens=4, accepted_tokens=3)
    assert request_numbers([(1.0, 10, told), (3.0, 30, silent)]) == of_all | {
        "rollout/queue_seconds": 0.25,  # the mean over requests that say it
        "rollout/first_token_seconds": 0.5,
        "rollout/draft_acceptance": 0.75,
    }


async def test_a_rollout_function_finds_the_servers_and_an_idle_one_holds_its_sample() -> None:
    session: Any = GenerationSession(
        cast(Any, None),
        sampling=SamplingParams(max_new_tokens=1),
        need=cast(Any, None),
        seed=lambda call: call,
        servers={"judge": ADDRESS},
    )
    assert session.servers["judge"].url == ADDRESS.url
    function = load_rollout(RolloutSection(function="idle"))(cast(Any, None))
    holding = asyncio.create_task(cast(Any, function)(prompt(), session, index=0))
    await asyncio.sleep(0)
    assert not holding.done() and getattr(function, "has_harness", False), "no worker is restarted for it"
    holding.cancel()


async def test_an_address_is_not_renewed_while_its_server_answers_with_errors(bus: Bus) -> None:
    server, answers = stub(), [EngineError("503"), EngineError("503"), None]

    async def answer() -> None:
        if (problem := answers.pop(0) if answers else None) is not None:
            assert not await bus.states(SERVERS)
            raise problem

    server.answers = answer  # type: ignore[method-assign]
    actor = ModelServerActor("judge", bus, server=server, beat_seconds=0.0)
    serving = asyncio.create_task(supervise(actor, owns_process=False))
    while not await bus.states(SERVERS):
        await asyncio.sleep(0)
    assert not answers and not actor.problem
    actor.drain()
    await serving
