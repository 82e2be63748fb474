"""A request in a form that does not depend on its dialect, and the messages of a conversation.

A message follows OpenAI's chat completions, with text as content:
    {"role": "user", "content": "hi"}
    {"role": "assistant", "content": ..., "tool_calls": [{"id": ..., "type": "function", "function": {"name": ...,
        "arguments": JSON text}}]}, where tool_calls is optional
    {"role": "tool", "tool_call_id": ..., "content": "42"}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.environments.agent.endpoint.refusal import Json, Refused, rows, short, table, text

MOST_ANSWERS: Final = 128
_ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request.

    messages, tools  conversation to answer; tools as OpenAI's: {"type": "function", "function": {"name": ..., ...}}
    tokens           i32[P], tokens to continue instead of the messages; None: use the messages
    max_tokens       limit of the answer; None: all tokens that are left
    count            number of answers to sample
    stop             stop strings that the request names; the message of an answer ends before them
    wishes           requested settings that are not obeyed, because the run's sampling rules apply
    options          data that only the request's dialect needs to write the answer
    """

    messages: Sequence[Json] = ()
    tools: Sequence[Json] = ()
    tokens: NDArray[np.int32] | None = None
    max_tokens: int | None = None
    count: int = 1
    stop: Sequence[str] = ()
    is_streamed: bool = False
    model: str = ""
    wishes: Json = field(default_factory=dict)
    options: Json = field(default_factory=dict)


def message(value: Any, where: str) -> Json:
    """Check a message of a request, and return it in the common form. Raises Refused."""
    given = table(value, where)
    role = _ROLES.get(text(given.get("role"), f"{where}.role"))
    if role is None:
        raise Refused(f"{where}.role must be one of {', '.join(_ROLES)}, got {short(given['role'])}")
    if given.get("function_call"):
        raise Refused(f"{where}.function_call is not supported; use tool_calls")
    said = given.get("refusal") if given.get("content") is None else given["content"]
    made: Json = {"role": role, "content": content(said, f"{where}.content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(given.get(name), str):
            made[name] = given[name]
    if role == "assistant" and given.get("tool_calls"):
        calls = rows(given["tool_calls"], f"{where}.tool_calls")
        made["tool_calls"] = [_call(one, f"{where}.tool_calls[{place}]") for place, one in enumerate(calls)]
    return made


def _call(value: Any, where: str) -> Json:
    given = table(value, where)
    function = table(given.get("function"), f"{where}.function")
    arguments = function.get("arguments", "")
    return call(
        text(given.get("id", ""), f"{where}.id"),
        text(function.get("name"), f"{where}.function.name"),
        arguments if isinstance(arguments, str) else json.dumps(arguments),
    )


def call(identity: str, name: str, arguments: str) -> Json:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, description: Any, parameters: Any, where: str) -> Json:
    """Return a tool definition, with its keys in the order that models are used to."""
    made: Json = {"name": name}
    if description is not None:
        made["description"] = text(description, f"{where}.description")
    made["parameters"] = table({} if parameters is None else parameters, f"{where}: its schema")
    return {"type": "function", "function": made}


def content(value: Any, where: str) -> str:
    """Return a message's content, text or a list of text parts, as one text; "" for None."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return "".join(_part(part, f"{where}[{place}]") for place, part in enumerate(rows(value, where)))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    given = table(part, where)
    if "text" not in given and given.get("type") == "refusal":
        return text(given.get("refusal"), f"{where}.refusal")
    if "text" not in given:
        raise Refused(
            f"{where}: a part of type {short(given.get('type'))} is not text; images and files cannot be read"
        )
    return text(given["text"], f"{where}.text")


def in_order_of_calls(messages: Sequence[Json]) -> list[Json]:
    """Return the messages with the results of each turn's tool calls in the order of the calls.

    Clients match results with calls by their ids and may send them in any order. Most chat templates write no ids, so a
    model would read them in another order than it called. Results without a known id stay behind the others.
    """
    made: list[Json] = []
    results: list[Json] = []
    places: dict[str, int] = {}

    def flush() -> None:
        made.extend(sorted(results, key=lambda one: places.get(one.get("tool_call_id", ""), len(places))))
        results.clear()

    for one in messages:
        if one["role"] == "tool":
            results.append(one)
            continue
        flush()
        places = {given["id"]: place for place, given in enumerate(one.get("tool_calls", ()))}
        made.append(one)
    flush()
    return made


def num_characters(messages: Sequence[Json], tools: Sequence[Json]) -> int:
    """Return how many characters a chat template may write of a conversation, without its own."""
    found = sum(len(json.dumps(one, ensure_ascii=False)) for one in tools)
    for one in messages:
        found += len(one["content"]) + len(one.get("reasoning_content", ""))
        found += sum(len(made["function"]["arguments"]) for made in one.get("tool_calls", ()))
    return found


def digests(messages: Sequence[Json], tools: Sequence[Json]) -> list[bytes]:
    """Return digests of all prefixes of a conversation: item n covers the tools and the first n messages.

    Two digests are equal if the messages say the same. Changes that client libraries make do not matter: the order of
    keys, spaces in arguments, ids, and reasoning that was left out.
    """
    found = [hashlib.blake2b(_bytes(list(tools)), digest_size=16).digest()]
    for one in messages:
        found.append(hashlib.blake2b(found[-1] + _bytes(_normal(one)), digest_size=16).digest())
    return found


def _normal(one: Json) -> list[Any]:
    calls = [[made["function"]["name"], as_object(made["function"]["arguments"])] for made in one.get("tool_calls", ())]
    return [one["role"], one["content"].strip(), calls]


def as_object(arguments: str) -> Json:
    """Parse a call's arguments (JSON text) into an object, because Anthropic's clients always expect one."""
    try:
        found = json.loads(arguments)
    except ValueError:
        found = arguments
    return found if isinstance(found, dict) else {"arguments": found}


def _bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
