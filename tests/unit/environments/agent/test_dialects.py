"""Every dialect passes and trains exactly the engine's inputs and outputs, streamed or not."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asyncrl.environments.agent.endpoint import server
from tests.harness.agents import ANSWER, CALL, TOKENIZER, TOOLS, Client, Scripted

CHAT = "/v1/chat/completions"
QUESTION = "40 + 2 = ?"
USER = {"role": "user", "content": "hi"}
FUNCTION = TOOLS[0]["function"]


async def chat(client: Client, *, stream: bool) -> str:
    messages: list[Any] = [{"role": "developer", "content": "Be terse."}]
    messages.append({"role": "user", "content": [{"type": "text", "text": QUESTION}]})
    for _ in range(2):
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        found = await client.chat(messages, tools=TOOLS, logprobs=True, return_token_ids=True, **options)
        said = joined(found) if stream else found["choices"][0]["message"]
        messages.append({name: said[name] for name in ("role", "content", "tool_calls") if name in said})
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in said.get("tool_calls", ())
        ]
    return str(messages[-1]["content"])


def joined(events: list[tuple[str, Any]]) -> Any:
    """Join the chunks of a stream into its message."""
    said: dict[str, Any] = {}
    assert events.pop() == ("", None)
    assert events.pop()[1]["usage"]["completion_tokens"] > 0
    for _, chunk in events:
        (choice,) = chunk["choices"]
        calls = choice["delta"].pop("tool_calls", ())
        said |= choice["delta"]
        if calls:
            said.setdefault("tool_calls", []).extend(
                {name: value for name, value in call.items() if name != "index"} for call in calls
            )
    return said


async def responses(client: Client, *, stream: bool) -> str:
    tools = [{"type": "function", **FUNCTION}]
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    for _ in range(2):
        body = {"input": items, "instructions": "Be terse.", "tools": tools, "stream": stream}
        found = await client.post("/v1/responses", body)
        if stream:
            assert [event["sequence_number"] for _, event in found] == list(range(len(found)))
            assert all(name == event["type"] for name, event in found)
            found = found[-1][1]["response"]
        items += found["output"]
        for item in found["output"]:
            if item["type"] == "function_call":
                items.append({"type": "function_call_output", "call_id": item["call_id"], "output": "42"})
    return str(found["output"][-1]["content"][0]["text"])


async def anthropic(client: Client, *, stream: bool) -> str:
    tools = [{"name": "add", "description": "adds", "input_schema": FUNCTION["parameters"]}]  # type: ignore[index]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        system = [{"type": "text", "text": "Be terse.", "cache_control": {"type": "ephemeral"}}]
        body = {"messages": messages, "system": system, "tools": tools, "stream": stream, "max_tokens": 1000}
        found = await client.post("/v1/messages", body)
        blocks = streamed_blocks(found) if stream else found["content"]
        assert all(block["signature"] for block in blocks if block["type"] == "thinking")
        messages.append({"role": "assistant", "content": blocks})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "42"}]}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    return str(blocks[-1]["text"])


def streamed_blocks(events: list[tuple[str, Any]]) -> list[Any]:
    assert [events[0][0], events[-1][0]] == ["message_start", "message_stop"]
    blocks: list[Any] = []
    for name, event in events:
        if name == "content_block_start":
            blocks.append(dict(event["content_block"]))
        if name == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                blocks[-1]["input"] = json.loads(delta["partial_json"])
            else:
                kind = delta["type"].removesuffix("_delta")
                blocks[-1][kind] += delta[kind]
    return blocks


async def tokens(client: Client, *, stream: bool) -> str:
    """A harness that renders prompts itself."""
    encode = TOKENIZER(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    for _ in range(2):
        body = {"model": "m", "token_ids": encode, "sampling_params": {"max_tokens": 1000, "logprobs": 1}}
        (choice,) = (await client.post("/inference/v1/generate", body))["choices"]
        answer = client.engine.answers[-1]
        assert choice["token_ids"] == answer.tokens.tolist()
        content = choice["logprobs"]["content"]
        assert [one["token"] for one in content] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert [one["logprob"] for one in content] == answer.logprobs.tolist()
        result = TOKENIZER("\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        encode = [*encode, *choice["token_ids"], *result]
    return TOKENIZER.decode(choice["token_ids"], skip_special_tokens=True).rpartition("\n")[2]


DIALECTS = [(chat, False), (chat, True), (responses, False), (responses, True)]
DIALECTS += [(anthropic, False), (anthropic, True), (tokens, False)]


@pytest.mark.parametrize(("dialect", "stream"), DIALECTS)
async def test_a_turn_with_a_tool_and_its_answer_are_one_sequence(
    dialect: Callable[..., Awaitable[str]], stream: bool
) -> None:
    async with Client(Scripted([CALL, ANSWER])) as client:
        assert await dialect(client, stream=stream) == "The answer is 42."
    assert client.check() == 1


async def test_all_dialects_ask_the_engine_for_the_same() -> None:
    asked = []
    for dialect in (chat, responses, anthropic):
        async with Client(Scripted([CALL, ANSWER])) as client:
            await dialect(client, stream=False)
        asked.append(client.engine.given)
    assert asked[0] == asked[1] == asked[2]


@pytest.mark.parametrize(
    ("path", "cached_of"),
    [
        (CHAT, lambda usage: usage["prompt_tokens_details"]["cached_tokens"]),
        ("/v1/responses", lambda usage: usage["input_tokens_details"]["cached_tokens"]),
        ("/v1/messages", lambda usage: usage["cache_read_input_tokens"]),
    ],
)
async def test_usage_says_how_much_of_the_prompt_the_engine_had_cached(
    path: str, cached_of: Callable[[Any], int]
) -> None:
    """The scripted engine has the prompt before in its cache; Anthropic's input_tokens are the others."""
    async with Client(Scripted([ANSWER, ANSWER])) as client:
        limit = {"max_tokens": 1000} if path == "/v1/messages" else {}
        first, second = [
            (await client.post(path, {"input" if "resp" in path else "messages": [USER] * count, **limit}))["usage"]
            for count in (1, 2)
        ]
        given = [len(tokens) for tokens in client.engine.given]
    assert (cached_of(first), cached_of(second)) == (0, given[0])
    assert sum(second[name] for name in ("prompt_tokens", "input_tokens") if name in second) == given[1] - (
        given[0] if path == "/v1/messages" else 0
    )


async def test_a_response_goes_on_from_the_one_before() -> None:
    async with Client(Scripted(["one", "two"])) as client:
        first = await client.post("/v1/responses", {"input": "hi"})
        body = {"input": "more", "previous_response_id": first["id"]}
        await client.post("/v1/responses", body)
        refused = await client.post("/v1/responses", body | {"previous_response_id": "resp_x"}, status=404)
    assert "resp_x" in refused["error"]["message"]
    assert client.check() == 1


async def test_instructions_are_those_of_the_request_and_developer_messages_stay() -> None:
    async with Client(Scripted(["one", "two", "three"])) as client:
        items = [{"role": "developer", "content": "Rules"}, USER]
        first = await client.post("/v1/responses", {"instructions": "A", "input": items})
        more = {"input": "more", "previous_response_id": first["id"]}
        await client.post("/v1/responses", more | {"instructions": "A"})
        await client.post("/v1/responses", more)
    asked = [TOKENIZER.decode(tokens) for tokens in client.engine.given]
    assert "system\nA<|im_end|>\n<|im_start|>system\nRules<" in asked[1]
    assert asked[2] == asked[1].removeprefix("<|im_start|>system\nA<|im_end|>\n")
    assert client.check() == 2


async def test_logprobs_of_a_chat_are_the_engines() -> None:
    async with Client(Scripted(["the"])) as client:
        found = await client.chat([{"role": "user", "content": "hi"}], logprobs=True, return_token_ids=True)
    (choice,), answer = found["choices"], client.engine.answers[0]
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == answer.logprobs.tolist()
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["t", "h", "e", "<|im_end|>"]
    assert choice["token_ids"] == answer.tokens.tolist()
    assert found["prompt_token_ids"] == client.engine.given[0]
    assert found["usage"]["prompt_tokens"] == len(client.engine.given[0])


async def test_tokens_are_counted_and_the_model_named_without_a_turn() -> None:
    async with Client(Scripted(["hi"])) as client:
        messages = [{"role": "user", "content": "hello"}]
        counted = await client.post("/v1/messages/count_tokens", {"messages": messages})
        await client.say(messages)
        async with client.http.get(client.server.url + "/v1/models") as reply:
            (model,) = (await reply.json())["data"]
    assert counted == {"input_tokens": len(client.engine.given[0])}
    assert (model["id"], model["max_model_len"]) == ("policy", 100_000)


async def test_the_tokens_of_messages_that_end_with_the_assistants_are_counted() -> None:
    async with Client(Scripted([])) as client:
        messages = [USER, {"role": "assistant", "content": "hello"}]
        counted = [await client.post("/v1/messages/count_tokens", {"messages": messages[:n]}) for n in (1, 2)]
    assert counted[0]["input_tokens"] < counted[1]["input_tokens"]


async def test_a_stream_is_kept_open_while_the_model_thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.001)
    engine = Scripted(["hi"])
    engine.gate.clear()
    async with Client(engine) as client:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with client.http.post(client.server.url + "/v1/chat/completions", json=body) as reply:
            assert (await reply.content.readline()).startswith(b":")
            engine.gate.set()
            assert b'"content": "hi"' in await reply.read()
    assert client.check() == 1


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/chat/completions", {"messages": []}, "messages is empty"),
        ("/v1/chat/completions", {"messages": [{"role": "robot"}]}, "messages\\[0\\].role must be one of"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "a part of type .image_url. has no image",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}], "n": 0}, "n must be a whole number"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            "use tool_calls",
        ),
        ("/v1/responses", {"input": [{"type": "web_search_call"}]}, "items of type 'web_search_call'"),
        ("/v1/responses", {"input": "a", "include": ["message.output_text.logprobs"]}, "logprobs is not served"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}, "only tools of type function"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "type 'image'"),
        ("/inference/v1/generate", {"token_ids": [1, 10**6]}, "token_ids\\[1\\] must be a whole number from 0"),
        ("/v1/chat/completions", b"{", "not JSON"),
        ("/v1/chat/completions", b"[" * 100_000, "nested|not JSON"),
        ("/v1/messages/count_tokens", b"[" * 100_000, "nested|not JSON"),
        ("/v1/chat/completions", b"[]", "must be an object"),
        ("/v1/chat/completions", b'{"messages": NaN}', "NaN"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_with_the_reason(path: str, body: Any, says: str) -> None:
    async with Client(Scripted([])) as client:
        refused = await client.post(path, body, status=400)
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(refused["error"]["message"])
    assert client.engine.given == []


@pytest.mark.parametrize(
    ("path", "more", "says"),
    [
        (CHAT, {"stop": ["\n", "Observation:"]}, "stop: 'Observation:' ends no answer of this run.*rollout.stop"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format = .*ask for JSON in the prompt"),
        (CHAT, {"logit_bias": {"5": 10}}, "logit_bias"),
        (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty = 0.5"),
        (CHAT, {"tool_choice": "required"}, "tool_choice = 'required'.*cannot be forced"),
        (CHAT, {"logprobs": True, "top_logprobs": 5}, "top_logprobs = 5"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        (CHAT, {"max_completion_tokens": 0}, "max_tokens must be a whole number"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema"}}}, "text.format of type 'json_schema'"),
        ("/v1/responses", {"background": True}, "background = True"),
        (
            "/v1/responses",
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "'item_reference'.*the items themsel",
        ),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format of type 'json_s",
        ),
        ("/v1/messages", {"output_format": {"type": "json_schema"}}, "output_format = .*ask for JSON in the prompt"),
        ("/v1/messages", {"messages": [USER, {"role": "assistant", "content": "4"}]}, "prefill"),
        (CHAT, {"continue_final_message": True}, "continue_final_message = True"),
        (CHAT, {"add_generation_prompt": False}, "add_generation_prompt = False"),
        (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template = .*rollout.options.chat_template"),
        (CHAT, {"stop_regex": "a+"}, "stop_regex = 'a\\+'"),
        ("/v1/messages", {"stop_sequences": ["x"]}, "stop_sequences: 'x'"),
        ("/v1/messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("/inference/v1/generate", {"sampling_params": {"min_tokens": 5}}, "min_tokens = 5.*rollout.min_new_tokens"),
    ],
)
async def test_what_a_program_counts_on_is_obeyed_or_refused_by_name(path: str, more: Any, says: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "input": "hi", "token_ids": [5], **more}
    async with Client(Scripted([]), stop=["\n"]) as client:
        refused = await client.post(path, body, status=400)
    assert re.search(says, refused["error"]["message"]), refused
    assert client.engine.given == []


async def test_harmless_fields_are_accepted_and_overridden_ones_are_named() -> None:
    idle = {"response_format": {"type": "text"}, "logit_bias": {}, "presence_penalty": 0.0, "tool_choice": "auto"}
    idle |= {"stop": "\n", "top_logprobs": None, "parallel_tool_calls": None}
    async with Client(Scripted(["one", "two"]), stop=["\n"]) as client:
        for asked, named in ((idle, None), (idle | {"temperature": 0.2, "seed": 7}, "seed, temperature")):
            body = {"messages": [{"role": "user", "content": "hi"}], **asked}
            async with client.http.post(client.server.url + CHAT, json=body) as reply:
                assert (reply.status, reply.headers.get("x-not-obeyed")) == (200, named)
        assert [turn.overridden for turn in client.session.turns] == [{}, {"temperature": 0.2, "seed": 7}]


CLAUDE_CODE: Any = {  # 2.1.197, shortened
    "model": "m",
    "system": [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}],
    "tools": [{"name": "Bash", "description": "Run it.", "input_schema": FUNCTION["parameters"]}],
    "metadata": {"user_id": "{}"},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
CODEX: Any = {  # 0.171.0, shortened
    "model": "m",
    "input": [
        {"type": "message", "id": "msg_1", "role": role, "content": [{"type": "input_text", "text": said}]}
        for role, said in (("developer", "You help."), ("developer", "Skills."), ("user", "Here."), ("user", "hi"))
    ],
    "tools": [{"type": "function", "strict": False, **FUNCTION}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2292f",
    "client_metadata": {"session_id": "01a2292f"},
    "stream": True,
}


@pytest.mark.parametrize(("path", "body"), [("/v1/messages?beta=true", CLAUDE_CODE), ("/v1/responses", CODEX)])
async def test_what_claude_code_and_codex_send_is_served(path: str, body: Any) -> None:
    async with Client(Scripted(["hello"])) as client:
        found = await client.post(path, body)
        assert "hello" in json.dumps(found)
    assert client.check() == 1


# -- stop strings ------------------------------------------------------------------------------------------------------

SEARCH = "<think>\nLook.\n</think>\n\nAction: look\nObservation: "
STOP = "Observation:"


@pytest.mark.parametrize(("stop", "ends"), [(STOP, " look\n"), ([STOP, "rvat"], " look\n"), (None, STOP)])
async def test_requested_stop_string_is_cut_and_sampled_tokens_are_kept(stop: Any, ends: str) -> None:
    async with Client(Scripted([SEARCH, SEARCH], ends=False), stop=(STOP, "rvat")) as client:
        messages: list[Any] = [USER]
        said = await client.say(messages, stop=stop)
        assert said["content"].rstrip(" ").endswith(ends)
        assert said["reasoning_content"] == "Look."
        messages += [said, {"role": "user", "content": f"{STOP} 42"}]
        (last,) = (await client.chat(messages, stop=stop))["choices"]
        assert last["finish_reason"] == "stop"
    assert client.check() == 1
    assert f"{STOP} <|im_end|>\n<|im_start|>user\n{STOP} 42<|im_end|>" in TOKENIZER.decode(client.engine.given[1])


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_clients_read_which_stop_sequence_ended_the_answer(stream: bool) -> None:
    body: Any = {"max_tokens": 1000, "messages": [USER], "stream": stream, "stop_sequences": [STOP]}
    async with Client(Scripted([SEARCH, SEARCH, ANSWER], ends=False), stop=[STOP, "other"]) as client:
        found = await client.post("/v1/messages", body)
        stopped, blocks = (found[-2][1]["delta"], streamed_blocks(found)) if stream else (found, found["content"])
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", STOP)
        assert blocks[-1]["text"] == "Action: look\n"
        more = {"role": "user", "content": "more"}
        body |= {"stream": False, "messages": [USER, {"role": "assistant", "content": blocks}, more]}
        cut = await client.post("/v1/messages", body | {"max_tokens": len(client.engine.answers[0].tokens) - 1})
        assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
        ended = await client.post("/v1/messages", body)
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)
    assert [one.finish_reason for one in client.engine.answers] == ["stop", "length", "stop"]
    assert client.check() == 2
