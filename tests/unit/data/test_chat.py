"""Inputs of the chat template, conversations with a mask per message, and settings of single rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl import config
from asyncrl.data.prompts import PromptDataset, PromptRow
from asyncrl.data.row_check import RowLimits, RowReward
from asyncrl.data.tiny_model import make_tokenizer
from asyncrl.errors import ConfigError

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}<{{ 'assistant' if m.role == 'assistant' else 'user' }}>"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}?{{ call.function.name }}{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}-{% endif %}{% endif %}"
)
"""Ends a turn with <eos> and a newline, as Qwen's template does."""
SAID = "{{ m.content or '' }}"
FORGETFUL = TEMPLATE.replace(SAID, f"{{% if m.role != 'assistant' or loop.last %}}{SAID}{{% endif %}}")
"""Leaves out earlier assistant turns, as templates of thinking models do."""


def rows_of(
    tmp_path: Path,
    rows: list[dict[str, Any]],
    *,
    name: str = "data.jsonl",
    template: str = TEMPLATE,
    limits: RowLimits | None = None,
    **data: Any,
) -> list[PromptRow]:
    path = tmp_path / name
    if name.endswith(".parquet"):
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    section = config.DataSection(path=str(path), shuffle=False, epochs=1, **data)
    dataset = PromptDataset.open(section, tokenizer=tokenizer, seed=0, limits=limits)
    return [row for position in range(len(rows)) if (row := dataset.at(position)) is not None]


def trained(row: PromptRow) -> str:
    """Return the response's text, with the trained part in capitals."""
    tokenizer = make_tokenizer()
    mask = row.response_mask if len(row.response_mask) else np.ones(len(row.response), np.bool_)
    words = [tokenizer.decode([token]) for token in row.response]
    return "".join(word.upper() if is_on else word for word, is_on in zip(words, mask, strict=True))


def test_the_template_gets_its_options_and_the_rows_tools(tmp_path: Path) -> None:
    options = {"chat_template": True, "chat_template_options": {"enable_thinking": False}, "tools_key": "tools"}
    rows = [
        {"prompt": "hi", "tools": [{"name": "add"}, {"name": "sub"}]},
        {"prompt": "hi", "tools": '[{"name": "add"}]'},
        {"prompt": "hi"},
    ]
    made = rows_of(tmp_path, rows, **options)
    assert [row.prompt for row in made] == [
        "add sub <user>hi<assistant>-",
        "add <user>hi<assistant>-",
        "<user>hi<assistant>-",
    ]


def test_messages_may_call_tools(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    messages = [{"role": "user", "content": "1+2"}, call, {"role": "tool", "content": "3"}]
    (row,) = rows_of(tmp_path, [{"prompt": messages}], chat_template=True)
    assert row.prompt == "<user>1+2<assistant>?add<eos>\n<user>3<assistant>"
    assert row.messages == ()


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_the_template_sees_that_a_message_with_calls_has_no_content(tmp_path: Path, name: str) -> None:
    """Templates such as DeepSeek's ask for `content is none`, and lose the call of a message without the key."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    messages = [{"role": "user", "content": "1+2"}, call, {"role": "tool", "content": "3"}]
    template = (
        "{% for m in messages %}{% if m['content'] is none %}?{{ m['tool_calls'][0]['function']['name'] }}"
        "{% else %}{{ m['content'] }}{% if m.tool_calls is defined %}!{% endif %}{% endif %}{% endfor %}"
    )
    (row,) = rows_of(tmp_path, [{"prompt": messages}], name=name, template=template, chat_template=True)
    assert row.prompt == "1+2?add3"


def test_the_json_text_of_messages_is_read_as_messages(tmp_path: Path) -> None:
    messages = [message("user", "a")]
    of_list, of_text = rows_of(tmp_path, [{"prompt": messages}, {"prompt": json.dumps(messages)}], chat_template=True)
    assert of_list.prompt == of_text.prompt == "<user>a<assistant>"
    (talk,) = rows_of(tmp_path, [{"talk": json.dumps(TALK)}], chat_template=True, conversation_key="talk")
    assert trained(talk) == "B<EOS>\n<user>c<assistant>D<EOS>\n"
    (plain,) = rows_of(tmp_path, [{"prompt": "[1, 2]"}], chat_template=True)
    assert plain.prompt == "<user>[1, 2]<assistant>"


def test_the_system_prompt_is_put_before_every_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": [message("user", "b")]}]
    made = rows_of(tmp_path, rows, chat_template=True, system_prompt="s", limits=RowLimits(keeps_messages=True))
    assert [row.prompt for row in made] == ["<user>s<user>a<assistant>", "<user>s<user>b<assistant>"]
    assert made[0].messages[0] == message("system", "s")


def test_messages_go_to_agents_as_they_are(tmp_path: Path) -> None:
    messages = [message("user", "a"), message("assistant", "b"), message("user", "c" * 90)]
    limits = RowLimits(keeps_messages=True, row_bytes=200)
    of_list, of_text = rows_of(tmp_path, [{"prompt": messages}, {"prompt": "hi"}], limits=limits, chat_template=True)
    assert list(of_list.messages) == messages
    assert of_text.messages == ({"role": "user", "content": "hi"},)
    with pytest.raises(ConfigError, match=r"'prompt' take 1\d\d bytes, and a message of the bus has room for 100"):
        rows_of(tmp_path, [{"prompt": messages}], limits=replace(limits, row_bytes=100), chat_template=True)
    (plain,) = rows_of(tmp_path, [{"prompt": "hi"}], limits=limits)
    assert plain.messages == ()


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


TALK = [message("user", "a"), message("assistant", "b"), message("user", "c"), message("assistant", "d")]


def test_what_the_assistant_says_is_trained_up_to_its_end_token(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, [{"talk": TALK}], chat_template=True, conversation_key="talk")
    assert row.prompt == "<user>a<assistant>"
    assert trained(row) == "B<EOS>\n<user>c<assistant>D<EOS>\n"
    whole = make_tokenizer().decode([*row.tokens, *row.response])
    assert whole == "<user>a<assistant>b<eos>\n<user>c<assistant>d<eos>\n"


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[0].content.absent.x }}", "UndefinedError: 'str object' has no attribute 'absent'"),
    ],
)
def test_template_error_is_refused_in_one_line_with_its_place(tmp_path: Path, template: str, error: str) -> None:
    with pytest.raises(ConfigError, match=f"data.jsonl:1: the chat template refuses these messages: {error}$"):
        rows_of(tmp_path, [{"prompt": "a"}], template=template, chat_template=True)


def test_template_that_drops_turns_cannot_train_several(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.jsonl:1: the chat template writes message 4 .* otherwise") as caught:
        rows_of(tmp_path, [{"talk": TALK}], template=FORGETFUL, chat_template=True, conversation_key="talk")
    assert "\n" not in str(caught.value)
    last = [TALK[0], message("assistant", "b", train=False), *TALK[2:]]
    (row,) = rows_of(tmp_path, [{"talk": last}], template=FORGETFUL, chat_template=True, conversation_key="talk")
    assert trained(row) == "D<EOS>\n"


def test_a_row_may_ask_for_shorter_answers_and_end_them_elsewhere(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "how": {"max_new_tokens": 4, "stop": ["x"]}}, {"prompt": "b"}]
    made = rows_of(tmp_path, rows, sampling_key="how", limits=RowLimits(sampling={"max_new_tokens": 8}))
    assert [dict(row.sampling) for row in made] == [{"max_new_tokens": 4, "stop": ("x",)}, {}]


REWARDS = RowLimits(
    rewards={"math": RowReward(needs_label=True), "style": RowReward()},
    sampling={"max_new_tokens": 8, "min_new_tokens": 3},
    vocabulary=44,
)


def test_what_a_row_chooses_may_be_in_its_metadata_as_rows_of_slime_have_it(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "metadata": {"rm_type": "style", "how": {"max_new_tokens": 4}}},
        {"prompt": "a", "metadata": {}},
    ]
    keys = {"reward_key": "metadata.rm_type", "sampling_key": "metadata.how"}
    made = rows_of(tmp_path, rows, limits=REWARDS, **keys)
    assert [(row.reward, dict(row.sampling)) for row in made] == [("style", {"max_new_tokens": 4}), ("", {})]
    with pytest.raises(ConfigError, match="^data.reward_key = 'metadata.kind': no row has this column"):
        rows_of(tmp_path, rows, limits=REWARDS, reward_key="metadata.kind")


@pytest.mark.parametrize("key", ["reward_key", "sampling_key", "tools_key"])
def test_a_column_that_no_row_has_is_refused_and_one_that_some_have_is_not(tmp_path: Path, key: str) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a", "label": "b"}, {"prompt": "a"}]
    with pytest.raises(ConfigError, match=f"^data.{key} = 'own': no row has this column; the first has 'prompt', 'lab"):
        rows_of(tmp_path, rows, chat_template=True, **{key: "own"})
    rows_of(tmp_path, [rows[0], rows[1] | {"own": None}], chat_template=True, **{key: "own"})


@pytest.mark.parametrize(
    ("row", "data", "problem"),
    [
        (
            {"how": {"presence_penalty": 1}},
            {"sampling_key": "how"},
            r"cannot set presence_penalty \(the trainer cannot",
        ),
        ({"how": {"temperature": 0}}, {"sampling_key": "how"}, "temperature must be >= 0.001 and <= 1000 "),
        ({"how": {"top_k": 1}}, {"sampling_key": "how"}, "top_k must be 0 .off. or 2 to 1,024"),
        ({"how": {"max_new_tokens": 9}}, {"sampling_key": "how"}, r"9 is over rollout.max_new_tokens \(8\)"),
        ({"how": {"max_new_tokens": 2}}, {"sampling_key": "how"}, r"min_new_tokens must be <= .*\(2\), got 3"),
        ({"how": {"stop_token_ids": [44]}}, {"sampling_key": "how"}, "44 is not a token of the model's 44"),
        ({"how": {"stop": list("abc" * 11)}}, {"sampling_key": "how"}, "stop may hold 32 texts, got 33"),
        ({"how": {"stop": ["a", "\ud800"]}}, {"sampling_key": "how"}, "'how': stop: .* surrogates not allowed"),
        ({"how": 3}, {"sampling_key": "how"}, "must be an object of max_new_tokens"),
        ({"rm": "maths"}, {"reward_key": "rm"}, "names the reward 'maths', which is none of math, style"),
        ({"rm": "math"}, {"reward_key": "rm"}, "reward.kind = 'math' compares with one"),
        ({"tools": "{"}, {"tools_key": "tools", "chat_template": True}, "'tools' is not JSON"),
        ({"tools": ["add"]}, {"tools_key": "tools", "chat_template": True}, "must be a list of tools"),
        (
            {"tools": [{"name": "\ud800"}]},
            {"tools_key": "tools", "chat_template": True},
            "'tools': .* surrogates not allowed",
        ),
        ({"talk": "hi"}, {"conversation_key": "talk", "chat_template": True}, "must be a list of chat messages"),
        ({"talk": TALK[:1]}, {"conversation_key": "talk", "chat_template": True}, "no message of the assistant"),
        (
            {"talk": TALK[1:]},
            {"conversation_key": "talk", "chat_template": True},
            "'talk' begins with an answer, .* put a message before it, or mark it \"train\": false",
        ),
        (
            {"talk": [message("user", "a", train=True), *TALK[1:]]},
            {"conversation_key": "talk", "chat_template": True},
            "is for messages of the assistant",
        ),
        (
            {"prompt": [message("user", "a"), message("assistant", "the answer")]},
            {"chat_template": True},
            "'prompt' ends with a message of the assistant, 'the answer', so the prompt would hold an answer already",
        ),
        (
            {"prompt": json.dumps([message("user", "a"), message("assistant", "b")])},
            {"chat_template": True},
            "ends with a message of the assistant, 'b'",
        ),
        ({"prompt": json.dumps([message("user", "a")])}, {}, "is a list of chat messages, which only a chat template"),
        ({"prompt": str([message("user", "a")])}, {"chat_template": True}, "is the printed form of chat messages"),
        ({"prompt": f"array([{message('user', 'a')}], dtype=object)"}, {}, "is the printed form of chat messages"),
        ({"prompt": json.dumps(message("user", "a"))}, {}, "is the printed form of chat messages"),
        ({"prompt": json.dumps({"messages": [message("user", "a")]})}, {}, "is the printed form of chat messages"),
        ({"prompt": json.dumps(json.dumps([message("user", "a")]))}, {}, "is the printed form of chat messages"),
        (
            {"prompt": [{"from": "human", "value": "a"}]},
            {"chat_template": True},
            "role and content, not .from. and .val",
        ),
        ({"prompt": [5, 6, 7]}, {}, "is a list of token ids, and asyncrl tokenises the text itself"),
        ({"prompt": "<image>a", "images": [{"path": "a.png"}]}, {}, "'images' holds what <image> stands for, and this"),
        ({"prompt": "<video>a", "videos": ["a.mp4"]}, {}, "'videos' holds what <video> stands for"),
        ({"image": {"bytes": "x"}}, {}, "'image' holds no text, and this model reads text alone"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            {"chat_template": True},
            "shows an image, and this model reads text alone",
        ),
    ],
)
def test_bad_row_is_refused_in_one_line_with_its_place(
    tmp_path: Path, row: dict[str, Any], data: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        rows_of(tmp_path, [{"prompt": "a"} | row], limits=REWARDS, **data)
    assert str(caught.value).startswith(f"{tmp_path}/data.jsonl:1: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"chat_template_options": {"enable_thinking": False}}, "chat_template_options needs chat_template = true"),
        ({"chat_template": True, "chat_template_options": {"tools": []}}, "tools is set by asyncrl"),
        ({"system_prompt": "a"}, "system_prompt needs chat_template = true"),
        ({"source": "a:b"}, "path and source are both there"),
        ({"options": {"a": 1}}, "options are of a source"),
        ({"chat_template": True, "conversation_key": "a", "response_key": "b"}, "remove response_key"),
    ],
)
def test_a_section_that_contradicts_itself_is_refused(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config.DataSection(path="a.jsonl", **data)
