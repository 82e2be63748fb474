"""SGLang's parsers of tool calls and reasoning: the only SGLang code that runs in our processes.

They are pure Python, but their import takes half a minute and 400 MB, so a run must ask for them by name. Tests:
tests/unit/environments/agent/test_parsers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.environments.agent.endpoint.parsers import Parsed, sound_json, thought
from asyncrl.environments.agent.endpoint.refusal import Json, Refused
from asyncrl.errors import ConfigError


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
        _known(tool_parser, FunctionCallParser.ToolCallParserEnum, "tool_parser")
        _known(reasoning_parser, ReasoningParser.DetectorMap, "reasoning_parser")

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
            reasoning, text = thought(text, in_thought=in_thought)
        if not tools or not tool_parser:
            return Parsed(content=text, reasoning=reasoning)
        content, items = self._function_parser(self._tools(tools), tool_parser).parse_non_stream(text)
        calls = tuple((item.name or "", item.parameters) for item in items)
        if not all(name and sound_json(parameters) for name, parameters in calls):
            return Parsed(content=text, reasoning=reasoning)  # an invalid call: keep the whole text
        # SGLang drops invalid calls (unknown tool, broken JSON); keep the text so that the answer is not empty
        return Parsed(content=content if calls or content.strip() else text, reasoning=reasoning, calls=calls)

    def _tools(self, tools: Sequence[Json]) -> list[Any]:
        try:
            return [self._tool(**tool) for tool in tools]
        except ValueError as error:  # pydantic's
            raise Refused(f"tools: {' '.join(str(error).split())[:300]}") from None


def _known(name: str, table: Any, key: str) -> None:
    if name and name not in table:
        raise ConfigError(f"rollout.options.{key}: SGLang has no {name!r}; known: {', '.join(sorted(table))}")
