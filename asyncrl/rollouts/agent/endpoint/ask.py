"""What a request asks for, whatever dialect it came in, and the messages of which a conversation is made.

A message here is OpenAI's of chat completions, with text as content: {"role": "user", "content": "hi"}; of an assistant
perhaps with {"tool_calls": [{"id": ..., "type": "function", "function": {"name": ..., "arguments": JSON text}}]}; of a
tool {"role": "tool", "tool_call_id": ..., "content": "42"}.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollouts.agent.endpoint.refusal import Json, Refused, rows, short, table, text

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

    messages, tools  to be answered; tools as OpenAI's: {"type": "function", "function": {"name": ..., ...}}
    tokens           i32[P] to be continued instead; None: the messages
    max_tokens       of the answer; None: what is left
    count            answers that are wanted
    wishes           what was asked for and is not obeyed: the run's sampling rules hold
    options          what only the request's dialect needs, to write the answer
    """

    messages: Sequence[Json] = ()
    tools: Sequence[Json] = ()
    tokens: NDArray[np.int32] | None = None
    max_tokens: int | None = None
    count: int = 1
    is_streamed: bool = False
    model: str = ""
    wishes: Json = field(default_factory=dict)
    options: Json = field(default_factory=dict)


def message(value: Any, where: str) -> Json:
    """A message of a request, checked. Raises Refused."""
    given = table(value, where)
    role = _ROLES.get(text(given.get("role"), f"{where}.role"))
    if role is None:
        raise Refused(f"{where}.role must be one of {', '.join(_ROLES)}, got {short(given['role'])}")
    made: Json = {"role": role, "content": content(given.get("content"), f"{where}.content")}
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
    """Its keys in the order in which models are used to them."""
    made: Json = {"name": name}
    if description is not None:
        made["description"] = text(description, f"{where}.description")
    made["parameters"] = table({} if parameters is None else parameters, f"{where}: its schema")
    return {"type": "function", "function": made}


def content(value: Any, where: str) -> str:
    """Text, or parts that are text; None is empty."""
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


def digests(messages: Sequence[Json], tools: Sequence[Json]) -> list[bytes]:
    """Of the beginnings of a conversation: item n is of its first n messages.

    Equal where the harness did not change what was said, whatever a client library did to its JSON: the order of keys,
    spaces in arguments, ids, reasoning that was left out.
    """
    found = [hashlib.blake2b(_bytes(list(tools)), digest_size=16).digest()]
    for one in messages:
        found.append(hashlib.blake2b(found[-1] + _bytes(_normal(one)), digest_size=16).digest())
    return found


def _normal(one: Json) -> list[Any]:
    calls = [[made["function"]["name"], as_object(made["function"]["arguments"])] for made in one.get("tool_calls", ())]
    return [one["role"], one["content"].strip(), calls]


def as_object(arguments: str) -> Json:
    """A call's arguments, a JSON text, as Anthropic's clients have them: always an object."""
    try:
        found = json.loads(arguments)
    except ValueError:
        found = arguments
    return found if isinstance(found, dict) else {"arguments": found}


def _bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
