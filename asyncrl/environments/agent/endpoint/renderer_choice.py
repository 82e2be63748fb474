"""Choose a model's chat format: a named renderer, a renderer that is known to fit, or the model's chat template.

"auto" looks up the name of the model's folder, because `renderers` lists models by name. A name proves nothing, so the
renderer must also write the same tokens as the model's own chat template for conversations that show how templates
differ. Without the package, or for a model that it does not know, the chat template is used. Only this file imports the
package. Tests: tests/unit/environments/agent/test_renderer.py.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from asyncrl.environments.agent.endpoint.refusal import Json, Refused
from asyncrl.environments.agent.endpoint.renderer import REFUSALS, RendererFormat, said
from asyncrl.environments.agent.endpoint.template import Template
from asyncrl.errors import ConfigError

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
