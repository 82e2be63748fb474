"""Chat formats: write a model's conversations as tokens, continue them after sampled tokens, and parse answers.

There are two: a tokenizer's chat template with a text parser (here), and a renderer of the package `renderers`
(renderer.py). Both keep the tokens of earlier turns unchanged and only append to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncrl.engines.generation import Generation
from asyncrl.environments.agent.endpoint.parsers import Parsed, Parser
from asyncrl.environments.agent.endpoint.refusal import Json
from asyncrl.environments.agent.endpoint.template import Template
from asyncrl.environments.agent.endpoint.turns import Tokens, Turn


class ChatFormat(Protocol):
    @property
    def num_tokens(self) -> int:
        """Upper bound of token ids, exclusive."""
        ...

    @property
    def longest_token(self) -> int:
        """Most characters of one token."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def check(self, tools: Sequence[Json]) -> None:
        """Raise Refused if calls of these tools cannot be parsed."""
        ...

    def render(self, messages: Sequence[Json], tools: Sequence[Json]) -> list[int]:
        """Return the prompt tokens of a conversation. Raises Refused."""
        ...

    def bridge(
        self, turn: Turn, before: Sequence[Json], new: Sequence[Json], tools: Sequence[Json]
    ) -> list[int] | None:
        """Return the tokens between a turn's answer and the next answer; None if the conversation must be rendered.

        before  messages that the turn answered
        new     messages after the turn's answer
        """
        ...

    def parse(self, answer: Generation, *, context: Tokens, tools: Sequence[Json]) -> Parsed:
        """Parse an answer.

        context  the tokens that the engine was given
        """
        ...


class TemplateFormat:
    """A chat template writes conversations, and a parser reads the text of answers."""

    def __init__(self, template: Template, parser: Parser, *, keeps_thinking: bool = True) -> None:
        """keeps_thinking   keep reasoning in the prompt after a new question, even if the template drops it"""
        self._template, self._parser = template, parser
        self._keeps_thinking = keeps_thinking
        self.decode = template.decode
        self.render = template.render
        self.check = parser.check

    @property
    def num_tokens(self) -> int:
        return self._template.num_tokens

    @property
    def longest_token(self) -> int:
        return self._template.longest_token

    def bridge(
        self, turn: Turn, before: Sequence[Json], new: Sequence[Json], tools: Sequence[Json]
    ) -> list[int] | None:
        has_new_question = any(message["role"] == "user" for message in new)
        if not self._keeps_thinking and has_new_question and "reasoning_content" in turn.said:
            return None
        last = int(turn.answer.tokens[-1]) if len(turn.answer.tokens) else None
        return self._template.bridge(before, turn.said, new, tools, last=last)

    def parse(self, answer: Generation, *, context: Tokens, tools: Sequence[Json]) -> Parsed:
        in_thought = self._template.ends_in_thought(context[-8:].tolist())
        return self._parser(self._template.text_of(answer), tools=tools, in_thought=in_thought)
