"""Chat messages: check them, render them with the chat template, and find the parts of the text that are trained."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from asyncrl import config
from asyncrl.config import plugins
from asyncrl.errors import ConfigError
from asyncrl.images.parts import find_part_problem

_OURS: Final = ("train",)
"""Keys of a message that asyncrl uses; the chat template does not get them."""

Message = Mapping[str, Any]


def read_prompt(prompt: Any) -> Any:
    """Return the list of messages that ``prompt`` is as JSON text; any other prompt as it is."""
    if not isinstance(prompt, str) or not prompt.lstrip().startswith("["):
        return prompt
    try:
        made = json.loads(prompt)
    except (ValueError, RecursionError):
        return prompt
    is_chat = isinstance(made, list) and made and all(isinstance(one, dict) and "role" in one for one in made)
    return made if is_chat else prompt


def texts_of(prompt: Any) -> list[str]:
    """Return the texts of a prompt: itself, or what its messages say."""
    if isinstance(prompt, str):
        return [prompt]
    contents = [message.get("content") for message in prompt]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [one for one in (*contents, *(part.get("text") for part in parts)) if isinstance(one, str)]


def find_problem(message: Any) -> str:
    """Return why ``message`` is not a valid chat message; "" if it is."""
    if isinstance(message, dict) and "role" not in message and {"from", "value"} <= message.keys():
        return 'a chat message has the keys role and content, not "from" and "value" (ShareGPT); rename them'
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return "a chat message is an object with text role and content"
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        content = find_part_problem(content) or "parts"
        if content != "parts":
            return content
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        return "tool_calls of a chat message must be a list of objects"
    if not isinstance(content, str) and not (content is None and calls):
        return "a chat message has tool_calls, or is an object with text role and content"
    train = message.get("train")
    if train not in (None, True, False):
        return '"train" of a chat message must be true or false'
    return '"train" = true is for messages of the assistant' if train and message["role"] != "assistant" else ""


def is_trained(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("train") is not False


def tools_of(row: Mapping[str, Any], data: config.DataSection, where: str) -> list[Any] | None:
    """Return the tools of a row; None if it has none. Raises ConfigError."""
    tools = row.get(data.tools_key) if data.tools_key else None
    if tools in (None, "", []):
        return None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: {data.tools_key!r} is not JSON: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{where}: {data.tools_key!r} must be a list of tools, each a JSON schema in an object")
    return tools


def options_without_effect(source: str, options: Mapping[str, Any], *, where: str) -> Iterator[str]:
    """Say in a line each option that a template does not read, or reads otherwise than it is meant.

    source  the template's Jinja
    """
    for name, value in options.items():
        if name == "chat_template":  # replaces the template
            continue
        if not re.search(rf"\b{re.escape(name)}\b", source):
            near = difflib.get_close_matches(name, re.findall(r"\b[a-z]+_[a-z_]+\b", source), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield f"{where}: {name} has no effect: the model's chat template does not read it{hint}"
        elif isinstance(value, str) and value.lower() in ("true", "false", "none", "yes", "no"):
            yield f'{where}: {name} = "{value}" is a text, which templates take as true; remove the quotes'


class ChatTemplate:
    """The tokenizer's chat template with the run file's options."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        self._tokenizer, self._options = tokenizer, dict(options)

    @property
    def source(self) -> str:
        """The template's Jinja; a tokenizer may have several."""
        made = self._options.get("chat_template") or getattr(self._tokenizer, "chat_template", None) or ""
        return "\n".join(made.values()) if isinstance(made, dict) else str(made)

    def text(self, messages: Sequence[Message], *, tools: list[Any] | None, where: str, asks: bool = True) -> str:
        """Return the messages as text. Raises ConfigError.

        asks  an answer follows, so the text ends where the assistant's turn begins
        """
        plain = [
            # a content of None stays: templates ask for it where a message has only calls (`content is none`)
            {
                name: value
                for name, value in message.items()
                if (value is not None or name == "content") and name not in _OURS
            }
            for message in messages
        ]
        more: dict[str, Any] = {"tools": tools} if tools else {}
        try:
            made = self._tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=asks, **more, **self._options
            )
        except Exception as error:  # the template is the model's code
            raise ConfigError(f"{where}: the chat template refuses these messages: {plugins.describe(error)}") from None
        return str(made)

    def conversation(
        self, messages: Sequence[Message], *, tools: list[Any] | None, where: str
    ) -> tuple[str, list[tuple[str, bool]]]:
        """Return the text before the first trained answer, and the parts after it, each with whether it is trained.

        Raises ConfigError if the template writes a message differently once others follow. Training would then use a
        different text than the model reads when it answers.
        """
        parts: list[tuple[str, bool]] = []
        before = ""
        last = max(index for index, message in enumerate(messages) if is_trained(message))
        for index, message in enumerate(messages[: last + 1]):
            if not is_trained(message):
                continue
            asked = self.text(messages[:index], tools=tools, where=where)
            answered = self.text(messages[: index + 1], tools=tools, where=where, asks=False)
            if not asked.startswith(before) or not answered.startswith(asked):
                raise ConfigError(
                    f"{where}: the chat template writes message {index + 1} and those before it otherwise when another "
                    'follows, so they cannot be trained in one row; train the last answer alone ("train": false in the '
                    "others), or set data.chat_template_options"
                )
            parts += [(asked[len(before) :], False), (answered[len(asked) :], True)]
            before = answered
        (prompt, _), *rest = parts
        return prompt, rest
