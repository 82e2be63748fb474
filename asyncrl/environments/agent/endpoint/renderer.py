"""Renderers of the package `renderers` (PyPI, Apache-2.0): chat formats of model families, hand-written in Python.

A renderer writes a conversation's tokens as the family's chat template does, continues after sampled tokens, and finds
reasoning and calls by their token ids. Its results are checked where it matters: a continued prompt must begin with the
turn's tokens, or it is discarded; text that the renderer does not recognise as a call stays in the content.

``choose`` takes a named renderer, or with "auto" the one that `renderers` lists for the name of the model's folder. A
name proves nothing, so the renderer must also write the same tokens as the model's own chat template for conversations
that show how templates differ. Otherwise, and without the package, the chat template is used. Only this file imports
the package.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from asyncrl.engines.generation import Generation
from asyncrl.environments.agent.endpoint.chat_format import Template, shown
from asyncrl.environments.agent.endpoint.parsers import Parsed, sound_call, sound_json
from asyncrl.environments.agent.endpoint.request import Json, Refused
from asyncrl.environments.agent.endpoint.turns import Tokens, Turn
from asyncrl.errors import ConfigError

# -- the format of a renderer ------------------------------------------------------------------------------------------

_WRITE_NAMES: Final = ("gpt-oss", "gemma4", "inkling")
"""Renderers that write the tool's name before its result. When they bridge, they do not see the call with that name."""
REFUSALS: Final = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError)
"""Errors that renderers raise for unexpected messages or sampled tokens."""


class RendererFormat:
    """The ChatFormat of a renderer."""

    def __init__(self, renderer: Any, name: str, template: Template) -> None:
        """template   chat template of the same tokenizer"""
        self._renderer, self.name, self._template = renderer, name, template
        self.decode = template.decode

    @property
    def num_tokens(self) -> int:
        return self._template.num_tokens

    @property
    def longest_token(self) -> int:
        return self._template.longest_token

    def check(self, tools: Sequence[Json]) -> None:
        """Accept all tools: a renderer can parse every call that it writes."""

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
            shown = self._shown(new, [*before, turn.message, *new])
            made = self._renderer.bridge_to_next_turn(context, answer, shown, tools=list(tools) or None)
        except REFUSALS:  # includes UnicodeError; rendering then reports it
            return None
        ids: list[int] = [] if made is None else list(getattr(made, "token_ids", made))
        # Renderers may drop tokens sampled after the end of a turn.
        if len(ids) <= len(known) or ids[: len(known)] != known:
            return None
        return ids[len(known) :]

    def _shown(self, messages: Sequence[Json], history: Sequence[Json]) -> list[Json]:
        """Return messages in the form that renderers expect.

        history  the messages with the calls that the tool results answer
        """
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
    if isinstance(arguments, str) and sound_json(arguments):
        return found.name, arguments
    return sound_call(found.name, arguments)


def _ids(calls: Sequence[Any]) -> tuple[str, ...]:
    """Return the ids that the model wrote, if all are present and distinct; else ().

    Such a model's template repeats the ids before the results.
    """
    ids = [one.id for one in calls]
    return tuple(ids) if all(isinstance(one, str) and one for one in ids) and len({*ids}) == len(ids) else ()


def said(error: Exception) -> str:
    """Return the message of another package's error as one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


# -- the choice of a renderer ------------------------------------------------------------------------------------------

AUTO: Final = "auto"
NONE: Final = "none"
_KEY: Final = "rollout.options.renderer"
_PACKAGE: Final = "renderers"
_NO_FORMATS: Final = ("auto", "custom", "default")
"""Names in the package that do not belong to a model family."""
_CACHED: Final = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")
"""Path of a model in Hugging Face's cache."""
_CALLED: Final = {"id": "c00000000", "type": "function", "function": {"name": "look", "arguments": {"at": "é", "n": 2}}}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}},
    },
}
_ASKED: Final = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What's there?\n"})
_PROBES: Final[Sequence[tuple[Sequence[Json], Sequence[Json]]]] = (
    (_ASKED[1:], ()),
    (_ASKED, ()),
    ((*_ASKED, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "And?"}), ()),
    (_ASKED, (_TOOL,)),
    (
        (
            *_ASKED,
            {"role": "assistant", "content": "", "tool_calls": [_CALLED]},
            {"role": "tool", "tool_call_id": "c00000000", "content": "a cat"},
        ),
        (_TOOL,),
    ),
)
"""Conversations that a renderer must write as the model's template does."""

log: Final = logging.getLogger("asyncrl.endpoint")


def check_renderer(name: str) -> None:
    """Raise ConfigError if this machine lacks the renderer that ``renderer = name`` asks for."""
    if name not in (AUTO, NONE):
        _config_of(name)


def choose(name: str, template: Template, *, keeps_thinking: bool, options: Mapping[str, Any]) -> RendererFormat | None:
    """Return the renderer, or None for the chat template, and log the choice. Raises ConfigError.

    options  options of the chat template
    """
    if name == NONE:
        found, why = None, f'renderer = "{NONE}"'
    elif name == AUTO:
        found, why = _known(template, keeps_thinking=keeps_thinking, options=options)
    else:
        found, why = _named(name, template, keeps_thinking=keeps_thinking, options=options), ""
        if not _agrees(found, template):
            log.warning("%s: %r writes other tokens than the model's chat template", _KEY, name)
    if found is None:
        log.info("conversations are written by the model's chat template: %s", why)
    else:
        log.info("conversations are written and read by the renderer %r", found.name)
    return found


def _known(
    template: Template, *, keeps_thinking: bool, options: Mapping[str, Any]
) -> tuple[RendererFormat | None, str]:
    """Return a renderer that fits, or None and the reason."""
    try:
        import renderers.base  # noqa: F401
    except ImportError as error:  # not installed, or hidden by a folder of the same name
        return None, f"the package {_PACKAGE} cannot be imported ({error})"
    folder = str(getattr(template.tokenizer, "name_or_path", ""))
    why = f"{_PACKAGE} knows no model of the name {folder!r}"
    for name in _candidates(folder):
        try:
            found = _named(name, template, keeps_thinking=keeps_thinking, options=options)
        except ConfigError as error:
            why = str(error).removeprefix(f"{_KEY}: ")
            continue
        if _agrees(found, template):
            return found, ""
        why = f"the renderer {name!r} writes other tokens"
    return None, why


def _candidates(folder: str) -> list[str]:
    """Return the renderers for a model folder: Qwen/Qwen3-8B, /models/Qwen3-8B, or a path in Hugging Face's cache."""
    from renderers.base import MODEL_RENDERER_MAP

    cached = _CACHED.search(folder)
    owner, last = cached.groups() if cached else ("", *folder.rstrip("/").split("/"))[-2:]
    if whole := MODEL_RENDERER_MAP.get(f"{owner}/{last}"):
        return [whole]
    return sorted({name for model, name in MODEL_RENDERER_MAP.items() if model.rpartition("/")[2] == last})


def _named(name: str, template: Template, *, keeps_thinking: bool, options: Mapping[str, Any]) -> RendererFormat:
    """Create a renderer by name. Raises ConfigError if it does not fit the model."""
    config = _config_of(name)
    import renderers

    settings = {"thinking_retention": "all"} if keeps_thinking else {}
    try:
        made = renderers.create_renderer(
            template.tokenizer, config(**settings), chat_template_kwargs=dict(options) or None
        )
    except (*REFUSALS, ImportError, OSError) as error:
        # renderers treats a special token that equals the tokenizer's unk_token as missing
        unknown = getattr(template.tokenizer, "unk_token", None)
        hint = f"; the tokenizer's unk_token, {unknown}, counts as missing" if unknown else ""
        raise ConfigError(f"{_KEY}: {name!r} does not fit the model: {said(error)}{hint}") from None
    return RendererFormat(made, name, template)


def _agrees(renderer: RendererFormat, template: Template) -> bool:
    """Whether the renderer writes what the model's template writes. Skips probes that the template refuses."""
    for messages, tools in _PROBES:
        try:
            wanted = template.render(messages, tools)
        except Refused:
            continue
        try:
            if renderer.render(messages, tools) != wanted:
                return False
        except Refused:
            return False
    return True


def _config_of(name: str) -> Any:
    """Return the class of a renderer's settings. Raises ConfigError."""
    try:
        import renderers
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError as error:
        raise ConfigError(
            f"{_KEY}: {name!r} is of the package {_PACKAGE}, which cannot be imported here ({error}); "
            f'pip install \'asyncrl[{_PACKAGE}]\', or use "{AUTO}" or "{NONE}"'
        ) from None
    if name not in _NO_FORMATS:
        with contextlib.suppress(ValueError):  # the package does not know the name
            return type(renderers.config_from_name(name))
    known = ", ".join(sorted(set(MODEL_RENDERER_MAP.values())))
    raise ConfigError(f"{_KEY}: {name!r} is unknown; there are {AUTO}, {NONE}, {known}")
