"""Anthropic's messages API, which Claude Code speaks: POST /v1/messages, and counting the tokens of such a request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from asyncrl.environments.agent.endpoint.dialects.dialect import Dialect, Event, is_cut, model_name, usage
from asyncrl.environments.agent.endpoint.request import (
    Json,
    ModelRequest,
    Refused,
    as_object,
    call,
    content,
    find_overridden,
    read_tools,
    rows,
    short,
    stop_strings,
    table,
    text,
    whole,
)
from asyncrl.environments.agent.endpoint.session import Session
from asyncrl.environments.agent.endpoint.turns import Turn

_ERRORS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


class AnthropicMessages(Dialect):
    paths = ("/v1/messages", "/messages")

    def refuse(self, error: Refused) -> Json:
        kind = _ERRORS.get(error.status, "api_error")
        said = str(error)
        if error.code == "context_length_exceeded":
            said = f"prompt is too long: {said}"  # its clients look for these words
        return {"type": "error", "error": {"type": kind, "message": said}}

    def read(self, body: Json, session: Session) -> ModelRequest:
        request = self.read_any(body, session)
        if request.messages[-1]["role"] == "assistant":
            raise Refused(
                "the last message is the assistant's: an answer that your program begins (prefill) cannot be continued "
                "here; end with a message of the user"
            )
        return request

    def read_any(self, body: Json, session: Session) -> ModelRequest:
        """Convert a request's body, whose last message may be anyone's. Raises Refused."""
        given = rows(body.get("messages"), "messages")
        if not given:
            raise Refused("messages is empty")
        messages: list[Json] = []
        if system := content(body.get("system"), "system"):
            messages.append({"role": "system", "content": system})
        for place, one in enumerate(given):
            messages += _messages(table(one, f"messages[{place}]"), f"messages[{place}]")
        return ModelRequest(
            messages=messages,
            tools=read_tools(body, _read_tool),
            max_tokens=whole(body.get("max_tokens"), "max_tokens", low=1),
            stop=stop_strings(body.get("stop_sequences"), "stop_sequences"),
            is_streamed=body.get("stream") is True,
            model=model_name(body),
            overridden=find_overridden(body, stop=session.stop),
        )

    def write(self, request: ModelRequest, replies: Sequence[Turn], session: Session) -> Json:
        (turn,) = replies
        counted, reason = usage(replies), _stop(turn)
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        return {
            "id": f"msg_{turn.tag}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": _blocks(turn),
            "stop_reason": reason,
            "stop_sequence": turn.stopped_by if reason == "stop_sequence" else None,
            "usage": {
                "input_tokens": counted["prompt_tokens"] - cached,  # theirs are the tokens that were not cached
                "cache_read_input_tokens": cached,
                "output_tokens": counted["completion_tokens"],
            },
        }

    def events(self, request: ModelRequest, replies: Sequence[Turn], session: Session) -> Iterator[Event]:
        whole_message = self.write(request, replies, session)
        used = whole_message["usage"]
        begun = whole_message | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": used | {"output_tokens": 0},
        }
        yield _event("message_start", message=begun)
        for index, block in enumerate(whole_message["content"]):
            empty, delta = _delta(block)
            yield _event("content_block_start", index=index, content_block=block | empty)
            yield _event("content_block_delta", index=index, delta=delta)
            if block["type"] == "thinking":
                signed = {"type": "signature_delta", "signature": block["signature"]}
                yield _event("content_block_delta", index=index, delta=signed)
            yield _event("content_block_stop", index=index)
        stopped = {name: whole_message[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=stopped, usage=used)
        yield _event("message_stop")


def _event(kind: str, **data: Any) -> Event:
    return kind, {"type": kind, **data}


def _stop(turn: Turn) -> str:
    if is_cut(turn):
        return "max_tokens"
    if turn.message.get("tool_calls"):
        return "tool_use"
    return "stop_sequence" if turn.stopped_by else "end_turn"


def _blocks(turn: Turn) -> list[Json]:
    blocks: list[Json] = []
    if "reasoning_content" in turn.message:
        blocks.append({"type": "thinking", "thinking": turn.message["reasoning_content"], "signature": turn.tag})
    if turn.message["content"]:
        blocks.append({"type": "text", "text": turn.message["content"]})
    for one in turn.message.get("tool_calls", ()):
        function = one["function"]
        blocks.append(
            {"type": "tool_use", "id": one["id"], "name": function["name"], "input": as_object(function["arguments"])}
        )
    return blocks


def _delta(block: Json) -> tuple[Json, Json]:
    """Return the fields of a block that are empty at its start, and the delta that fills them."""
    if block["type"] == "thinking":
        return {"thinking": "", "signature": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    if block["type"] == "text":
        return {"text": ""}, {"type": "text_delta", "text": block["text"]}
    said = json.dumps(block["input"], ensure_ascii=False)
    return {"input": {}}, {"type": "input_json_delta", "partial_json": said}


def _messages(given: Json, where: str) -> list[Json]:
    """Convert one Anthropic message. Tool results become separate messages, before the text of the same message."""
    role, said = text(given.get("role"), f"{where}.role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise Refused(f"{where}.role must be user or assistant, got {short(role)}")
    blocks = [{"type": "text", "text": said}] if isinstance(said, str) else rows(said, f"{where}.content")
    words: list[str] = []
    calls: list[Json] = []
    results: list[Json] = []
    for place, one in enumerate(blocks):
        at = f"{where}.content[{place}]"
        block = table(one, at)
        match block.get("type"):
            case "text":
                words.append(text(block.get("text"), f"{at}.text"))
            case "thinking" | "redacted_thinking":
                pass  # the session continues from its own record of the sampled tokens
            case "tool_use" if role == "assistant":
                name, arguments = text(block.get("name"), f"{at}.name"), json.dumps(block.get("input", {}))
                calls.append(call(text(block.get("id"), f"{at}.id"), name, arguments))
            case "tool_result" if role == "user":
                identity = text(block.get("tool_use_id"), f"{at}.tool_use_id")
                result = content(block.get("content"), f"{at}.content") or ("Error" if block.get("is_error") else "")
                results.append({"role": "tool", "tool_call_id": identity, "content": result})
            case kind:
                raise Refused(f"{at}: blocks of type {short(kind)} are not served in a message of the {role}")
    spoken: Json = {"role": role, "content": "".join(words)}
    if calls:
        spoken["tool_calls"] = calls
    return [*results, spoken] if words or calls or not results else results


def _read_tool(given: Json, where: str) -> tuple[Any, Any, Any]:
    if "input_schema" not in given:
        raise Refused(f"{where}: only tools with an input_schema are served here")
    return given.get("name"), given.get("description"), given["input_schema"]
