"""From the text of an answer to its reasoning, its content and its tool calls.

The plain parser reads <think>...</think> and <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen's and
Hermes' models write them. Those of other models are SGLang's (sglang_parsers.py), by SGLang's names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from asyncrl.rollouts.agent.endpoint.refusal import Json, Refused

_CALL: Final = re.compile(r"\s*<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """reasoning None: there is none. calls: (name, arguments as JSON text). call_ids: one for each call where the model
    writes them itself; others are made (turns.py)."""

    content: str
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    call_ids: tuple[str, ...] = ()


class Parser(Protocol):
    def __call__(self, text: str, *, tools: Sequence[Json], in_thought: bool) -> Parsed:
        """in_thought: the prompt ended in the middle of a thought."""
        ...

    def check(self, tools: Sequence[Json]) -> None:
        """Raises Refused where calls of these tools could not be read."""
        ...


class PlainParser:
    """chat_template: of the model; calls that it writes in another form are not read by this parser."""

    def __init__(self, chat_template: str) -> None:
        self._reads_calls = "<tool_call>" in chat_template and "<function=" not in chat_template

    def check(self, tools: Sequence[Json]) -> None:
        if tools and not self._reads_calls:
            raise Refused(
                "tools: the model's chat template does not write calls as <tool_call>{JSON}</tool_call>; name a parser "
                "of SGLang in rollout.options.tool_parser"
            )

    def __call__(self, text: str, *, tools: Sequence[Json], in_thought: bool) -> Parsed:
        reasoning, text = thought(text, in_thought=in_thought)
        calls = []
        if tools:
            for found in _CALL.finditer(text):
                if (call := _call(found[1])) is None:
                    return Parsed(content=text, reasoning=reasoning)  # what is no call stays text, all of it
                calls.append(call)
        return Parsed(content=_CALL.sub("", text) if calls else text, reasoning=reasoning, calls=tuple(calls))


def thought(text: str, *, in_thought: bool) -> tuple[str | None, str]:
    """Reasoning, and what comes after it."""
    before, closed, after = text.partition(_CLOSE)
    if not closed:
        return (text.strip("\n"), "") if in_thought or text.lstrip().startswith(_OPEN) else (None, text)
    return before.rpartition(_OPEN)[2].strip("\n"), after.lstrip("\n")


def _call(text: str) -> tuple[str, str] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    return sound_call(found.get("name"), found.get("arguments", {}))


def sound_call(name: Any, arguments: Any) -> tuple[str, str] | None:
    """A call as every client can read it, and send it again. None where it is none: one without a name, or with what
    JSON and Unicode do not have (NaN, half of a surrogate pair)."""
    if not isinstance(name, str) or not name:
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except (ValueError, RecursionError):
        return None
    return name, text


def sound_json(text: str) -> bool:
    """Whether a client can read it, whatever its JSON library."""
    try:
        return sound_call("a", json.loads(text)) is not None
    except (ValueError, RecursionError):
        return False
