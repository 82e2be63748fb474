"""A session continues its samples, begins a new sequence where the history was rewritten, and answers retries."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import socket
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np
import pytest

from asyncrl.environments.agent.endpoint.chat_format import TemplateFormat
from asyncrl.errors import EngineDied, EngineError
from tests.harness.agents import ANSWER, CALL, CALLED, TOKENIZER, TOOLS, Client, Scripted, chat_format

SAID = [CALL, ANSWER, "<think>\nAgain?\n</think>\n\nStill 42, the same."]


async def conversation(client: Client, rewrite: Callable[[Any], Any] = lambda said: said) -> list[Any]:
    """Play a question, a tool call with its result, an answer, and a second question."""
    messages: list[Any] = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "40 + 2 = ?"}]
    for question in ("Sure?", ""):
        while True:
            said = rewrite(await client.say(messages, tools=TOOLS))
            messages.append(said)
            if not said.get("tool_calls"):
                break
            for call in said["tool_calls"]:
                given = json.loads(call["function"]["arguments"])
                result = {"role": "tool", "tool_call_id": call["id"], "content": str(given["a"] + given["b"])}
                messages.append(result)
        if question:
            messages.append({"role": "user", "content": question})
    return messages


def without_reasoning(said: Any) -> Any:
    return {name: value for name, value in said.items() if name != "reasoning_content"}


def with_other_json(said: Any) -> Any:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(json.loads(call["function"]["arguments"]))}}
        for call in said.get("tool_calls", ())
    ]
    return {"content": said["content"] + " ", "role": "assistant", **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize("rewrite", [lambda said: said, without_reasoning, with_other_json])
async def test_a_conversation_is_one_sequence_however_its_json_comes_back(rewrite: Callable[[Any], Any]) -> None:
    async with Client(Scripted(SAID)) as client:
        await conversation(client, rewrite)
    assert client.check() == 1
    assert [len(one) for one in client.engine.given] == sorted(len(one) for one in client.engine.given)


async def test_an_answer_that_the_harness_changes_begins_a_new_sequence() -> None:
    async with Client(Scripted(SAID)) as client:
        await conversation(client, lambda said: without_reasoning(said) | {"content": said["content"].upper()})
    assert client.check() == 3


async def test_with_thinking_as_in_the_template_a_second_question_begins_a_new_sequence() -> None:
    async with Client(Scripted(SAID), chat_format=chat_format(keeps_thinking=False)) as client:
        await conversation(client)
    assert client.check() == 2
    assert "Use the tool" not in TOKENIZER.decode(client.engine.given[2])


async def test_what_the_next_turn_is_given_is_what_the_template_would_write() -> None:
    """Except for the thinking, which is kept."""
    async with Client(Scripted(SAID)) as client:
        messages = await conversation(client)
    rendered = TOKENIZER.decode(TemplateFormat(TOKENIZER).render(messages[:-1], TOOLS))
    given = TOKENIZER.decode(client.engine.given[2])
    thought = "<think>\nUse the tool.\n</think>\n\n", "<think>\nThe tool says 42.\n</think>\n\n"
    for one in thought:
        assert one in given
        given = given.replace(one, "")
    assert given.replace(CALLED, json.dumps(json.loads(CALLED))) == rendered


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("{% if m['content'] is none %}?{{ m.tool_calls[0].function.name }}{% else %}A{% endif %}", "?add"),
        ("{{ m.content }}", ""),
    ],
)
def test_a_template_sees_that_a_message_has_calls_alone_if_it_asks(template: str, written: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    of_user = "{% for m in messages %}{% if m.role == 'user' %}Q{% else %}" + template + "{% endif %}{% endfor %}"
    form = TemplateFormat(TOKENIZER, chat_template=of_user)
    assert TOKENIZER.decode(form.render(messages, ())) == "Q" + written


async def test_a_compaction_and_a_sub_agent_are_sequences_of_their_own() -> None:
    async with Client(Scripted(["one", "two", "we talked", "three", "sub"])) as client:
        messages = [{"role": "user", "content": "q1"}]
        messages += [await client.say(messages), {"role": "user", "content": "q2"}]
        messages += [await client.say(messages)]
        summary = await client.say([*messages, {"role": "user", "content": "Summarise."}])
        await client.say([{"role": "user", "content": summary["content"]}])
        await client.say([{"role": "system", "content": "sub-agent"}, {"role": "user", "content": "do it"}])
    assert client.check() == 3
    assert [len(one.turns) for one in client.session.turns.sequences()] == [3, 1, 1]


GLM = """[gMASK]{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>\n{% endif %}"""


@pytest.mark.parametrize(("end", "sequences"), [("<|user|>", 1), ("<|endoftext|>", 2), ("", 1)])
async def test_a_turn_that_the_next_roles_token_ends_is_continued_without_repeating_it(
    end: str, sequences: int
) -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|endoftext|>", "[gMASK]"]}
    )
    tokenizer.chat_template = GLM

    class Engine(Scripted):
        async def __call__(self, tokens: Any, *, max_new_tokens: int | None = None) -> Any:
            answer = await super().__call__(tokens, max_new_tokens=max_new_tokens)
            ids = [*answer.tokens.tolist(), *tokenizer(end, add_special_tokens=False)["input_ids"]]
            logprobs = np.zeros(len(ids), np.float32)
            self.answers[-1] = dataclasses.replace(answer, tokens=np.array(ids, np.int32), logprobs=logprobs)
            return self.answers[-1]

    async with Client(Engine(["hi there", "x"], ends=False), chat_format=chat_format(tokenizer)) as client:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        said = await client.say(messages)
        assert said["content"] == "hi there"
        await client.say([*messages, said, {"role": "user", "content": "b"}])
    assert (
        tokenizer.decode(client.engine.given[1])
        == "[gMASK]<|user|>\na<|assistant|>\nhi there<|user|>\nb<|assistant|>\n"
    )
    assert client.check() == sequences


async def test_several_answers_part_after_what_they_share_and_train_it_once() -> None:
    async with Client(Scripted(["zero", "one", "two", "more"])) as client:
        messages = [{"role": "user", "content": "hi"}]
        messages += [await client.say(messages), {"role": "user", "content": "again"}]
        found = await client.chat(messages, n=2)
        said = [choice["message"] for choice in found["choices"]]
        await client.say([*messages, said[1], {"role": "user", "content": "and now"}])
    assert [one["content"] for one in said] == ["one", "two"]
    assert client.check() == 2
    assert [[number for number, _ in one.turns] for one in client.session.turns.sequences()] == [[0, 1], [2, 3]]


async def test_results_of_calls_are_shown_in_the_order_of_the_calls_and_continue_the_turn() -> None:
    """Clients may send them as they come, since ids match them; the chat template writes no ids."""
    twice = "\n".join(f"<tool_call>\n{CALLED}\n</tool_call>" for _ in range(2))
    async with Client(Scripted([twice, "84", "yes"])) as client:
        messages: list[Any] = [{"role": "user", "content": "Twice 40 + 2?"}]
        messages.append(await client.say(messages, tools=TOOLS))
        first, second = (call["id"] for call in messages[-1]["tool_calls"])
        for call, result in ((second, "SECOND"), ("unknown", "OTHER"), (first, "FIRST")):
            messages.append({"role": "tool", "tool_call_id": call, "content": result})
        messages += [await client.say(messages, tools=TOOLS), {"role": "user", "content": "Sure?"}]
        await client.say(messages, tools=TOOLS)
    shown = TOKENIZER.decode(client.engine.given[2])
    assert shown.index("FIRST") < shown.index("SECOND") < shown.index("OTHER")
    assert client.check() == 1


async def test_calls_at_the_same_time_are_recorded_side_by_side() -> None:
    engine = Scripted(lambda text, number: text[-30:].split("\n")[-3][:1])
    async with Client(engine) as client:
        asked = [[{"role": "user", "content": f"{n} is what"}] for n in range(8)]
        await asyncio.gather(*(client.say(messages) for messages in asked))
    assert client.check() == 8


async def test_a_call_comes_after_the_one_whose_answer_it_goes_on_from() -> None:
    """Even if the agent changes the answer, or takes the tools away. Another call to the same question comes first."""
    async with Client(Scripted([CALL, ANSWER, "done", "again"])) as client:
        messages: list[Any] = [{"role": "user", "content": "40 + 2 = ?"}]
        messages.append(await client.say(messages, tools=TOOLS))
        messages.append({"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": "42"})
        await client.say(messages, tools=TOOLS)
        messages += [{"role": "assistant", "content": "It is 42."}, {"role": "user", "content": "Sure?"}]
        await client.say(messages)
        await client.say(messages[:1])
    first, second, third, fourth = client.session.turns
    assert (first.after, second.after, third.after, fourth.after) == (None, first, second, None)


# -- limits ------------------------------------------------------------------------------------------------------------


async def test_a_full_context_is_said_as_clients_know_it_and_is_no_turn() -> None:
    async with Client(Scripted(["hi"]), context_tokens=60) as client:
        refused = await client.chat([{"role": "user", "content": "x" * 80}], status=400)
        assert refused["error"]["code"] == "context_length_exceeded"
        body = {"max_tokens": 5, "messages": [{"role": "user", "content": "x" * 80}]}
        refused = await client.post("/v1/messages", body, status=400)
        assert refused["error"]["message"].startswith("prompt is too long")
        await client.say([{"role": "user", "content": "x"}])
    assert client.check() == 1


class Watched(TemplateFormat):
    """Counts the characters that it reads. Long texts are read only once ``gate`` is set."""

    def __init__(self) -> None:
        self.gate, self.num_read = threading.Event(), 0
        super().__init__(TOKENIZER)

    def encode(self, text: str) -> list[int]:
        self.num_read += len(text)
        if len(text) > 10_000:
            self.gate.wait()
        return super().encode(text)


async def test_a_prompt_that_is_far_too_long_is_refused_before_all_of_it_is_read() -> None:
    watched = Watched()
    watched.gate.set()
    async with Client(Scripted([]), context_tokens=1000, chat_format=watched) as client:
        refused = await client.chat([{"role": "user", "content": "a b c " * 100_000}], status=400)
    assert "your messages have more than" in refused["error"]["message"]
    assert refused["error"]["code"] == "context_length_exceeded"
    assert watched.num_read < 100_000


async def test_while_a_long_prompt_is_read_others_are_answered() -> None:
    watched = Watched()
    async with Client(Scripted(["short", "long"]), chat_format=watched) as client:
        asking = asyncio.create_task(client.say([{"role": "user", "content": "a b c " * 15_000}]))
        assert (await client.say([{"role": "user", "content": "hi"}]))["content"] == "short"
        watched.gate.set()
        assert (await asking)["content"] == "long"
    assert client.check() == 2


async def test_a_long_prompt_that_is_asked_again_while_it_is_read_is_sampled_once() -> None:
    watched, engine = Watched(), Scripted(["one", "two"])
    body = json.dumps({"messages": [{"role": "user", "content": "a b c " * 15_000}]}).encode()
    async with Client(engine, chat_format=watched) as client:
        url, key, reading = client.server.url + "/v1/chat/completions", client.session.key, client.session._long_prompts
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as hasty:
            asking = asyncio.create_task(hasty.post(url, data=body).__aenter__())
            while not reading.locked():
                await asyncio.sleep(0.001)
            asking.cancel()
            await asyncio.wait((asking,))
        again = asyncio.create_task(client.post("/v1/chat/completions", body))
        while not reading._waiters:
            await asyncio.sleep(0.001)
        watched.gate.set()
        assert (await again)["choices"][0]["message"]["content"] == "one"
    assert len(engine.given) == client.check() == 1


async def test_a_request_that_does_not_arrive_is_nobodys_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("asyncrl.environments.agent.endpoint.server.READ_SECONDS", 0.1)
    async with Client(Scripted(["hi"])) as client:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n"
            f"Authorization: Bearer {client.session.key}\r\n\r\n{{"
        )
        halves = [await asyncio.open_connection(*client.server.url[7:].split(":")) for _ in range(20)]
        for place, (_, writer) in enumerate(halves):
            writer.write(head.encode())
            if place % 2:
                writer.close()
        assert all([b"408" in await reader.readline() for reader, _ in halves[::2]])
        for _, writer in halves:
            writer.close()
        monkeypatch.undo()
        await client.say([{"role": "user", "content": "hi"}])
    assert client.check() == 1
    assert not caplog.records


async def test_a_request_may_ask_for_less_and_the_sample_has_a_budget_for_all_calls() -> None:
    async with Client(Scripted(["abcdefgh", "abcdefgh"]), max_tokens=10) as client:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        first = await client.chat(messages, max_tokens=4, max_completion_tokens=3)
        assert first["choices"][0]["finish_reason"] == "length"
        second = await client.chat([{"role": "user", "content": "ho"}])
        assert second["choices"][0]["message"]["content"] == "abcdefg"
        refused = await client.chat(messages, status=400)
    assert refused["error"]["code"] == "context_length_exceeded"
    assert client.engine.limits == [3, 7]
    assert client.check() == 2


async def test_an_answer_that_was_cut_is_continued_with_the_end_of_its_turn() -> None:
    async with Client(Scripted(["abcdefgh", "yes"])) as client:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        messages += [await client.say(messages, max_tokens=3), {"role": "user", "content": "more"}]
        await client.say(messages)
    assert client.check() == 1
    assert "abc<|im_end|>\n<|im_start|>user\nmore<|im_end|>" in TOKENIZER.decode(client.engine.given[1])


# -- retries and the end -----------------------------------------------------------------------------------------------


async def hang_up(client: Client, asking: asyncio.Task[Any]) -> None:
    """End a request before its answer, which the engine then gives."""
    asking.cancel()
    await asyncio.wait((asking,))
    while any(one.is_listening() and not one.is_received for of in client.session._records.values() for one in of):
        await asyncio.sleep(0.001)
    client.engine.gate.set()
    while not client.session.num_unreceived:
        await asyncio.sleep(0.001)


async def test_a_client_that_hangs_up_gets_the_answer_when_it_asks_again() -> None:
    engine = Scripted(["one", "two"])
    engine.gate.clear()
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    async with Client(engine) as client:
        url, key = client.server.url + "/v1/chat/completions", client.session.key
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as hasty:
            asking = asyncio.create_task(hasty.post(url, data=body).__aenter__())
            while not engine.given:
                await asyncio.sleep(0.001)
            asking.cancel()
            await asyncio.wait((asking,))
        await asyncio.sleep(0)
        again = asyncio.create_task(client.post("/v1/chat/completions", body, **{"x-stainless-retry-count": "1"}))
        engine.gate.set()
        assert (await again)["choices"][0]["message"]["content"] == "one"
        retried = await client.post("/v1/chat/completions", body, **{"x-stainless-retry-count": "2"})
        assert retried["choices"][0]["message"]["content"] == "one"
        assert (await client.post("/v1/chat/completions", body))["choices"][0]["message"]["content"] == "two"
    assert client.check() == 2


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"stream": True}),
        ("/v1/chat/completions", {"n": 2}),
        ("/v1/messages", {"max_tokens": 99}),
        ("/v1/responses", {"input": "hi"}),
        ("/inference/v1/generate", {"token_ids": [5, 6]}),
    ],
)
async def test_an_answer_whose_client_has_hung_up_is_neither_trained_nor_continued(
    path: str, more: dict[str, Any]
) -> None:
    engine = Scripted(["one", *["lost"] * more.get("n", 1), "one", "two"])
    question: list[Any] = [{"role": "user", "content": "hi"}]
    async with Client(engine) as client:
        first = await client.say(question)
        engine.gate.clear()
        asking = asyncio.create_task(client.post(path, {"messages": question, **more}))
        while len(engine.given) < 1 + more.get("n", 1):
            await asyncio.sleep(0.001)
        await hang_up(client, asking)
        await client.say([*question, first, {"role": "user", "content": "go on"}])
        assert client.session.num_unreceived == 1
    (sequence,) = client.session.turns.sequences()
    assert "lost" not in TOKENIZER.decode([*sequence.prompt_tokens, *sequence.trajectory.tokens])
    assert sequence.trajectory.response_mask.sum() == len(engine.answers[0].tokens) + len(engine.answers[-1].tokens)


@pytest.mark.parametrize("more", [{}, {"stream": True}])
@pytest.mark.parametrize(
    ("reads", "goes_on", "trained"),
    [(0, False, [1]), (20, False, [1]), (2**16, False, [0, 1]), (0, True, [0, 1]), (20, True, [0, 1])],
)
async def test_an_answer_that_lies_unread_in_a_socket_that_is_closed_is_not_trained(
    more: dict[str, Any], reads: int, goes_on: bool, trained: list[int]
) -> None:
    """Unless its client goes on from it, and so has it from elsewhere."""
    question: list[Any] = [{"role": "user", "content": "hi"}]
    body = json.dumps({"messages": question, **more})
    async with Client(Scripted(["one", "two"])) as client:
        with socket.create_connection(client.server.url[7:].split(":")) as raw:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {client.session.key}\r\n"
            raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            while not len(client.session.turns):
                await asyncio.sleep(0.001)
            if reads:
                raw.recv(reads)
            one, then = {"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}
            await client.say([*question, one, then] if goes_on else [then])
        while len(client.server._last_answers) > 1:  # until the server knows that it is closed
            await asyncio.sleep(0.001)
        assert client.session.num_unreceived == 2 - len(trained)
    sequences = client.session.turns.sequences()
    assert sorted(number for one in sequences for number, _ in one.turns) == trained


async def test_a_stream_that_is_closed_after_its_last_event_is_trained() -> None:
    """A client that reads line by line leaves what follows the last event unread."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True})
    async with Client(Scripted(["a long answer " * 400])) as client:

        def read_to_the_last_event() -> None:
            url = f"{client.server.url}/v1/chat/completions"
            asked = urllib.request.Request(url, body.encode(), {"Authorization": f"Bearer {client.session.key}"})
            with urllib.request.urlopen(asked) as reply:
                while reply.readline().strip() != b"data: [DONE]":
                    pass

        await asyncio.to_thread(read_to_the_last_event)
        while client.server._last_answers:
            await asyncio.sleep(0.001)
        assert client.session.num_unreceived == 0
    assert len(client.session.turns.sequences()) == 1


async def test_what_equals_an_answer_that_got_lost_does_not_continue_it() -> None:
    """The client asks again in other words of JSON, receives the same answer, and goes on from that one."""
    engine = Scripted(["same", "same", "end"])
    question = [{"role": "user", "content": "hi"}]
    async with Client(engine) as client:
        engine.gate.clear()
        asking = asyncio.create_task(client.say(question, max_tokens=90))
        while not engine.given:
            await asyncio.sleep(0.001)
        await hang_up(client, asking)
        await client.say([*question, await client.say(question), {"role": "user", "content": "go on"}])
    (sequence,) = client.session.turns.sequences()
    assert [number for number, _ in sequence.turns] == [1, 2]


async def test_after_its_sample_a_key_is_worth_nothing() -> None:
    async with Client(Scripted(["hi"])) as client:
        async with Client(Scripted(["ho"])) as other:
            other.http.headers["Authorization"] = "Bearer " + client.session.key  # type: ignore[index]
            refused = await other.chat([{"role": "user", "content": "x"}], status=401)
        assert refused["error"]["code"] == "invalid_api_key"
        del client.server._sessions[client.session.key]
        await client.chat([{"role": "user", "content": "x"}], status=401)
        client.server._sessions[client.session.key] = client.session


@pytest.mark.parametrize("error", [EngineError("a request failed"), EngineDied("the engine is gone")])
async def test_an_engine_that_fails_ends_the_sample_as_it_does_everywhere(error: Exception) -> None:
    async def generate(*arguments: Any, **named: Any) -> Any:
        raise error

    with pytest.raises(type(error), match=str(error)):
        async with Client(generate) as client:
            await client.chat([{"role": "user", "content": "hi"}], status=503)
            await asyncio.Event().wait()  # the harness does not notice the failure
