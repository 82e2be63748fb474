"""How the conversations of a model are written as tokens, continued behind sampled ones, and read again.

Two know it: a tokenizer's chat template with a parser of texts (here), and a renderer of the package `renderers`
(renderer.py). Both keep what a turn's tokens are: what they add goes behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncrl.protocols import Generation
from asyncrl.rollouts.agent.endpoint.parsers import Parsed, Parser
from asyncrl.rollouts.agent.endpoint.refusal import Json
from asyncrl.rollouts.agent.endpoint.template import Template
from asyncrl.rollouts.agent.endpoint.turns import Tokens, Turn


class ChatFormat(Protocol):
    @property
    def num_tokens(self) -> int:
        """Token ids are below this."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def check(self, tools: Sequence[Json]) -> None:
        """Raises Refused where calls of these tools could not be read."""
        ...

    def render(self, messages: Sequence[Json], tools: Sequence[Json]) -> list[int]:
        """The tokens of a conversation that is to be answered. Raises Refused."""
        ...

    def bridge(
        self, turn: Turn, before: Sequence[Json], new: Sequence[Json], tools: Sequence[Json]
    ) -> list[int] | None:
        """The tokens between a turn's and the next answer. None: the conversation is to be rendered.

        before: the messages that the turn answered; new: those that came after its answer
        """
        ...

    def parse(self, answer: Generation, *, context: Tokens, tools: Sequence[Json]) -> Parsed:
        """What was said. context: the tokens that the engine was given."""
        ...


class TemplateFormat:
    """A chat template writes, and a parser reads the text of an answer."""

    def __init__(self, template: Template, parser: Parser, *, keeps_thinking: bool = True) -> None:
        """keeps_thinking: reasoning stays in the prompt after a new question, whatever the template does with it"""
        self._template, self._parser = template, parser
        self._keeps_thinking = keeps_thinking
        self.decode = template.decode
        self.render = template.render
        self.check = parser.check

    @property
    def num_tokens(self) -> int:
        return self._template.num_tokens

    def bridge(
        self, turn: Turn, before: Sequence[Json], new: Sequence[Json], tools: Sequence[Json]
    ) -> list[int] | None:
        asks_anew = any(message["role"] == "user" for message in new)
        if not self._keeps_thinking and asks_anew and "reasoning_content" in turn.said:
            return None
        is_closed = self._template.is_closed(turn.answer)
        return self._template.bridge(before, turn.said, new, tools, is_closed=is_closed)

    def parse(self, answer: Generation, *, context: Tokens, tools: Sequence[Json]) -> Parsed:
        in_thought = self._template.ends_in_thought(context[-8:].tolist())
        return self._parser(self._template.text_of(answer), tools=tools, in_thought=in_thought)
