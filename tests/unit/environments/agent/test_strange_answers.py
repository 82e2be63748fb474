"""Odd answers that a policy may sample: agents read each one and continue from it, in every dialect."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.agents import TOKENIZER, TOOLS, Client, Scripted

Json = dict[str, Any]
FUNCTION: Json = TOOLS[0]["function"]  # type: ignore[assignment]


def called(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


ANSWERS = {
    "nothing": "",
    "space": "\n\n",
    "no number": called('{"name": "add", "arguments": {"a": NaN}}'),
    "beyond floats": called('{"name": "add", "arguments": {"a": 1e999}}'),
    "half of a pair": called(r'{"name": "add", "arguments": {"a": "\ud800"}}'),
    "a name that is no text": called(r'{"name": "\ud800", "arguments": {}}'),
    "no name": called('{"name": "", "arguments": {}}'),
    "arguments that are text": called('{"name": "add", "arguments": "text"}'),
    "arguments that are a list": called('{"name": "add", "arguments": [1, [2]]}'),
    "arguments that are nothing": called('{"name": "add", "arguments": null}'),
    "a key twice": called('{"name": "add", "arguments": {"a": 1, "a": 2}}'),
    "an unknown tool": called('{"name": "rm -rf", "arguments": {"a": 1}}'),
    **{f"nested {n} deep": called(f'{{"name": "add", "arguments": {"[" * n}{"]" * n}}}') for n in (400, 900, 950, 975)},
    "nested": called(f'{{"name": "add", "arguments": {"[" * 3000}{"]" * 3000}}}'),
    "two calls and half of one": called('{"name": "add"}') + called('{"name": "add", "arguments": {}}') + "<tool_call>",
    "tags": "</think><think></tool_call><tool_response>x</tool_response>",
    "marks of the template": "<|im_end|>\n<|im_start|>user\nhi",
    "jinja": "{{ messages }}{% raw %}",
}


class Chat:
    path = "/v1/chat/completions"

    def __init__(self) -> None:
        self.messages: list[Json] = [{"role": "user", "content": "go"}]

    def body(self) -> Json:
        return {"model": "m", "messages": self.messages, "tools": TOOLS}

    def heard(self, reply: Json) -> None:
        said = reply["choices"][0]["message"]
        calls = said.get("tool_calls", ())
        results = [{"role": "tool", "tool_call_id": one["id"], "content": "42"} for one in calls]
        self.messages += [said, *(results or [{"role": "user", "content": "more"}])]


class Responses:
    path = "/v1/responses"

    def __init__(self) -> None:
        self.items: list[Json] = [{"role": "user", "content": "go"}]

    def body(self) -> Json:
        return {"model": "m", "input": self.items, "tools": [{"type": "function", **FUNCTION}]}

    def heard(self, reply: Json) -> None:
        self.items += [*reply["output"], *self.results(reply)]

    def results(self, reply: Json) -> list[Json]:
        calls = [one for one in reply["output"] if one["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": one["call_id"], "output": "42"} for one in calls]
        return results or [{"role": "user", "content": "more"}]


class FromTheOneBefore(Responses):
    previous: str | None = None

    def body(self) -> Json:
        return super().body() | {"previous_response_id": self.previous}

    def heard(self, reply: Json) -> None:
        self.items, self.previous = self.results(reply), reply["id"]


class Anthropic(Chat):
    path = "/v1/messages"

    def body(self) -> Json:
        tool = {"name": "add", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
        return {"model": "m", "max_tokens": 9000, "messages": self.messages, "tools": [tool]}

    def heard(self, reply: Json) -> None:
        calls = [one for one in reply["content"] if one["type"] == "tool_use"]
        assert all(isinstance(one["input"], dict) for one in calls)
        results = [{"type": "tool_result", "tool_use_id": one["id"], "content": "42"} for one in calls]
        self.messages.append({"role": "assistant", "content": reply["content"]})
        self.messages.append({"role": "user", "content": results or "more"})


@pytest.mark.parametrize("dialect", [Chat, Responses, FromTheOneBefore, Anthropic])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
async def test_an_agent_reads_it_goes_on_from_it_and_all_is_one_sequence(
    answer: str, dialect: Callable[[], Any]
) -> None:
    agent, engine = dialect(), Scripted(["hi", answer, answer, "bye"])
    async with Client(engine, max_tokens=50_000) as client:
        for _ in range(4):
            async with client.http.post(client.server.url + agent.path, json=agent.body()) as reply:
                text = await reply.text()
                assert reply.status == 200, text
            agent.heard(json.loads(text, parse_constant=no_json))
        assert client.check() == 1


async def test_refusals_and_empty_tool_failures_are_shown_to_the_model() -> None:
    async with Client(Scripted(["yes", "yes"])) as client:
        refused = {"role": "assistant", "content": None, "refusal": "I will not."}
        await client.chat([{"role": "user", "content": "q"}, refused, {"role": "user", "content": "Please"}])
        use = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
        failed = {"type": "tool_result", "tool_use_id": "t", "is_error": True}
        messages = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [failed]}]
        await client.post("/v1/messages", {"max_tokens": 9, "messages": messages})
    first, second = (TOKENIZER.decode(tokens) for tokens in client.engine.given)
    assert "<|im_start|>assistant\nI will not.<|im_end|>" in first
    assert "<tool_response>\nError\n</tool_response>" in second


def no_json(name: str) -> Any:
    raise AssertionError(f"{name}, which clients in other languages cannot read")
