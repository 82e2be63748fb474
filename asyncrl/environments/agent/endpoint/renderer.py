"""Renderers of the package `renderers` (PyPI, Apache-2.0): chat formats of model families, hand-written in Python.

A renderer writes a conversation's tokens as the family's chat template does, continues after sampled tokens, and finds
reasoning and calls by their token ids. Its results are checked where it matters: a continued prompt must begin with the
turn's tokens, or it is discarded; text that the renderer does not recognise as a call stays in the content.

Only this file imports the package.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from asyncrl.engines.generation import Generation
from asyncrl.environments.agent.endpoint.chat_format import ChatFormat, with_parsed_arguments
from asyncrl.environments.agent.endpoint.parsers import Parsed, is_portable_json, normalize_call
from asyncrl.environments.agent.endpoint.request import Json, Refused
from asyncrl.environments.agent.endpoint.turns import Tokens, Turn
from asyncrl.errors import ConfigError

# -- the format of a renderer ------------------------------------------------------------------------------------------

_WRITE_NAMES: Final = ("gpt-oss", "gemma4", "inkling")
"""Renderers that write the tool's name before its result. When they bridge, they do not see the call with that name."""
REFUSALS: Final = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError)
"""Errors that renderers raise for unexpected messages or sampled tokens."""


class RendererFormat(ChatFormat):
    def __init__(self, renderer: Any, name: str, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._renderer = renderer
        self._name = name

    def check(self, tools: Sequence[Json]) -> None:
        """Accept all tools: a renderer can parse every call that it writes."""

    def render(self, messages: Sequence[Json], tools: Sequence[Json]) -> list[int]:
        try:
            json.dumps([*messages, *tools], ensure_ascii=False).encode()
            ids: list[int] = self._renderer.render_ids(
                self._for_renderer(messages, messages), tools=list(tools) or None, add_generation_prompt=True
            )
        except UnicodeError:
            raise Refused("a message holds half of a surrogate pair: that is not text") from None
        except REFUSALS as error:
            raise Refused(f"the model's renderer refuses these messages: {one_line(error)}") from None
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
            shown = self._for_renderer(new, [*before, turn.message, *new])
            made = self._renderer.bridge_to_next_turn(context, answer, shown, tools=list(tools) or None)
        except REFUSALS:  # includes UnicodeError; rendering then reports it
            return None
        ids: list[int] = [] if made is None else list(getattr(made, "token_ids", made))
        # Renderers may drop tokens sampled after the end of a turn.
        if len(ids) <= len(known) or ids[: len(known)] != known:
            return None
        return ids[len(known) :]

    def _for_renderer(self, messages: Sequence[Json], history: Sequence[Json]) -> list[Json]:
        """Return messages in the form that renderers expect.

        history  the messages with the calls that the tool results answer
        """
        made = [dict(with_parsed_arguments(message)) for message in messages]
        if self._name in _WRITE_NAMES:
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
            return Parsed(content=self.text_of(answer))
        content, calls = str(found.content or ""), found.tool_calls
        cut = [one for one in calls if one.status == "unclosed_block"]
        closed = [one for one in calls if one.status != "unclosed_block"]
        made = [_call(one) for one in closed]
        whole = [one for one in made if one is not None]
        if not tools or len(whole) < len(made):  # no tools, or an invalid call: keep all calls as text
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
        """Return the text of an answer from the first of these calls on, with the whitespace before it."""
        if any(one.token_span is None for one in calls):
            return "".join(f"\n{one.raw}" for one in calls)
        stops = set(self._renderer.get_stop_token_ids())
        tokens = answer.tokens.tolist()
        end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
        begin = min(one.token_span[0] for one in calls)
        before = self.decode(tokens[:begin])
        return before[len(before.rstrip()) :] + self.decode(tokens[begin:end])


def _call(found: Any) -> tuple[str, str] | None:
    """Return a call's name and arguments as JSON text; None if the call is invalid."""
    if found.status != "ok" or not isinstance(found.name, str) or not found.name:
        return None
    arguments = {} if found.arguments is None else found.arguments
    if isinstance(arguments, str) and is_portable_json(arguments):
        return found.name, arguments
    return normalize_call(found.name, arguments)


def _ids(calls: Sequence[Any]) -> tuple[str, ...]:
    """Return the ids that the model wrote, if all are present and distinct; else ().

    Such a model's template repeats the ids before the results.
    """
    ids = [one.id for one in calls]
    return tuple(ids) if all(isinstance(one, str) and one for one in ids) and len({*ids}) == len(ids) else ()


def one_line(error: Exception) -> str:
    """Return the message of another package's error as one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


# -- by name -----------------------------------------------------------------------------------------------------------

_KEY: Final = "rollout.options.renderer"
_NO_FORMATS: Final = ("auto", "custom", "default")
"""Names in the package that do not belong to a model family."""


def check_renderer(name: str) -> None:
    """Raise ConfigError if this machine lacks the renderer of this name."""
    _config_of(name)


def load_renderer(name: str, tokenizer: Any, *, keeps_thinking: bool, options: Mapping[str, Any]) -> RendererFormat:
    """Create a renderer by name. Raises ConfigError if it does not fit the model.

    options  options of the chat template
    """
    config = _config_of(name)
    import renderers

    settings = {"thinking_retention": "all"} if keeps_thinking else {}
    try:
        made = renderers.create_renderer(tokenizer, config(**settings), chat_template_kwargs=dict(options) or None)
    except (*REFUSALS, ImportError, OSError) as error:
        # renderers treats a special token that equals the tokenizer's unk_token as missing
        unknown = getattr(tokenizer, "unk_token", None)
        hint = f"; the tokenizer's unk_token, {unknown}, counts as missing" if unknown else ""
        raise ConfigError(f"{_KEY}: {name!r} does not fit the model: {one_line(error)}{hint}") from None
    return RendererFormat(made, name, tokenizer)


def _config_of(name: str) -> Any:
    """Return the class of a renderer's settings. Raises ConfigError."""
    try:
        import renderers
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError as error:
        raise ConfigError(
            f"{_KEY}: {name!r} is of the package renderers, which cannot be imported here ({error}); "
            "pip install 'asyncrl[renderers]', or remove the key"
        ) from None
    if name not in _NO_FORMATS:
        with contextlib.suppress(ValueError):  # the package does not know the name
            return type(renderers.config_from_name(name))
    raise ConfigError(f"{_KEY}: {name!r} is unknown; there are {', '.join(sorted(set(MODEL_RENDERER_MAP.values())))}")
