"""OpenAI's chat completions API: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from asyncrl.environments.agent.endpoint.dialects.dialect import DONE, Dialect, Event, is_cut, model_name, now, usage
from asyncrl.environments.agent.endpoint.request import (
    MOST_ANSWERS,
    Json,
    ModelRequest,
    Refused,
    find_overridden,
    message,
    read_tools,
    rows,
    short,
    stop_strings,
    table,
    whole,
)
from asyncrl.environments.agent.endpoint.session import Session
from asyncrl.environments.agent.endpoint.turns import Turn


class ChatCompletions(Dialect):
    paths = ("/v1/chat/completions", "/chat/completions")
    end = DONE

    def read(self, body: Json, session: Session) -> ModelRequest:
        messages = rows(body.get("messages"), "messages")
        if not messages:
            raise Refused("messages is empty")
        if body.get("functions"):
            raise Refused("functions is not supported; use tools")
        wanted = body.get("max_completion_tokens")
        return ModelRequest(
            messages=[message(one, f"messages[{place}]") for place, one in enumerate(messages)],
            tools=_read_tools(body),
            max_tokens=whole(body.get("max_tokens") if wanted is None else wanted, "max_tokens", low=1),
            count=whole(body.get("n"), "n", low=1, high=MOST_ANSWERS) or 1,
            stop=[] if body.get("include_stop_str_in_output") else stop_strings(body.get("stop"), "stop"),
            is_streamed=body.get("stream") is True,
            model=model_name(body),
            overridden=find_overridden(body, stop=session.stop),
            options={
                "logprobs": bool(body.get("logprobs")),
                "token_ids": bool(body.get("return_token_ids")),
                "usage": bool(table(body.get("stream_options") or {}, "stream_options").get("include_usage")),
            },
        )

    def write(self, request: ModelRequest, replies: Sequence[Turn], session: Session) -> Json:
        choices = [
            {"index": index, "message": turn.message, "finish_reason": _finish(turn)} | _details(request, turn, session)
            for index, turn in enumerate(replies)
        ]
        made = _head(request, replies, "chat.completion") | {"choices": choices, "usage": usage(replies)}
        if request.options["token_ids"]:
            made["prompt_token_ids"] = replies[0].context.tolist()
        return made

    def events(self, request: ModelRequest, replies: Sequence[Turn], session: Session) -> Iterator[Event]:
        head = _head(request, replies, "chat.completion.chunk")
        for index, turn in enumerate(replies):
            said = {name: value for name, value in turn.message.items() if name != "tool_calls"}
            yield "", head | {"choices": [_chunk(index, said) | _details(request, turn, session)]}
            for place, call in enumerate(turn.message.get("tool_calls", ())):
                yield "", head | {"choices": [_chunk(index, {"tool_calls": [{"index": place, **call}]})]}
            yield "", head | {"choices": [_chunk(index, {}, finish=_finish(turn))]}
        if request.options["usage"]:
            yield "", head | {"choices": [], "usage": usage(replies)}


def _read_tools(body: Json) -> list[Json]:
    """Return the tools as they are: templates write all their fields."""
    return (
        [{"type": "function", "function": one["function"]} for one in body["tools"]]
        if read_tools(body, _read_tool)
        else []
    )


def _read_tool(given: Json, where: str) -> tuple[Any, Any, Any]:
    if given.get("type", "function") != "function":
        raise Refused(f"{where}: only tools of type function are served here, not {short(given['type'])}")
    function = table(given.get("function"), f"{where}.function")
    return function.get("name"), function.get("description"), function.get("parameters")


def _head(request: ModelRequest, replies: Sequence[Turn], kind: str) -> Json:
    return {"id": f"chatcmpl-{replies[0].tag}", "object": kind, "created": now(), "model": request.model}


def _chunk(index: int, delta: Json, *, finish: str | None = None) -> Json:
    return {"index": index, "delta": delta, "finish_reason": finish}


def _finish(turn: Turn) -> str:
    if is_cut(turn):
        return "length"
    return "tool_calls" if turn.message.get("tool_calls") else "stop"


def _details(request: ModelRequest, turn: Turn, session: Session) -> Json:
    """Return the logprobs and token ids of an answer, if the request asks for them."""
    made: Json = {}
    if request.options["token_ids"]:
        made["token_ids"] = turn.answer.tokens.tolist()
    if request.options["logprobs"]:
        made["logprobs"] = {"content": [_logprob(*pair, session) for pair in _pairs(turn)], "refusal": None}
    return made


def _pairs(turn: Turn) -> Iterator[tuple[int, float]]:
    return zip(turn.answer.tokens.tolist(), turn.answer.logprobs.tolist(), strict=True)


def _logprob(token: int, logprob: float, session: Session) -> Json:
    shown = session.chat_format.decode([token])
    known = None if "\ufffd" in shown else list(shown.encode())  # part of a letter: these are not the token's bytes
    return {"token": shown, "logprob": logprob, "bytes": known, "top_logprobs": []}
