"""A renderer writes, continues and reads like the chat template, and is used where it is named.

It is tested where its package is installed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from asyncrl.engines.generation import Generation
from asyncrl.environments.agent.endpoint.chat_format import TemplateFormat
from asyncrl.environments.agent.endpoint.renderer import RendererFormat, check_renderer, load_renderer
from asyncrl.environments.agent.endpoint.turns import Turn
from asyncrl.environments.agent.function import Agent, Options
from asyncrl.errors import ConfigError
from asyncrl.messages import VersionSpan
from tests.harness.agents import ANSWER, CALL, TOOLS, Client, Scripted, tokenizer
from tests.unit.environments.agent.test_session import SAID, conversation, with_other_json, without_reasoning

HARNESS = "tests.unit.environments.harnesses.players:plain"
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("renderers") is None, reason="renderers is not installed (bin/install dev)"
)

# Qwen3's format: thoughts since the last question, an empty thought in a last answer, one turn for tool results.
QWEN3 = """
{%- set last = namespace(at=messages | length - 1, found=false) -%}
{%- for m in messages | reverse if m.role == 'user' and not last.found -%}
{%- set last.found = true %}{% set last.at = messages.index(m) -%}
{%- endfor -%}
{%- set system = messages[0].content if messages[0].role == 'system' else none -%}
{%- if tools -%}
{{ '<|im_start|>system\n' + (system + '\n\n' if system is not none else '') + HEADER }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ FOOTER + '<|im_end|>\n' }}
{%- elif system is not none -%}{{ '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{ '<|im_start|>assistant\n' }}
{%- if loop.index0 > last.at and (loop.last or m.reasoning_content) -%}
{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
{%- endif -%}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
{{ '\n' if m.content or not loop.first }}{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' -%}
{{ '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
{%- elif not (m.role == 'system' and loop.first) -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif -%}
"""


def qwen3(folder: str = "/models/Qwen3-8B", **options: Any) -> TemplateFormat:
    from renderers import qwen3 as theirs

    made = tokenizer()
    made.name_or_path = folder
    head, foot = json.dumps(theirs._TOOLS_HEADER), json.dumps(theirs._TOOLS_FOOTER)
    made.chat_template = QWEN3.replace("HEADER", head).replace("FOOTER", foot)
    return TemplateFormat(made, options=options)


def chosen(template: TemplateFormat | None = None, **changes: Any) -> RendererFormat:
    settings: dict[str, Any] = {"keeps_thinking": True, "options": {}}
    return load_renderer("qwen3", (template or qwen3()).tokenizer, **(settings | changes))


def by_template(template: TemplateFormat, **changes: Any) -> TemplateFormat:
    return TemplateFormat(template.tokenizer, **changes)


def turn(tokens: Sequence[int], answer: Sequence[int], said: dict[str, Any] | None = None) -> Turn:
    return Turn(
        number=0, tag="", parent=None, given=np.array(tokens, np.int32), answer=generation(answer), message=said or {}
    )


def generation(tokens: Sequence[int]) -> Generation:
    return Generation(
        tokens=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=0),),
        finish_reason="stop",
    )


# -- a real renderer ---------------------------------------------------------------------------------------------------


@needs_package
@pytest.mark.parametrize("rewrite", [lambda said: said, without_reasoning, with_other_json])
async def test_a_renderer_gives_the_engine_what_the_template_and_its_bridge_give(rewrite: Any) -> None:
    template, given, heard = qwen3(), [], []
    for chat_format in (by_template(template), chosen(template=template)):
        async with Client(Scripted(SAID), chat_format=chat_format) as client:
            messages = await conversation(client, rewrite)
        assert client.check() == 1
        given.append(client.engine.given)
        heard.append(messages)
    assert given[0] == given[1]
    assert heard[0] == heard[1]


@needs_package
async def test_a_renderer_begins_a_sequence_where_the_harness_changes_what_was_said() -> None:
    async with Client(Scripted(SAID), chat_format=chosen()) as client:
        await conversation(client, lambda said: without_reasoning(said) | {"content": said["content"].upper()})
    assert client.check() == 3


@needs_package
async def test_with_thinking_as_in_the_template_a_renderer_begins_a_sequence_at_a_question() -> None:
    template = qwen3()
    given = []
    for chat_format in (by_template(template, keeps_thinking=False), chosen(keeps_thinking=False, template=template)):
        async with Client(Scripted(SAID), chat_format=chat_format) as client:
            await conversation(client)
        assert client.check() == 2
        given.append(client.engine.given)
    assert given[0] == given[1]


@needs_package
async def test_an_answer_cut_in_its_reasoning_is_continued_and_trained_as_it_was_sampled() -> None:
    async with Client(Scripted(["<think>\nabcdefgh", "yes"]), chat_format=chosen()) as client:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        messages += [await client.say(messages, max_tokens=6), {"role": "user", "content": "more"}]
        await client.say(messages)
    assert client.check() == 1
    text = client.session.chat_format.decode(client.engine.given[1])
    assert "abcd</think><|im_end|>\n<|im_start|>user\nmore<|im_end|>" in text  # the renderer closes the thought


@needs_package
@pytest.mark.parametrize("tools", [TOOLS, []])
@pytest.mark.parametrize(
    "text",
    [
        "hi",
        "é\u200d🙂",
        CALL,
        ANSWER,
        "<tool_call>\n[1]\n</tool_call>",
        'so\n<tool_call>\n{"name": 3}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>',
        CALL + '\n<tool_call>\n{"name": "add"',
    ],
)
def test_a_renderer_reads_what_the_plain_parser_reads_and_leaves_nothing_out(text: str, tools: list[Any]) -> None:
    template = qwen3()
    context = np.array(template.render([{"role": "user", "content": "hi"}], tools), np.int32)
    answer = generation(template.encode(text + "<|im_end|>"))
    ours, theirs = (
        one.parse(answer, context=context, tools=tools) for one in (by_template(template), chosen(template=template))
    )
    assert theirs.calls == ours.calls or [(n, json.loads(a)) for n, a in theirs.calls] == [
        (n, json.loads(a)) for n, a in ours.calls
    ]
    assert (theirs.reasoning or "") == (ours.reasoning or "")
    assert "".join(theirs.content.split()) == "".join(ours.content.split())


# -- by name -----------------------------------------------------------------------------------------------------------


@needs_package
@pytest.mark.parametrize("name", ["qwen99", "default", "custom", "auto"])
def test_a_name_that_no_renderer_has_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=f"renderer: '{name}' is unknown; there are .*qwen3, ") as refused:
        Options(harness=HARNESS, renderer=name).check_machine()
    assert "\n" not in str(refused.value)


@needs_package
def test_a_renderer_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="'glm-4.5' does not fit the model"):  # its tokens are missing
        load_renderer("glm-4.5", qwen3().tokenizer, keeps_thinking=True, options={})


def test_without_the_package_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(ConfigError, match=r"cannot be imported here .*pip install 'asyncrl\[renderers\]'") as refused:
        check_renderer("qwen3")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "own", [{"tool_parser": "qwen25"}, {"reasoning_parser": "qwen3"}, {"chat_template": "{{ 1 }}"}]
)
def test_a_renderer_and_what_it_replaces_are_not_taken_together(own: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"renderer: 'qwen3' takes the place of {next(iter(own))}"):
        Options(harness=HARNESS, renderer="qwen3", **own)


@needs_package
def test_an_agent_takes_the_renderer_that_is_named() -> None:
    made = qwen3().tokenizer
    assert isinstance(Agent(made, Options(harness=HARNESS, renderer="qwen3"))._chat_format, RendererFormat)
    assert isinstance(Agent(made, Options(harness=HARNESS))._chat_format, TemplateFormat)
