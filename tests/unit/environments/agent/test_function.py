"""The rollout function "agent": a harness plays against the endpoint, and its sample is trained, even after a kill."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from asyncrl.bus.port import Bus
from asyncrl.config import tables
from asyncrl.environments.agent.function import Agent, Options
from asyncrl.environments.agent.harnesses.load import Limited
from asyncrl.environments.agent.harnesses.protocol import Endpoint, Outcome, Task
from asyncrl.errors import ConfigError, Outage, RolloutError
from asyncrl.messages import PromptGroup, SamplingParams
from asyncrl.messages.control import ServerAddress
from asyncrl.outage import is_outage
from tests.harness.agents import TOKENIZER, Scripted
from tests.harness.partial_rollouts import Worker, publish_prompt

PLAYER = "tests.unit.environments.harnesses.players:plain"
PROMPT = PromptGroup(
    group_id=3, prompt_tokens=[1, 2], group_size=2, sampling=SamplingParams(max_new_tokens=900), prompt="hi", label="9"
)


def agent(play: Any, **options: Any) -> Agent:
    """An agent whose harness is ``play`` in this process."""
    made = Agent(TOKENIZER, Options(harness=PLAYER, **options))

    async def close() -> None:
        pass

    play.close = close
    made._harness = Limited(play, name="play")
    return made


async def ask(http: aiohttp.ClientSession, endpoint: Endpoint, *messages: str, limit: int | None = None) -> str:
    return (await complete(http, endpoint, *messages, limit=limit))[1]


async def complete(
    http: aiohttp.ClientSession, endpoint: Endpoint, *messages: str, limit: int | None = None
) -> tuple[str, str]:
    """Return the id of an answer and its text."""
    roles = ("user", "assistant")
    said = [{"role": roles[place % 2], "content": text} for place, text in enumerate(messages)]
    body = {"model": endpoint.model, "messages": said, "max_tokens": limit}
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with http.post(endpoint.base_url + "/v1/chat/completions", json=body, headers=headers) as reply:
        found = await reply.json()
        return found["id"], str(found["choices"][0]["message"]["content"])


async def test_a_task_has_the_rows_messages_and_without_any_its_prompt_as_one_of_the_users() -> None:
    given: list[list[dict[str, Any]]] = []

    async def play(task: Task, endpoint: Endpoint) -> Outcome:
        given.append(task.as_json()["messages"])
        async with aiohttp.ClientSession() as http:
            await ask(http, endpoint, "hi")
        return Outcome(reward=1.0)

    made, rows = agent(play), ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"})
    await made(PROMPT, Scripted(["one"]), index=0)
    await made(replace(PROMPT, messages=rows), Scripted(["one"]), index=0)
    await made.close()
    assert given == [[{"role": "user", "content": "hi"}], list(rows)]


async def test_a_task_has_the_addresses_of_the_servers_that_its_agent_asks() -> None:
    given: list[Any] = []

    async def play(task: Task, endpoint: Endpoint) -> Outcome:
        given.append(task.as_json()["servers"])
        async with aiohttp.ClientSession() as http:
            await ask(http, endpoint, "hi")
        return Outcome(reward=1.0)

    made, engine = agent(play, servers=("user",)), Scripted(["one"])
    engine.servers = {
        "user": ServerAddress(name="user", url="http://h:1/v1", model="m", key="k"),
        "judge": ServerAddress(name="judge", url="http://h:2/v1"),
    }
    await made(PROMPT, engine, index=0)
    await made.close()
    assert given == [{"user": {"url": "http://h:1/v1", "key": "k", "model": "m"}}]


async def test_branches_are_trajectories_of_one_rollout_with_its_reward() -> None:
    async def play(task: Task, endpoint: Endpoint) -> Outcome:
        async with aiohttp.ClientSession() as http:
            (first, one) = await complete(http, endpoint, task.prompt)
            (second, _) = await complete(http, endpoint, task.prompt, one, "more")
            (third, _) = await complete(http, endpoint, f"summary of {one}")
        rewards = {third: 2.0, first: 0.0, second: 1.0}
        return Outcome(reward=float(task.label), turn_rewards=rewards, metrics={"asked": 3.0})

    made, engine = agent(play), Scripted(["one", "two", "three"])
    long, short = await made(PROMPT, engine, index=1)
    await made.close()
    assert (long.reward, short.reward, long.reward_parts) == (9.0, 9.0, {"asked": 3.0})
    assert [(turn.start, turn.reward) for turn in short.turn_rewards] == [(0, 2.0)]
    assert [turn.reward for turn in long.turn_rewards] == [0.0, 1.0]
    assert [*long.prompt_tokens.tolist(), *long.tokens.tolist()][: len(engine.given[1])] == engine.given[1]
    assert short.prompt_tokens.tolist() == engine.given[2]


async def test_harness_without_model_calls_or_with_too_many_rewards_fails_its_sample() -> None:
    async def silent(task: Task, endpoint: Endpoint) -> float:
        return 1.0

    def gives(rewards: Any) -> Any:
        async def play(task: Task, endpoint: Endpoint) -> Outcome:
            async with aiohttp.ClientSession() as http:
                one, said = await complete(http, endpoint, task.prompt)
                await ask(http, endpoint, task.prompt, said, "more")
            given = {one + name: value for name, value in rewards.items()} if isinstance(rewards, dict) else rewards
            return Outcome(turn_rewards=given)

        return play

    for play, says in (
        (silent, "nothing to train"),
        (gives((1.0, 1.0, 1.0)), "3 turn_rewards for 2 turns"),
        (gives((1.0,)), "1 turn_rewards for 2 turns"),
        (gives({"x": 1.0}), "x', which is the id of no answer"),
        (gives({"": (1.0, 2.0)}), "2 turn_rewards to 'chatcmpl-[0-9a-f]*', which has 1 answers"),
    ):
        made = agent(play)
        with pytest.raises(RolloutError, match=says) as raised:
            await made(PROMPT, Scripted(["one", "two"]), index=0)
        assert "\n" not in str(raised.value)
        await made.close()


async def test_a_harness_that_fails_after_a_refusal_says_what_the_endpoint_said() -> None:
    async def play(task: Task, endpoint: Endpoint) -> Outcome:
        async with aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            body = {"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"5": 1}}
            async with http.post(endpoint.base_url + "/v1/chat/completions", json=body, headers=headers) as reply:
                raise RolloutError(f"harness play: {reply.status}")

    made = agent(play)
    with pytest.raises(RolloutError, match="play: 400; the endpoint had refused a request: logit_bias = "):
        await made(PROMPT, Scripted([]), index=0)
    await made.close()


@pytest.mark.parametrize("by_id", [True, False])
async def test_calls_at_the_same_time_have_the_rewards_that_their_ids_name(by_id: bool) -> None:
    """They arrive in the order 2, 1, 0."""

    async def play(task: Task, endpoint: Endpoint) -> Outcome:
        async with aiohttp.ClientSession() as http:
            ids = {number: (await complete(http, endpoint, f"{number} + 1"))[0] for number in (2, 1, 0)}
        rewards = [0.0, 0.1, 0.2]
        return Outcome(reward=0.0, turn_rewards={ids[n]: rewards[n] for n in ids} if by_id else rewards)

    made = agent(play)
    try:
        if not by_id:
            with pytest.raises(RolloutError, match="do not continue each other.*give them by the ids"):
                await made(PROMPT, Scripted(["c", "b", "a"]), index=0)
            return
        found = await made(PROMPT, Scripted(["c", "b", "a"]), index=0)
    finally:
        await made.close()
    assert {TOKENIZER.decode(one.tokens)[0]: one.turn_rewards[0].reward for one in found} == {
        "a": 0,
        "b": 0.1,
        "c": 0.2,
    }


async def test_a_list_of_rewards_is_enough_where_each_call_goes_on_from_the_one_before() -> None:
    """Even if the agent shortens the model's answers, which begins a new sequence."""

    async def play(task: Task, endpoint: Endpoint) -> Outcome:
        async with aiohttp.ClientSession() as http:
            one = await ask(http, endpoint, "hi")
            two = await ask(http, endpoint, "hi", one[:1], "more")
            await ask(http, endpoint, "hi", one[:1], "more", two, "more")
        return Outcome(reward=0.0, turn_rewards=(1.0, 2.0, 3.0))

    made = agent(play)
    found = await made(PROMPT, Scripted(["one", "two", "three"]), index=0)
    await made.close()
    assert [[turn.reward for turn in one.turn_rewards] for one in found] == [[1.0], [2.0, 3.0]]


async def test_answers_of_one_request_have_a_list_of_rewards_under_its_id() -> None:
    async def play(task: Task, endpoint: Endpoint) -> Outcome:
        async with aiohttp.ClientSession() as http:
            body = {"messages": [{"role": "user", "content": "hi"}], "n": 2}
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            async with http.post(endpoint.base_url + "/v1/chat/completions", json=body, headers=headers) as reply:
                found = await reply.json()
        return Outcome(reward=0.0, turn_rewards={found["id"]: (0.5, 0.25)})

    made = agent(play)
    one, two = await made(PROMPT, Scripted(["one", "two"]), index=0)
    await made.close()
    assert (one.turn_rewards[0].reward, two.turn_rewards[0].reward) == (0.5, 0.25)


async def test_a_harness_that_may_not_be_repeated_is_not() -> None:
    async def play(task: Task, endpoint: Endpoint) -> None:
        raise AssertionError("it ran")

    made, engine = agent(play, restart="never"), Scripted([])
    engine.attempt = 2
    with pytest.raises(RolloutError, match='restart is "never"'):
        await made(PROMPT, engine, index=0)


async def test_a_harness_that_may_not_be_repeated_is_not_repeated_after_an_outage_either() -> None:
    async def play(task: Task, endpoint: Endpoint) -> None:
        raise Outage("harness play: the mail server is away") from ConnectionRefusedError()

    for restart, is_waited_for in (("again", True), ("never", False)):
        made = agent(play, restart=restart)
        with pytest.raises(RolloutError, match="the mail server is away") as raised:
            await made(PROMPT, Scripted([]), index=0)
        assert is_outage(raised.value) is is_waited_for
        await made.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"harness": "comand"}, "rollout.options.harness: 'comand' is unknown"),
        ({"harness": PLAYER, "timeout_seconds": 0.0}, "timeout_seconds must be > 0"),
        ({"harness": PLAYER, "chat_template": "{% if"}, "chat template"),
        ({"harness": PLAYER, "port": 70_000}, "port must be >= 0 and <= 65,535"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        Agent(TOKENIZER, tables.build(Options, options, "rollout.options"))
    assert "\n" not in str(refused.value)


async def test_a_worker_killed_under_an_agent_loses_no_call_that_was_saved(bus: Bus) -> None:
    """Two calls at once, and a third that continues the first. The second worker swaps the first two calls."""

    def player(order: int) -> Any:
        async def play(task: Task, endpoint: Endpoint) -> float:
            async with aiohttp.ClientSession() as http:
                texts = [f"{task.index} a", f"{task.index} b"][::order]
                first = dict(
                    zip(
                        texts,
                        await asyncio.gather(*(ask(http, endpoint, text, limit=20) for text in texts)),
                        strict=True,
                    )
                )
                a = f"{task.index} a"
                await ask(http, endpoint, a, first[a], "more", limit=30)
            return 1.0

        return play

    await publish_prompt(bus, 0, group_size=2, max_new_tokens=100)
    first, second = agent(player(1)), agent(player(-1))
    async with Worker(bus, "w0").working(rollout=first) as dying:
        await dying.begun(4)
        await dying.engine.steps(20)
        await dying.begun(6)
        await dying.engine.steps(11)
        await dying.partial_rollouts.save()
    async with Worker(bus, "w1").working(rollout=second) as heir:
        await heir.begun(2)
        (group,) = await heir.until_published(bus, 1)
    await first.close()
    await second.close()
    assert sorted(begin for _, _, begin in heir.engine.asked) == [10, 10]  # third calls, without the newest token
    assert heir.partial_rollouts.discarded_tokens == 0
    sampled = sum(int(one.response_mask.sum()) for one in group.trajectories)
    assert sampled == 2 * (20 + 20 + 30)
    assert len(group.trajectories) == 4
