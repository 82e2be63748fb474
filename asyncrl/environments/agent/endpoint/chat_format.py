"""Chat formats: write a model's conversations as tokens, continue them after sampled tokens, and parse answers.

There are two: a tokenizer's chat template with a text parser (here), and a renderer of the package `renderers`
(renderer.py). Both keep the tokens of earlier turns unchanged and only append to them.

The template's bridge renders the conversation with its last answer replaced by a sentinel. The text after the sentinel
holds the end of that turn, the new messages, and the beginning of the next answer. Only this text is tokenised and
appended to the sampled tokens. It begins with the token that ends a turn, if the template has one, so no token spans
the seam. Where a turn is ended by the token of the next role (GLM-4), the sampled end token is that token, and is not
repeated.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

from asyncrl.data.chat import options_without_effect
from asyncrl.engines.generation import Generation
from asyncrl.environments.agent.endpoint.images import with_parts
from asyncrl.environments.agent.endpoint.parsers import Parsed, Parser, PlainParser
from asyncrl.environments.agent.endpoint.request import Json, Refused
from asyncrl.environments.agent.endpoint.turns import Tokens, Turn
from asyncrl.errors import ConfigError

log = logging.getLogger("asyncrl.agent")

_SENTINEL: Final = "\u241eTURN\u241e"
_TOOL: Final = "name_of_a_tool"
_THINK: Final = "<think>"
_TAIL_TOKENS: Final = 8
"""Number of tokens at the end of a prompt that show whether it ends inside the reasoning."""


class ChatFormat(ABC):
    """How a model's conversations are written, continued and read."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def num_tokens(self) -> int:
        """Upper bound of token ids, exclusive."""
        return len(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def text_of(self, answer: Generation) -> str:
        """Return an answer's text without its end token. Other special tokens stay in the text."""
        tokens = answer.tokens.tolist()
        if tokens and tokens[-1] in self.tokenizer.all_special_ids:
            tokens = tokens[:-1]
        return self.decode(tokens)

    @abstractmethod
    def check(self, tools: Sequence[Json]) -> None:
        """Raise Refused if calls of these tools cannot be parsed."""

    @abstractmethod
    def render(self, messages: Sequence[Json], tools: Sequence[Json]) -> list[int]:
        """Return the prompt tokens of a conversation. Raises Refused."""

    @abstractmethod
    def bridge(
        self, turn: Turn, before: Sequence[Json], new: Sequence[Json], tools: Sequence[Json]
    ) -> list[int] | None:
        """Return the tokens between a turn's answer and the next answer; None if the conversation must be rendered.

        before  messages that the turn answered
        new     messages after the turn's answer
        """

    @abstractmethod
    def parse(self, answer: Generation, *, context: Tokens, tools: Sequence[Json]) -> Parsed:
        """Parse an answer.  context: the tokens that the engine was given"""


class TemplateFormat(ChatFormat):
    """A chat template writes conversations, and a parser reads the text of answers."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        parser: Parser | None = None,
        chat_template: str = "",
        options: Mapping[str, Any] | None = None,
        keeps_thinking: bool = True,
    ) -> None:
        """
        parser          None: the plain parser
        chat_template   Jinja; empty: the tokenizer's
        keeps_thinking  keep reasoning in the prompt after a new question, even if the template drops it

        Raises ConfigError if the template is missing or broken.
        """
        super().__init__(tokenizer)
        self._options = dict(options or {}) | ({"chat_template": chat_template} if chat_template else {})
        source = chat_template or getattr(tokenizer, "chat_template", None) or ""
        if not source:
            raise ConfigError("the model's tokenizer has no chat template; set rollout.options.chat_template")
        for line in options_without_effect(str(source), options or {}, where="rollout.options.chat_template_options"):
            log.warning("%s", line)
        self._asks_for_none = bool(re.search(r"content['\"]?\]? *(is|is not|==|!=) *[nN]one\b", str(source)))
        self._parser = parser or PlainParser(source)
        self._keeps_thinking = keeps_thinking
        self._close, self._close_id = self._find_closer()

    def _find_closer(self) -> tuple[str, int | None]:
        """Return the special token that ends an assistant's turn, as text and id; "" and None if there is none."""
        import jinja2  # comes with transformers, which rendering needs anyway

        asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _SENTINEL}]
        try:
            text = self._apply(asked, (), asks=False)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"the chat template cannot render an answer to a user: {error}") from None
        after = self.encode(text.partition(_SENTINEL)[2])
        if not after or after[0] not in self.tokenizer.all_special_ids:
            return "", None
        return self.tokenizer.convert_ids_to_tokens(after[0]), after[0]

    def check(self, tools: Sequence[Json]) -> None:
        if tools and not self._shows_tools:
            raise Refused(
                "tools: the model's chat template does not show tools to the model; set rollout.options.chat_template "
                "to one that writes `tools` and the calls"
            )
        self._parser.check(tools)

    @functools.cached_property
    def _shows_tools(self) -> bool:
        """Whether the template writes the tools that it is given. True if it refuses the question."""
        import jinja2

        tool = {"type": "function", "function": {"name": _TOOL, "description": "", "parameters": {}}}
        asked = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
        try:
            return any(_TOOL in self._apply(part, [tool]) for part in (asked[1:], asked))
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError):
            return True

    def render(self, messages: Sequence[Json], tools: Sequence[Json]) -> list[int]:
        import jinja2

        try:
            text = self._apply(messages, tools)
            text.encode()
        except UnicodeError:
            raise Refused("a message holds half of a surrogate pair: that is not text") from None
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise Refused(f"the model's chat template refuses these messages: {error}") from None
        ids = self.encode(text)
        if not ids:
            raise Refused("the model's chat template makes no token of these messages")
        return ids

    def bridge(
        self, turn: Turn, before: Sequence[Json], new: Sequence[Json], tools: Sequence[Json]
    ) -> list[int] | None:
        import jinja2

        said = turn.message
        has_new_question = any(message["role"] == "user" for message in new)
        if not self._keeps_thinking and has_new_question and "reasoning_content" in said:
            return None
        fake: Json = {"role": "assistant", "content": _SENTINEL}
        if said.get("tool_calls"):  # some templates refuse a tool message without a call before it
            fake["tool_calls"] = said["tool_calls"]
        try:
            text = self._apply([*before, fake, *new], tools)
            text.encode()
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError):
            return None
        _, found, tail = text.partition(_SENTINEL)
        if not found or _SENTINEL in tail or (said.get("tool_calls") and not self._close):
            return None
        if self._close:
            at = tail.find(self._close)  # after the fake answer's calls
            if at < 0:
                return None
            tail = tail[at:]
        ids, special = self.encode(tail), self.tokenizer.all_special_ids
        last = int(turn.answer.tokens[-1]) if len(turn.answer.tokens) else None
        if last not in special:  # the answer was cut
            return ids
        if ids and ids[0] == last:
            return ids[1:]
        if last == self._close_id or (ids and ids[0] in special and not self._close):
            return None  # the template ends the turn in another way than the model
        return ids

    def parse(self, answer: Generation, *, context: Tokens, tools: Sequence[Json]) -> Parsed:
        # Templates of models that always think open the answer's reasoning in the prompt.
        in_thought = self.decode(context[-_TAIL_TOKENS:].tolist()).rstrip().endswith(_THINK)
        return self._parser(self.text_of(answer), tools=tools, in_thought=in_thought)

    def _apply(self, messages: Sequence[Json], tools: Sequence[Json], *, asks: bool = True) -> str:
        more: Json = {"tools": list(tools)} if tools else {}
        made = self.tokenizer.apply_chat_template(
            [with_parts(self._without_text(with_parsed_arguments(message))) for message in messages],
            tokenize=False,
            add_generation_prompt=asks,
            **more,
            **self._options,
        )
        return str(made)

    def _without_text(self, message: Json) -> Json:
        """Return a message of calls alone with the content None, if the template asks for that.

        DeepSeek's templates write the calls only `if message['content'] is none`. Others would write "None".
        """
        is_none = self._asks_for_none and message.get("tool_calls") and not message["content"]
        return {**message, "content": None} if is_none else message


def with_parsed_arguments(message: Json) -> Json:
    """Return a message in the form that templates expect, with a call's arguments as an object."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
