"""What is odd about prompts is said in a line before the run, and what is usual is not."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from asyncrl import config
from asyncrl.data.prompts import FirstPrompts, PromptDataset
from asyncrl.data.row_check import RowLimits
from asyncrl.data.tiny_model import make_tokenizer
from asyncrl.errors import ConfigError

CHAT = (
    "{% if tools %}{% for t in tools %}{{ t.name }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}</think>{% endif %}{% endif %}"
)
END = "<|im_end|>"
THINKS = CHAT.replace("assistant\n{% if", "assistant\n<think>\n{% if")
OF_USER = CHAT.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
STRIPS = CHAT.replace("{{ m.content or '' }}", "{{ (m.content or '').split('</t>')[-1] }}")
WITHOUT_END = CHAT.replace("<|im_end|>\n{% endfor %}", "\n{% endfor %}")
WITHOUT_CALLS = CHAT.replace("{{ c.function.name }}", "")
WITHOUT_TOOLS = CHAT.replace("{{ t.name }}", "")
WRITES_NONE = CHAT.replace("m.content or ''", "m.content")


def tokenizer_of(template: str, *, end: str = END, begin: str = "", adds: str = "") -> Any:
    """``adds``: what the tokenizer writes around a text, as in "<bos> $A"."""
    made = make_tokenizer("".join({*string.printable, *"\u200b\ufeffسلام\u200cها👩\u200d💻—âÃ€™©\xad"}))
    made.add_special_tokens({"eos_token": end, "additional_special_tokens": ["<|im_start|>", END, "<think>"]})
    if begin:
        made.add_special_tokens({"bos_token": begin})
    if adds:
        used = [word for word in adds.split() if word != "$A"]
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=adds, pair=f"{adds} $B", special_tokens=[(word, made.convert_tokens_to_ids(word)) for word in used]
        )
    made.chat_template = template
    return made


def look(
    tmp_path: Path,
    *rows: dict[str, Any],
    template: str = CHAT,
    tokenizer: Any = None,
    limits: RowLimits | None = None,
    **data: Any,
) -> FirstPrompts:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = config.DataSection(path=str(path), shuffle=False, **({"chat_template": True} | data))
    made = tokenizer or tokenizer_of(template)
    return PromptDataset.open(section, tokenizer=made, seed=0, limits=limits).check_first_rows()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def talk(answer: str) -> list[dict[str, Any]]:
    return [user("a"), {"role": "assistant", "content": answer}]


CALL = [
    user("a"),
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]},
    {"role": "tool", "content": "3"},
]


@pytest.mark.parametrize(
    ("row", "data"),
    [
        ({"prompt": "What is 2+3?", "label": "5"}, {}),
        ({"prompt": "What is 2+3?", "label": "5"}, {"chat_template": False}),
        ({"prompt": [{"role": "system", "content": "Think in <think> tags."}, user(" a ")]}, {}),
        ({"prompt": "a"}, {"system_prompt": "s"}),
        ({"prompt": CALL, "tools": [{"name": "mul"}]}, {"tools_key": "tools"}),
        ({"prompt": "a"}, {"chat_template_options": {"enable_thinking": False}}),
        ({"prompt": "a"}, {"chat_template_options": {"chat_template": CHAT + "{{ mode }}", "mode": "!"}}),
        ({"prompt": '{"a": [{"role": 1}]}'}, {}),
        ({"prompt": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"}, {"chat_template": False}),
        ({"prompt": "a", "answer": "b"}, {"response_key": "answer"}),
        ({"talk": [user("a"), {"role": "assistant", "content": "b"}]}, {"conversation_key": "talk"}),
        ({"prompt": "mend it", "image": "registry/image:3"}, {}),
        ({"prompt": "It cost 5 — at <b>noon</b>"}, {}),
        ({"prompt": r"Is \nu a letter, and \nabla?"}, {}),
        ({"prompt": r'In \\begin{problem} or f"{text}" or ${input}'}, {}),
        ({"prompt": 'Fill {name} into "a\\n" and {"role": "x"}.'}, {}),
        ({"prompt": "How is an assistant: human or not? A) 5 B) 6", "label": "B"}, {}),
        ({"prompt": "Compute 2+15?", "label": 15}, {}),
        ({"prompt": "a", "image": {"bytes": None, "path": None}}, {}),
        ({"prompt": "a", "image_tag": "v3.tar", "images": [], "video": None}, {}),
        ({"prompt": "a", "answer": "<think>b</think> 5"}, {"response_key": "answer"}),
        ({"prompt": "سلام\u200cها 👩\u200d💻 [0, 1] <b>"}, {}),
    ],
)
def test_what_is_usual_is_not_odd(tmp_path: Path, row: dict[str, Any], data: dict[str, Any]) -> None:
    assert look(tmp_path, row, **data).oddities == ()


@pytest.mark.parametrize(
    ("row", "data", "template", "said"),
    [
        (
            {"prompt": "<|im_start|>user\na<|im_end|>"},
            {},
            CHAT,
            "has <|im_start|> in its text, and the chat template is written around it: is the text rendered already?",
        ),
        (
            {"prompt": "[INST] a [/INST]"},
            {"chat_template": False},
            CHAT,
            "has [INST] in its text, which is no token of",
        ),
        ({"prompt": "<|eot_id|>a"}, {}, CHAT, "has <|eot_id|> in its text, which is no token of this model"),
        ({"prompt": f"a{END}"}, {"chat_template": False}, CHAT, "ends with <|im_end|>, which ends an answer"),
        ({"prompt": "a"}, {}, THINKS, "ends with <think>, so an answer begins inside the thought"),
        ({"prompt": "a"}, {}, CHAT.partition("{% if add_gen")[0], "does not open an answer"),
        (
            {"prompt": "a"},
            {"chat_template_options": {"enable_thinkin": False}},
            CHAT,
            "did you mean 'enable_thinking'?",
        ),
        ({"prompt": "a"}, {"chat_template_options": {"enable_thinking": "false"}}, CHAT, "is a text, which templates"),
        (
            {"prompt": [{"role": "system", "content": "s"}, user("a")]},
            {"system_prompt": "t"},
            CHAT,
            "has 2 system mess",
        ),
        (
            {"prompt": [{"role": "system", "content": "brief"}, user("a")]},
            {},
            OF_USER,
            "a message of the system that the",
        ),
        ({"prompt": CALL}, {}, WITHOUT_CALLS, "has a tool call that the chat template leaves out"),
        (
            {"prompt": "a", "t": [{"name": "add"}]},
            {"tools_key": "t"},
            WITHOUT_TOOLS,
            "has tools (t) that the chat temp",
        ),
        ({"prompt": CALL}, {}, WRITES_NONE, "has a message without content, for which the chat template writes None"),
        ({"prompt": [{"role": "human", "content": "a"}]}, {}, CHAT, "has a message of 'human'; the roles that"),
        ({"prompt": [{"role": "system", "content": "a"}]}, {}, CHAT, "has no message of the user"),
        ({"prompt": " \n"}, {}, CHAT, "has an empty message of the user"),
        ({"prompt": " \n"}, {"chat_template": False}, CHAT, "is blank"),
        ({"prompt": "Answer: "}, {"chat_template": False}, CHAT, "ends with a space"),
        ({"prompt": "\ufeffa"}, {}, CHAT, "has the invisible character U+FEFF"),
        ({"prompt": "a\u200bb"}, {}, CHAT, "has the invisible character U+200B"),
        ({"prompt": "How many <image>?"}, {}, CHAT, "has <image> in its text, and this model reads text alone"),
        ({"prompt": "2+3 = 5.", "label": "5"}, {}, CHAT, "prompts end with their label"),
        ({"prompt": f"a{END}\n"}, {"chat_template": False}, CHAT, "ends with <|im_end|>, which ends an answer"),
        ({"prompt": "2+3 = 5.", "label": 5}, {}, CHAT, "prompts end with their label"),
        ({"prompt": r"2+3 = \boxed{5}$", "label": ["7", "5"]}, {}, CHAT, "prompts end with their label"),
        ({"prompt": "2+3 = **5**", "label": "5"}, {}, CHAT, "prompts end with their label"),
        ({"prompt": "See <image_1>?"}, {}, CHAT, "has <image_1> in its text, and this model reads text"),
        ({"prompt": "See <|image_1|>?"}, {}, CHAT, "has <|image_1|> in its text, and this model reads text"),
        ({"prompt": "See [IMG]?"}, {}, CHAT, "has [IMG] in its text, and this model reads text"),
        ({"prompt": "\n\nHuman: a\n\nAssistant:"}, {}, CHAT, "ends with 'Assistant:', and the chat template is"),
        ({"prompt": "### Instruction:\na\n\n### Response:\n"}, {}, CHAT, "ends with '### Response:', and the chat"),
        ({"prompt": "<<SYS>>b a"}, {}, CHAT, "has <<SYS>> in its text, which is no token"),
        ({"prompt": "a</s> "}, {}, CHAT, "has </s> in its text, which is no token"),
        ({"prompt": "a\r\nb"}, {}, CHAT, "has the invisible character U+000D"),
        ({"prompt": "a\xadb"}, {}, CHAT, "has the invisible character U+00AD"),
        ({"prompt": "Itâ€™s"}, {}, CHAT, "has â€™ in its text: UTF-8 that was read as another encoding?"),
        ({"prompt": "nan"}, {}, CHAT, "is 'nan', which a missing value may have become"),
        ({"prompt": "Solve: {question}"}, {}, CHAT, "has {question} in its text: is it a pattern that was not filled"),
        ({"prompt": r"Question:\nWhat\n\nA"}, {}, CHAT, r"has \n in its text, a backslash and a letter"),
        ({"prompt": "漢 a"}, {}, CHAT, "has letters that the tokenizer does not know (it leaves out or changes '漢')"),
        (
            {"prompt": "a", "answer": f"b{END}"},
            {"response_key": "answer"},
            CHAT,
            "has an answer that ends with <|im_end",
        ),
        ({"prompt": "a", "answer": f"b{END}\n"}, {"response_key": "answer"}, CHAT, "has an answer that ends with <|im"),
        ({"prompt": "a", "answer": " \n"}, {"response_key": "answer"}, CHAT, "has a blank answer"),
        (
            {"prompt": "a", "answer": "b</s>"},
            {"response_key": "answer"},
            CHAT,
            "has </s> in its answer, which is no tok",
        ),
        (
            {"prompt": "a", "answer": "<|im_start|>assistant\nb"},
            {"response_key": "answer"},
            CHAT,
            "begins with <|im_start|>, and the prompt ends with that already",
        ),
        ({"talk": talk("<t>x</t>b")}, {"conversation_key": "talk"}, STRIPS, "that the chat template leaves out or"),
        ({"talk": talk("")}, {"conversation_key": "talk"}, CHAT, "has an empty answer, which is trained"),
        (
            {"talk": talk("b")},
            {"conversation_key": "talk"},
            WITHOUT_END,
            "writes no end token behind an answer",
        ),
    ],
)
def test_each_oddity_is_said_in_a_line(
    tmp_path: Path, row: dict[str, Any], data: dict[str, Any], template: str, said: str
) -> None:
    (line,) = look(tmp_path, row, template=template, **data).oddities
    assert said in line
    assert "\n" not in line


def test_an_end_token_that_is_not_the_templates_is_said(tmp_path: Path) -> None:
    base = tokenizer_of(CHAT, end="<|endoftext|>")  # as Qwen's base models: they end a text, not a turn
    (line,) = look(tmp_path, {"prompt": "a", "answer": "b"}, tokenizer=base, response_key="answer").oddities
    assert (
        "the model's template ends an answer with <|im_end|>, and the end token that answers are trained with" in line
    )
    limits = RowLimits(end_tokens=frozenset({5}))
    answered = {"prompt": "a", "answer": "b"}
    (line,) = look(tmp_path, answered, limits=limits, response_key="answer", chat_template=False).oddities
    assert "answers are trained to end with <|im_end|>" in line and "does not end one when sampling" in line
    (line,) = look(tmp_path, {"prompt": "a"}, tokenizer=base).oddities
    number = base.convert_tokens_to_ids(END)
    assert line.endswith(f"does not end one when sampling; add rollout.stop_token_ids = [{number}]")
    for limits in (
        RowLimits(end_tokens=frozenset({number})),
        RowLimits(sampling={"stop_token_ids": [number]}),
        RowLimits(sampling={"stop": [END]}),
    ):
        assert look(tmp_path, {"prompt": "a"}, tokenizer=base, limits=limits).oddities == ()


def test_a_rendered_prompt_begins_once_and_no_prompt_ends_before_its_answer(tmp_path: Path) -> None:
    begins = tokenizer_of(CHAT, begin="<bos>", adds="<bos> $A")
    for text in ("a", "<bos>a"):
        looked = look(tmp_path, {"prompt": text}, tokenizer=begins, chat_template=False)
        assert (looked.shown[0][1], looked.oddities) == ('"<bos>a" (2 tokens)', ())
    ends = tokenizer_of(CHAT, adds=f"$A {END}")
    looked = look(tmp_path, {"prompt": "a"}, tokenizer=ends, chat_template=False)
    bare = ", without the model's chat template (data.chat_template = false)"
    assert (looked.shown[0][1], looked.oddities) == ('"a" (1 tokens)' + bare, ())
    (line,) = look(tmp_path, {"prompt": "a"}, tokenizer=begins).oddities
    assert line.endswith("has no <bos>, with which the tokenizer begins a text: the chat template leaves it out")
    begins.chat_template = "{{ bos_token }}" + CHAT
    twice = look(tmp_path, {"prompt": "<bos>a"}, tokenizer=begins).oddities
    assert any(line.endswith("has <bos>, which begins a text, 2 times") for line in twice)


def test_a_token_that_begins_a_text_and_opens_each_message_or_exchange_is_not_odd(tmp_path: Path) -> None:
    turns = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]
    smollm = tokenizer_of(CHAT, begin="<|im_start|>")
    assert look(tmp_path, {"prompt": turns}, tokenizer=smollm).oddities == ()
    twice = tokenizer_of(CHAT.replace("messages %}", "messages %}{{ bos_token }}"), begin="<|im_start|>")
    (line,) = look(tmp_path, {"prompt": turns}, tokenizer=twice).oddities
    assert line.endswith("has <|im_start|>, which begins a text, 8 times")
    llama = tokenizer_of(
        "{% for m in messages %}{{ bos_token if m.role == 'user' }}{{ m.content }}"
        "{{ eos_token if m.role == 'assistant' }}{% endfor %}{{ '->' if add_generation_prompt }}",
        begin="<bos>",
    )
    assert look(tmp_path, {"prompt": turns[1:]}, tokenizer=llama).oddities == ()


def test_prompts_that_are_much_alike_are_said_with_their_number(tmp_path: Path) -> None:
    same = [{"prompt": "a", "label": 1}] * 8
    (line,) = look(tmp_path, *same).oddities
    assert "only 1 of 8 prompts differ" in line
    (line,) = look(tmp_path, *({"prompt": "a", "label": label} for label in range(8))).oddities
    assert "1 of 1 prompts have several labels" in line
    (line,) = look(tmp_path, {"prompt": "a"}, {"prompt": "b" * 2000}).oddities
    assert line.endswith("data.jsonl: 1 of 2 prompts are too long, and skipped")
    mixed = look(tmp_path, {"prompt": "a"}, {"prompt": "\u200b"}, {"prompt": "b\u200b"}).oddities
    assert [line.partition(": ")[2] for line in mixed] == [
        "has the invisible character U+200B in its text; remove it (so in 2 of 3 prompts)"
    ]
    assert "data.jsonl:2: " in mixed[0]


def test_the_first_prompt_is_shown_as_the_model_sees_it_with_its_label_or_answer(tmp_path: Path) -> None:
    asked = '"<|im_start|>user\\n2\\u200b<|im_end|>\\n<|im_start|>assistant\\n"'
    shown = dict(look(tmp_path, {"prompt": "2\u200b", "label": "5"}).shown)
    assert shown["first prompt"].startswith(asked)
    assert shown["its label"] == "'5'"
    shown = dict(look(tmp_path, {"prompt": "2", "answer": "3"}, response_key="answer").shown)
    assert shown["what is trained"] == '"3<|im_end|>" (2 tokens)'
    long = dict(look(tmp_path, {"prompt": "x" * 9000}, chat_template=False, max_prompt_tokens=9999).shown)
    assert len(long["first prompt"]) < 3200
    assert 'x" (9,000 tokens), without the model' in long["first prompt"]
    image = dict(
        look(tmp_path, {"prompt": "1<|im_end|><|im_end|>" + "<|im_start|>" * 7 + "2"}, chat_template=False).shown
    )
    assert image["first prompt"].startswith('"1<|im_end|><|im_end|><|im_start|> x 7 2" (11 tokens)')


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "What is this?", "images": ["a.png"]},
        {"prompt": "What is this?", "image_path": "coco/0001.jpg"},
        {"prompt": "What is this?", "video": "data:video/mp4;base64,AAAA"},
        {"prompt": "What is this?", "figure": {"bytes": "x", "path": None}},
        {"prompt": "See <image 1>", "image_1": "x"},
        {"prompt": "What is this?", "image_url": "https://host/a.JPG?size=1"},
        {"prompt": "[{'name': None, 'role': 'user', 'content': 'a'}]"},
        {"prompt": '{"prompt": [{"role": "user", "content": "a"}]}'},
        {"prompt": '\ufeff[{"role": "user", "content": "a"}]'},
        {"prompt": '[["user", "a"], ["assistant", "b"]]'},
        {"prompt": "[HumanMessage(content='a')]"},
    ],
)
def test_a_prompt_that_would_be_asked_blind_or_as_the_print_of_messages_is_refused(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="the model would be asked without it|printed form of chat messages"):
        look(tmp_path, row)
