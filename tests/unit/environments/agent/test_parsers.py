"""Parsing an answer's text into reasoning, content and calls. No text is lost."""

from __future__ import annotations

import json

import pytest

from asyncrl.environments.agent.endpoint.chat_format import TemplateFormat
from asyncrl.environments.agent.endpoint.parsers import Parsed, Parser, PlainParser, SGLangParser
from asyncrl.environments.agent.endpoint.request import Refused
from asyncrl.errors import ConfigError
from tests.harness.agents import ANSWER, CALL, TOKENIZER, TOOLS

PLAIN = PlainParser("<tool_call>")
LOST = '<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>'


def parsed(text: str, *, parser: Parser = PLAIN, in_thought: bool = False) -> Parsed:
    return parser(text, tools=TOOLS, in_thought=in_thought)


@pytest.mark.parametrize(
    ("text", "in_thought", "reasoning", "content"),
    [
        ("hi", False, None, "hi"),
        ("<think>\nwell\n</think>\n\nhi", False, "well", "hi"),
        ("well\n</think>\n\nhi", True, "well", "hi"),  # the template opened the thought
        ("<think>\nwe", False, "we", ""),  # the answer was cut
        ("we", True, "we", ""),
    ],
)
def test_reasoning_is_what_comes_before_the_end_of_thinking(
    text: str, in_thought: bool, reasoning: str | None, content: str
) -> None:
    found = parsed(text, in_thought=in_thought)
    assert (found.reasoning, found.content) == (reasoning, content)


def test_calls_are_read_and_taken_out_of_the_text() -> None:
    found = parsed(CALL)
    assert (found.reasoning, found.content) == ("Use the tool.", "Let me see.")
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [("add", {"a": 40, "b": 2})]


BROKEN = [
    LOST,
    "<tool_call>\n[1]\n</tool_call>",
    '<tool_call>{"name": 3}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',  # not JSON for clients in other languages
    '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',  # not text: could not be sent again
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    f'<tool_call>{{"name": "add", "arguments": {"[" * 5000}{"]" * 5000}}}</tool_call>',
    f'<tool_call>{{"name": "add", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>',
]


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_no_call_stays_text_and_so_do_the_calls_beside_it(broken: str) -> None:
    found = parsed(f"one\n{CALL.partition('</think>')[2]}\n{broken}")
    assert found.calls == ()
    assert "Let me see." in found.content and broken in found.content


def test_tools_that_the_template_writes_otherwise_are_refused() -> None:
    for template in ("", "<tool_call>\n<function="):
        with pytest.raises(Refused, match="tool_parser"):
            PlainParser(template).check(TOOLS)
    PlainParser("").check([])


def test_tools_that_the_template_does_not_show_are_refused_whoever_parses_their_calls() -> None:
    template = "{% for m in messages %}{{ m.content }}<tool_call>{% endfor %}"
    with pytest.raises(Refused, match="does not show tools to the model; set rollout.options.chat_template to one"):
        TemplateFormat(TOKENIZER, chat_template=template, parser=PLAIN).check(TOOLS)
    TemplateFormat(TOKENIZER, chat_template=template).check([])
    TemplateFormat(TOKENIZER).check(TOOLS)


@pytest.mark.sglang
@pytest.mark.slow
def test_sglangs_parsers_read_the_same_and_lose_nothing_that_was_said() -> None:
    pytest.importorskip("sglang")
    theirs = SGLangParser("qwen25", "qwen3")
    theirs.check(TOOLS)
    for text in (CALL, ANSWER, "hi"):
        ours, other = parsed(text), parsed(text, parser=theirs)
        assert (other.reasoning or "").strip() == (ours.reasoning or "")
        assert other.content.strip() == ours.content
        assert [(n, json.loads(a)) for n, a in other.calls] == [(n, json.loads(a)) for n, a in ours.calls]
    assert LOST in parsed(LOST, parser=theirs).content  # SGLang's parser returns nothing of it
    with pytest.raises(Refused, match="tools: "):
        theirs.check([{"type": "function", "function": {"parameters": {}}}])
    with pytest.raises(ConfigError, match="SGLang has no 'qwen99'; known: .*qwen25"):
        SGLangParser("qwen99", "")
