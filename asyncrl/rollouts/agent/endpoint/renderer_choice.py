"""Which chat format a model gets: a renderer by its name, the one that is known to fit, or its chat template.

"auto" looks at the name of the model's folder, as `renderers` lists models by name; a name alone proves nothing, so the
renderer also has to write what the model's own chat template writes, of conversations that show where templates differ.
A machine without the package, or a model that it does not know, has the template. This file alone imports the package.
Tests: tests/unit/rollouts/agent/test_renderer.py.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from asyncrl.errors import ConfigError
from asyncrl.rollouts.agent.endpoint.refusal import Json, Refused
from asyncrl.rollouts.agent.endpoint.renderer import REFUSALS, RendererFormat, said
from asyncrl.rollouts.agent.endpoint.template import Template

AUTO: Final = "auto"
NONE: Final = "none"
_KEY: Final = "rollout.options.renderer"
_PACKAGE: Final = "renderers"
_NO_FORMATS: Final = ("auto", "custom", "default")
"""Names of the package that are no model family's."""
_CACHED: Final = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")
"""In Hugging Face's cache."""
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
"""Conversations that a renderer has to write as the model's template does."""

log: Final = logging.getLogger("asyncrl.endpoint")


def check_renderer(name: str) -> None:
    """That this machine has what ``renderer = name`` asks for. Raises ConfigError."""
    if name not in (AUTO, NONE):
        _config_of(name)


def choose(name: str, template: Template, *, keeps_thinking: bool, options: Mapping[str, Any]) -> RendererFormat | None:
    """The renderer, None for the chat template; which one it is, is logged. Raises ConfigError.

    options: those of the chat template
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
    """The renderer that fits; None, and the reason, where none is known to."""
    try:
        import renderers.base  # noqa: F401
    except ImportError as error:  # not installed, or a folder of this name that lies in the way
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
    """Renderers of the models that a folder's name names: Qwen/Qwen3-8B, /models/Qwen3-8B, or in Hugging Face's
    cache."""
    from renderers.base import MODEL_RENDERER_MAP

    cached = _CACHED.search(folder)
    owner, last = cached.groups() if cached else ("", *folder.rstrip("/").split("/"))[-2:]
    if whole := MODEL_RENDERER_MAP.get(f"{owner}/{last}"):
        return [whole]
    return sorted({name for model, name in MODEL_RENDERER_MAP.items() if model.rpartition("/")[2] == last})


def _named(name: str, template: Template, *, keeps_thinking: bool, options: Mapping[str, Any]) -> RendererFormat:
    """Raises ConfigError."""
    config = _config_of(name)
    import renderers

    settings = {"thinking_retention": "all"} if keeps_thinking else {}
    try:
        made = renderers.create_renderer(
            template.tokenizer, config(**settings), chat_template_kwargs=dict(options) or None
        )
    except (*REFUSALS, ImportError, OSError) as error:
        # a special token that is the tokenizer's unk_token is taken for one that is missing
        unknown = getattr(template.tokenizer, "unk_token", None)
        hint = f"; the tokenizer's unk_token, {unknown}, counts as missing" if unknown else ""
        raise ConfigError(f"{_KEY}: {name!r} does not fit the model: {said(error)}{hint}") from None
    return RendererFormat(made, name, template)


def _agrees(renderer: RendererFormat, template: Template) -> bool:
    """Whether it writes what the model's template writes. Conversations that the template refuses do not count."""
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
    """The class of a renderer's settings. Raises ConfigError."""
    try:
        import renderers
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError as error:
        raise ConfigError(
            f"{_KEY}: {name!r} is of the package {_PACKAGE}, which cannot be imported here ({error}); "
            f'pip install \'asyncrl[{_PACKAGE}]\', or use "{AUTO}" or "{NONE}"'
        ) from None
    if name not in _NO_FORMATS:
        try:
            return type(renderers.config_from_name(name))
        except ValueError:
            pass
    known = ", ".join(sorted(set(MODEL_RENDERER_MAP.values())))
    raise ConfigError(f"{_KEY}: {name!r} is unknown; there are {AUTO}, {NONE}, {known}")
