"""A request to the model in a form that does not depend on its dialect, and the checks of its fields.

A message follows OpenAI's chat completions, with text as content:
    {"role": "user", "content": "hi"}
    {"role": "assistant", "content": ..., "tool_calls": [{"id": ..., "type": "function", "function": {"name": ...,
        "arguments": JSON text}}]}, where tool_calls is optional
    {"role": "tool", "tool_call_id": ..., "content": "42"}

No field that would change sampling or the prompt is ignored silently. Fields that clients send by default but the run
decides, such as temperature, are recorded and named in the answer's header ``x-not-obeyed``. Fields that a client
relies on are obeyed or refused by name: stop strings, a JSON schema, a forced tool call. Constrained decoding is always
refused, because the trainer cannot recompute a masked distribution.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.environments.agent.endpoint import images
from asyncrl.errors import ImageError
from asyncrl.images.parts import IMAGE_TYPES

# -- refusals, and checks of types -------------------------------------------------------------------------------------

Json = dict[str, Any]

LONGEST: Final = 200


class Refused(Exception):
    """A request that cannot be served.

    status  HTTP status
    code    OpenAI's error code, which clients look at
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code


def table(value: Any, what: str) -> Json:
    if not isinstance(value, dict):
        raise Refused(f"{what} must be an object, got {short(value)}")
    return value


def rows(value: Any, what: str) -> list[Any]:
    """Return the list ``value``; an empty list for None."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise Refused(f"{what} must be a list, got {short(value)}")
    return value


def text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise Refused(f"{what} must be text, got {short(value)}")
    return value


def whole(value: Any, what: str, *, low: int, high: int = 2**31 - 1) -> int | None:
    """Return the whole number ``value`` within [low, high], or None for None."""
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise Refused(f"{what} must be a whole number from {low} to {high}, got {short(value)}")
    return value


def short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= LONGEST else shown[:LONGEST] + "..."


# -- fields that would change sampling ---------------------------------------------------------------------------------

RUNS_OWN: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "reasoning", "reasoning_effort", "thinking", "verbosity"),
    *("parallel_tool_calls", "chat_template_kwargs"),
)
"""Fields that the run file or the model's chat template decides."""

_TRAINER: Final = "it changes the sampling distribution in a way that the trainer cannot recompute"
_FORCES_JSON: Final = f"{_TRAINER}; ask for JSON in the prompt"
_SAMPLED: Final = "only logprobs of sampled tokens are known"
_TEXT: Final = "answers are text"
_NO_PREFILL: Final = "an answer that your program begins cannot be continued; end with a message of another role"
_TOO_LONG: Final = "a prompt that does not fit is refused with context_length_exceeded"
_NO_TOOLS: Final = "the endpoint runs no tools"
_REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("response_format", "output_format"), _FORCES_JSON),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty"), _TRAINER),
    **dict.fromkeys(("logit_bias", "typical_p", "no_repeat_ngram_size", "bad_words", "allowed_token_ids"), _TRAINER),
    **dict.fromkeys(("logits_processors", "custom_logit_processor", "json_schema", "regex", "ebnf"), _TRAINER),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), _TRAINER),
    **dict.fromkeys(("top_logprobs", "prompt_logprobs"), _SAMPLED),
    **dict.fromkeys(("modalities", "audio"), _TEXT),
    **dict.fromkeys(("continue_final_message", "add_generation_prompt"), _NO_PREFILL),
    **dict.fromkeys(("truncation", "truncate_prompt_tokens"), _TOO_LONG),
    **dict.fromkeys(("container", "mcp_servers"), _NO_TOOLS),
    "min_tokens": "set rollout.min_new_tokens in the run file",
    "ignore_eos": "answers end where the model ends them",
    "stop_token_ids": "set rollout.stop_token_ids in the run file",
    "stop_regex": "set rollout.stop in the run file",
    "echo": "the prompt is not returned",
    "chat_template": "set rollout.options.chat_template in the run file",
    "documents": "put them into a message",
    "use_beam_search": "answers are sampled",
    "best_of": "all answers are returned; use n",
    "prediction": "predicted outputs are not supported",
    "web_search_options": "the endpoint has no web search; give the model your own tool",
    "prompt": "the endpoint stores no prompt templates; send the messages",
    "background": "use stream, or wait for the answer",
    "max_tool_calls": "your program runs the tools; count the calls there",
    "context_management": "your program holds the history; send what the model should see",
}
"""Why a field is refused unless its value has no effect: null, that of _NO_EFFECT, or otherwise 0, false or empty."""
_NO_EFFECT: Final[Mapping[str, Any]] = {
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "truncation": "disabled",
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},  # of Claude Code
    **dict.fromkeys(("add_generation_prompt", "repetition_penalty", "length_penalty", "typical_p", "best_of"), 1),
}
_CHOICES: Final = ("auto", "none")
_ONE_CALL: Final = "disable_parallel_tool_use"


def find_overridden(body: Json, *, stop: Sequence[str]) -> Json:
    """Return the requested settings that are not obeyed because the run decides them. Raises Refused.

    stop  stop strings of this run
    """
    for name, why in _REFUSED.items():
        value = body.get(name)
        has_effect = value != _NO_EFFECT[name] if name in _NO_EFFECT else bool(value)
        if value is not None and has_effect:
            raise Refused(f"{name} = {short(value)} is not served here: {why}")
    for name in ("stop", "stop_sequences"):
        _check_stop(body.get(name), name, stop)
    made = {name: body[name] for name in RUNS_OWN if body.get(name) is not None}
    made |= _format(body.get("text"), "text", ("verbosity",))
    made |= _format(body.get("output_config"), "output_config", ("effort",))
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get(_ONE_CALL) is not None:  # Anthropic's parallel_tool_calls
        made[_ONE_CALL] = choice[_ONE_CALL]
    return made


def stop_strings(value: Any, name: str) -> list[str]:
    """Return the stop strings of a field, which may be one text. Raises Refused."""
    asked = [value] if isinstance(value, str) else rows(value, name)
    return [text(one, f"{name}[{place}]") for place, one in enumerate(asked)]


def _check_stop(value: Any, name: str, stop: Sequence[str]) -> None:
    for one in stop_strings(value, name):
        if one not in stop:
            known = ", ".join(map(short, stop)) or "none"
            raise Refused(
                f"{name}: {short(one)} ends no answer of this run; rollout.stop has {known}; add it in the run "
                "file, or tokens that your program never sees would be trained"
            )


def _format(value: Any, where: str, names: Sequence[str]) -> Json:
    """Check a field such as ``text`` of the responses API: {"format": {"type": ...}, "verbosity": ...}.

    names  fields in it that the run decides; those that are given are returned
    """
    given = table(value or {}, where)
    kind = table(given.get("format") or {}, f"{where}.format").get("type", "text")
    if kind != "text":
        raise Refused(
            f"{where}.format of type {short(kind)} is not served here: {_TRAINER}; ask for JSON in the prompt"
        )
    return {name: given[name] for name in names if given.get(name) is not None}


def offers_tools(choice: Any) -> bool:
    """Whether a tool_choice, in any dialect's form, lets the model see the tools. Raises Refused."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind is not None and kind not in _CHOICES:
        raise Refused(
            f"tool_choice = {short(choice)} is not served here: a call cannot be forced, because {_TRAINER}; "
            f"use {' or '.join(_CHOICES)}"
        )
    return kind != "none"


# -- requests and messages ---------------------------------------------------------------------------------------------

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
class ModelRequest:
    """One request.

    messages, tools  conversation to answer; tools as OpenAI's: {"type": "function", "function": {"name": ..., ...}}
    tokens           i32[P], tokens to continue instead of the messages; None: use the messages
    max_tokens       limit of the answer; None: all tokens that are left
    count            number of answers to sample
    stop             stop strings that the request names; the message of an answer ends before them
    overridden       requested settings that are not obeyed, because the run's sampling rules apply
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
    overridden: Json = field(default_factory=dict)
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


def read_tools(body: Json, read: Callable[[Json, str], tuple[Any, Any, Any]]) -> list[Json]:
    """Return the tools of a request in the common form; none if its tool_choice hides them. Raises Refused.

    read  returns the name, description and schema of a tool, given with its place
    """
    made = []
    for place, one in enumerate(rows(body.get("tools"), "tools")):
        where = f"tools[{place}]"
        name, description, schema = read(table(one, where), where)
        function: Json = {"name": text(name, f"{where}: its name")}  # in the order that models are used to
        if description is not None:
            function["description"] = text(description, f"{where}: its description")
        function["parameters"] = table({} if schema is None else schema, f"{where}: its schema")
        made.append({"type": "function", "function": function})
    return made if offers_tools(body.get("tool_choice")) else []


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
    if given.get("type") in IMAGE_TYPES:
        try:
            return images.mark(given)
        except ImageError as error:
            raise Refused(f"{where}: {error}") from None
    if "text" not in given:
        raise Refused(f"{where}: a part of type {short(given.get('type'))} is neither text nor an image")
    return text(given["text"], f"{where}.text")


def sort_tool_results(messages: Sequence[Json]) -> list[Json]:
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


def texts_of(messages: Sequence[Json], tools: Sequence[Json]) -> list[str]:
    """Return the texts that a chat template may write of a conversation, besides its own."""
    found = [json.dumps(one, ensure_ascii=False) for one in tools]
    for one in messages:
        found += [images.without_images(one["content"]), one.get("reasoning_content", "")]
        found += [made["function"]["arguments"] for made in one.get("tool_calls", ())]
    return found


def digests(messages: Sequence[Json]) -> list[bytes]:
    """Return digests of all prefixes of a conversation: item n covers the first n messages.

    Two digests are equal if the messages say the same. Changes that client libraries make do not matter: the order of
    keys, spaces in arguments, ids, and reasoning that was left out.
    """
    found = [b""]
    for one in messages:
        found.append(hashlib.blake2b(found[-1] + _bytes(_normalize(one)), digest_size=16).digest())
    return found


def digest_of_tools(tools: Sequence[Json]) -> bytes:
    return hashlib.blake2b(_bytes(list(tools)), digest_size=16).digest()


def _normalize(one: Json) -> list[Any]:
    calls = [[made["function"]["name"], as_object(made["function"]["arguments"])] for made in one.get("tool_calls", ())]
    return [one["role"], one["content"].strip(), calls]


def as_object(arguments: str) -> Json:
    """Parse a call's arguments (JSON text) into an object, because Anthropic's clients always expect one."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = arguments
    return found if isinstance(found, dict) else {"arguments": found}


def _bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
