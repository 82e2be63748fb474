"""Renderers of the package `renderers` (PyPI, Apache-2.0): a model family's chat format, written by hand in Python.

They write a conversation's tokens as the family's chat template does, go on behind sampled tokens, and find reasoning
and calls by their token ids. Which one a model gets: renderer_choice.py.

What a renderer says is not believed where it matters: a prompt that does not begin with the turn's tokens is none, and
of what it reads nothing is left out. Tests: tests/unit/rollouts/agent/test_renderer.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from asyncrl.protocols import Generation
from asyncrl.rollouts.agent.endpoint.parsers import Parsed, sound_call, sound_json
from asyncrl.rollouts.agent.endpoint.refusal import Json, Refused
from asyncrl.rollouts.agent.endpoint.template import Template, shown
from asyncrl.rollouts.agent.endpoint.turns import Tokens, Turn

_WRITE_NAMES: Final = ("gpt-oss", "gemma4", "inkling")
"""They write the tool's name before its result, and while they bridge they do not see the call that says it."""
REFUSALS: Final = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError)
"""What renderers raise of messages, and of sampled tokens, that they do not expect."""


class RendererFormat:
    """A chat format by a renderer."""

    def __init__(self, renderer: Any, name: str, template: Template) -> None:
        """template: of the same tokenizer"""
        self._renderer, self.name, self._template = renderer, name, template
        self.decode = template.decode

    @property
    def num_tokens(self) -> int:
        return self._template.num_tokens

    def check(self, tools: Sequence[Json]) -> None:
        """They read what they write."""

    def render(self, messages: Sequence[Json], tools: Sequence[Json]) -> list[int]:
        try:
            json.dumps([*messages, *tools], ensure_ascii=False).encode()
            ids: list[int] = self._renderer.render_ids(
                self._shown(messages, messages), tools=list(tools) or None, add_generation_prompt=True
            )
        except UnicodeError:
            raise Refused("a message holds half of a surrogate pair: that is not text") from None
        except REFUSALS as error:
            raise Refused(f"the model's renderer refuses these messages: {said(error)}") from None
        if not ids:
            raise Refused("the model's renderer makes no token of these messages")
        return ids

    def bridge(
        self, turn: Turn, before: Sequence[Json], new: Sequence[Json], tools: Sequence[Json]
    ) -> list[int] | None:
        known, answer = turn.tokens.tolist(), turn.answer.tokens.tolist()
        context = known[: len(known) - len(answer)]
        try:
            json.dumps(new, ensure_ascii=False).encode()
            shown = self._shown(new, [*before, turn.said, *new])
            made = self._renderer.bridge_to_next_turn(context, answer, shown, tools=list(tools) or None)
        except REFUSALS:  # of UnicodeError, too, which is a ValueError: rendering says it
            return None
        ids: list[int] = [] if made is None else list(getattr(made, "token_ids", made))
        if len(ids) <= len(known) or ids[: len(known)] != known:  # it leaves out what was sampled behind a turn's end
            return None
        return ids[len(known) :]

    def _shown(self, messages: Sequence[Json], history: Sequence[Json]) -> list[Json]:
        """As renderers want them. history: where the calls are that results belong to."""
        made = [dict(shown(message)) for message in messages]
        if self.name in _WRITE_NAMES:
            names = {call["id"]: call["function"]["name"] for one in history for call in one.get("tool_calls", ())}
            for message in made:
                if message["role"] == "tool" and message.get("tool_call_id") in names:
                    message.setdefault("name", names[message["tool_call_id"]])
        return made

    def parse(self, answer: Generation, *, context: Tokens, tools: Sequence[Json]) -> Parsed:
        try:
            found = self._renderer.parse_response(
                answer.tokens.tolist(), tools=list(tools) or None, prompt_ids=context.tolist()
            )
        except REFUSALS:
            return Parsed(content=self._template.text_of(answer))
        content, calls = str(found.content or ""), found.tool_calls
        cut = [one for one in calls if one.status == "unclosed_block"]
        closed = [one for one in calls if one.status != "unclosed_block"]
        made = [_call(one) for one in closed]
        whole = [one for one in made if one is not None]
        if not tools or len(whole) < len(made):  # what is no call stays text, all of it
            cut, whole = calls, []
        if cut:
            content = content.rstrip() + self._text_of_calls(cut, answer)
        return Parsed(
            content=content,
            reasoning=found.reasoning_content or None,
            calls=tuple(whole),
            call_ids=_ids(closed) if whole else (),
        )

    def _text_of_calls(self, calls: Sequence[Any], answer: Generation) -> str:
        """What an answer says from the first of them on, and the space before it."""
        if any(one.token_span is None for one in calls):
            return "".join(f"\n{one.raw}" for one in calls)
        stops = set(self._renderer.get_stop_token_ids())
        tokens = answer.tokens.tolist()
        end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
        begin = min(one.token_span[0] for one in calls)
        before = self.decode(tokens[:begin])
        return before[len(before.rstrip()) :] + self.decode(tokens[begin:end])


def _call(found: Any) -> tuple[str, str] | None:
    """Its name and arguments as JSON text; None where it is no call."""
    if found.status != "ok" or not isinstance(found.name, str) or not found.name:
        return None
    arguments = {} if found.arguments is None else found.arguments
    if isinstance(arguments, str) and sound_json(arguments):
        return found.name, arguments
    return sound_call(found.name, arguments)


def _ids(calls: Sequence[Any]) -> tuple[str, ...]:
    """Those that the model wrote, if they tell its calls apart: its template writes them before the results."""
    ids = [one.id for one in calls]
    return tuple(ids) if all(isinstance(one, str) and one for one in ids) and len({*ids}) == len(ids) else ()


def said(error: Exception) -> str:
    """Of another package's error: one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
