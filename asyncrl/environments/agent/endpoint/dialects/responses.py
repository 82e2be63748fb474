"""OpenAI's responses API: POST /v1/responses. A request holds the conversation, or continues previous_response_id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from asyncrl.environments.agent.endpoint.dialects.dialect import Dialect, Event, is_cut, model_name, now, usage
from asyncrl.environments.agent.endpoint.request import (
    Json,
    ModelRequest,
    Refused,
    call,
    content,
    find_overridden,
    message,
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

_IGNORED: Final = ("reasoning",)
"""Input items to ignore, because the session continues from its own record of the sampled tokens."""


class Responses(Dialect):
    paths = ("/v1/responses", "/responses")

    def read(self, body: Json, session: Session) -> ModelRequest:
        if body.get("conversation"):
            raise Refused("conversation is not served here; send the whole input, or previous_response_id")
        if "message.output_text.logprobs" in rows(body.get("include"), "include"):
            raise Refused("include: message.output_text.logprobs is not served here; chat completions have logprobs")
        messages = list(_before(body.get("previous_response_id"), session))
        instructions = text(body.get("instructions") or "", "instructions")
        if instructions:
            messages.insert(0, {"role": "system", "content": instructions})
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else rows(given, "input")
        for place, item in enumerate(items):
            _add(messages, table(item, f"input[{place}]"), f"input[{place}]")
        if not messages:
            raise Refused("input is empty")
        return ModelRequest(
            messages=messages,
            tools=read_tools(body, _read_tool),
            max_tokens=whole(body.get("max_output_tokens"), "max_output_tokens", low=1),
            stop=stop_strings(body.get("stop"), "stop"),
            is_streamed=body.get("stream") is True,
            model=model_name(body),
            overridden=find_overridden(body, stop=session.stop),
            options={
                "tools": rows(body.get("tools"), "tools"),
                "previous": body.get("previous_response_id"),
                "has_instructions": bool(instructions),
            },
        )

    def write(self, request: ModelRequest, replies: Sequence[Turn], session: Session) -> Json:
        (turn,) = replies
        identity = f"resp_{turn.tag}"
        own = (
            request.messages[1:] if request.options["has_instructions"] else request.messages
        )  # instructions are of one request
        session.remembered[identity] = [*own, turn.message]
        counted = usage(replies)
        return {
            "id": identity,
            "object": "response",
            "created_at": now(),
            "model": request.model,
            "status": "incomplete" if is_cut(turn) else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut(turn) else None,
            "error": None,
            "output": _output(turn),
            "parallel_tool_calls": True,
            "previous_response_id": request.options["previous"],
            "tool_choice": "auto",
            "tools": request.options["tools"],
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": counted["prompt_tokens_details"],
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counted["total_tokens"],
            },
        }

    def events(self, request: ModelRequest, replies: Sequence[Turn], session: Session) -> Iterator[Event]:
        response = self.write(request, replies, session)
        begun = response | {"output": [], "status": "in_progress", "incomplete_details": None, "usage": None}
        made: list[Json] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(response["output"]):
            made += [{"output_index": index, **event} for event in _item_events(item)]
        made.append({"type": f"response.{response['status']}", "response": response})
        for number, event in enumerate(made):
            yield event["type"], event | {"sequence_number": number}


def _before(previous: Any, session: Session) -> Sequence[Json]:
    if not previous:
        return ()
    found = session.remembered.get(text(previous, "previous_response_id"))
    if found is None:
        raise Refused(f"previous_response_id: this sample has no response {short(previous)}", status=404)
    return found


def _add(messages: list[Json], item: Json, where: str) -> None:
    """Append an input item to the messages. An assistant's text and the calls after it form one message."""
    kind = item.get("type") or "message"
    if kind == "message":
        made = message(item, where)
        if made["role"] == "assistant" and messages and messages[-1] == {"role": "assistant", "content": ""}:
            messages.pop()
        messages.append(made)
    elif kind == "function_call":
        arguments = text(item.get("arguments"), f"{where}.arguments")
        made = call(text(item.get("call_id"), f"{where}.call_id"), text(item.get("name"), f"{where}.name"), arguments)
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1] = messages[-1] | {"tool_calls": [*messages[-1].get("tool_calls", ()), made]}
    elif kind == "function_call_output":
        said = {"role": "tool", "content": content(item.get("output"), f"{where}.output")}
        messages.append(said | {"tool_call_id": text(item.get("call_id"), f"{where}.call_id")})
    elif kind == "item_reference":
        raise Refused(
            f"{where}: items of type {short(kind)} are not served here; send the items themselves (many clients do "
            "with store = false), or previous_response_id"
        )
    elif kind not in _IGNORED:
        raise Refused(f"{where}: items of type {short(kind)} are not served here")


def _read_tool(given: Json, where: str) -> tuple[Any, Any, Any]:
    if given.get("type") != "function":
        raise Refused(f"{where}: only tools of type function are served here, not {short(given.get('type'))}")
    return given.get("name"), given.get("description"), given.get("parameters")


def _output(turn: Turn) -> list[Json]:
    status = "incomplete" if is_cut(turn) else "completed"
    output: list[Json] = []
    if "reasoning_content" in turn.message:
        thought = {"type": "reasoning_text", "text": turn.message["reasoning_content"]}
        output.append({"type": "reasoning", "id": f"rs_{turn.tag}", "summary": [], "content": [thought]})
    calls = turn.message.get("tool_calls", ())
    if turn.message["content"] or not calls:
        part = {"type": "output_text", "text": turn.message["content"], "annotations": [], "logprobs": []}
        output.append(
            {"type": "message", "id": f"msg_{turn.tag}", "role": "assistant", "status": status, "content": [part]}
        )
    output += [
        {"type": "function_call", "id": f"fc_{one['id']}", "call_id": one["id"], "status": status, **one["function"]}
        for one in calls
    ]
    return output


def _item_events(item: Json) -> Iterator[Json]:
    identity, begun = {"item_id": item["id"]}, {"status": "in_progress"}
    if item["type"] == "message":
        (part,) = item["content"]
        place = identity | {"content_index": 0}
        yield {"type": "response.output_item.added", "item": item | begun | {"content": []}}
        yield {"type": "response.content_part.added", "part": part | {"text": ""}} | place
        yield {"type": "response.output_text.delta", "delta": part["text"], "logprobs": []} | place
        yield {"type": "response.output_text.done", "text": part["text"], "logprobs": []} | place
        yield {"type": "response.content_part.done", "part": part} | place
    elif item["type"] == "function_call":
        said = item["arguments"]
        yield {"type": "response.output_item.added", "item": item | begun | {"arguments": ""}}
        yield {"type": "response.function_call_arguments.delta", "delta": said} | identity
        yield {"type": "response.function_call_arguments.done", "arguments": said, "name": item["name"]} | identity
    else:
        yield {"type": "response.output_item.added", "item": item}
    yield {"type": "response.output_item.done", "item": item}
