"""Parse the text of an answer into reasoning, content and tool calls.

The plain parser reads <think>...</think> and <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen and
Hermes models write them. Other models need SGLang's parsers, by SGLang's names. They are the only SGLang code that runs
in our processes: pure Python, but their import takes half a minute and 400 MB, so a run must ask for them by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from asyncrl.environments.agent.endpoint.request import Json, Refused
from asyncrl.errors import ConfigError

_CALL: Final = re.compile(r"\s*<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A parsed answer.

    reasoning  None if the answer has none
    calls      (name, arguments as JSON text)
    call_ids   one per call if the model writes ids itself; if empty, the session makes them (turns.py)
    """

    content: str
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    call_ids: tuple[str, ...] = ()


class Parser(Protocol):
    def __call__(self, text: str, *, tools: Sequence[Json], in_thought: bool) -> Parsed:
        """in_thought   the prompt ended inside the reasoning"""
        ...

    def check(self, tools: Sequence[Json]) -> None:
        """Raise Refused if calls of these tools cannot be parsed."""
        ...


class PlainParser:
    """Reads calls only if the model's chat template writes them as <tool_call>{JSON}</tool_call>."""

    def __init__(self, chat_template: str) -> None:
        self._reads_calls = "<tool_call>" in chat_template and "<function=" not in chat_template

    def check(self, tools: Sequence[Json]) -> None:
        if tools and not self._reads_calls:
            raise Refused(
                "tools: the model's chat template does not write calls as <tool_call>{JSON}</tool_call>; name a parser "
                "of SGLang in rollout.options.tool_parser"
            )

    def __call__(self, text: str, *, tools: Sequence[Json], in_thought: bool) -> Parsed:
        reasoning, text = split_reasoning(text, in_thought=in_thought)
        calls = []
        if tools:
            for found in _CALL.finditer(text):
                if (call := _parse_call(found[1])) is None:
                    return Parsed(content=text, reasoning=reasoning)  # an invalid call: keep the whole text
                calls.append(call)
        return Parsed(content=_CALL.sub("", text) if calls else text, reasoning=reasoning, calls=tuple(calls))


def split_reasoning(text: str, *, in_thought: bool) -> tuple[str | None, str]:
    """Split a text into its reasoning (None if there is none) and the text after it."""
    before, closed, after = text.partition(_CLOSE)
    if not closed and (begun := text.lstrip()).startswith(_OPEN):
        return begun.removeprefix(_OPEN).strip("\n"), ""
    if not closed:
        return (text.strip("\n"), "") if in_thought else (None, text)
    return before.rpartition(_OPEN)[2].strip("\n"), after.lstrip("\n")


def _parse_call(text: str) -> tuple[str, str] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    return normalize_call(found.get("name"), found.get("arguments", {}))


def normalize_call(name: Any, arguments: Any) -> tuple[str, str] | None:
    """Return a call in a form that every client can read and send back: (name, arguments as JSON text).

    None if the call has no name, or holds values that JSON or Unicode lacks (NaN, an unpaired surrogate).
    """
    if not isinstance(name, str) or not name:
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except (ValueError, RecursionError):
        return None
    return name, text


def is_portable_json(text: str) -> bool:
    """Whether every client's JSON library can read the text."""
    try:
        return normalize_call("a", json.loads(text)) is not None
    except (ValueError, RecursionError):
        return False


class SGLangParser:
    """Parsers by the names of SGLang's --tool-call-parser and --reasoning-parser. With "" for the latter, reasoning is
    read from <think>...</think>."""

    def __init__(self, tool_parser: str, reasoning_parser: str) -> None:
        """Import SGLang. Raises ConfigError for an unknown name."""
        try:
            from sglang.srt.entrypoints.openai.protocol import Tool
            from sglang.srt.function_call.function_call_parser import FunctionCallParser
            from sglang.srt.parser.reasoning_parser import ReasoningParser
        except ImportError as error:
            raise ConfigError(
                f"rollout.options.tool_parser: SGLang's parsers cannot be imported here ({error}); install sglang, or "
                "leave tool_parser and reasoning_parser empty"
            ) from None
        self._tool: Any = Tool
        self._function_parser: Any = FunctionCallParser
        self._reasoning_parser: Any = ReasoningParser
        self._names = (tool_parser, reasoning_parser)
        _require_known(tool_parser, FunctionCallParser.ToolCallParserEnum, "tool_parser")
        _require_known(reasoning_parser, ReasoningParser.DetectorMap, "reasoning_parser")

    def check(self, tools: Sequence[Json]) -> None:
        if not tools:
            return
        if not self._names[0]:
            raise Refused("tools: rollout.options.tool_parser names no parser")
        self._tools(tools)

    def __call__(self, text: str, *, tools: Sequence[Json], in_thought: bool) -> Parsed:
        tool_parser, reasoning_parser = self._names
        if reasoning_parser:
            forced = {"force_reasoning": True} if in_thought else {}
            reasoning, text = self._reasoning_parser(
                reasoning_parser, stream_reasoning=False, **forced
            ).parse_non_stream(text)
            reasoning, text = reasoning or None, text or ""
        else:
            reasoning, text = split_reasoning(text, in_thought=in_thought)
        if not tools or not tool_parser:
            return Parsed(content=text, reasoning=reasoning)
        content, items = self._function_parser(self._tools(tools), tool_parser).parse_non_stream(text)
        calls = tuple((item.name or "", item.parameters) for item in items)
        if not all(name and is_portable_json(parameters) for name, parameters in calls):
            return Parsed(content=text, reasoning=reasoning)  # an invalid call: keep the whole text
        # SGLang drops invalid calls (unknown tool, broken JSON); keep the text so that the answer is not empty
        return Parsed(content=content if calls or content.strip() else text, reasoning=reasoning, calls=calls)

    def _tools(self, tools: Sequence[Json]) -> list[Any]:
        try:
            return [self._tool(**tool) for tool in tools]
        except ValueError as error:  # pydantic's
            raise Refused(f"tools: {' '.join(str(error).split())[:300]}") from None


def _require_known(name: str, table: Any, key: str) -> None:
    if name and name not in table:
        raise ConfigError(f"rollout.options.{key}: SGLang has no {name!r}; known: {', '.join(sorted(table))}")
