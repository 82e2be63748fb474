"""Turns in readable form: text, thoughts, tool calls and results, without the markers around them."""

from __future__ import annotations

import pytest

from asyncrl.policies.groups.turn_text import other_pieces, pieces_of, sampled_pieces

QWEN = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
LLAMA = "<|start_header_id|>ipython<|end_header_id|>\n\n5<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


def found(pieces: object) -> list[tuple[str, str]]:
    return [(piece.kind, piece.text) for piece in pieces]  # type: ignore[attr-defined]


def test_a_turn_is_thought_text_and_calls() -> None:
    text = (
        '<think>\nhm\n</think>\n\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    )
    assert found(sampled_pieces(text)) == [
        ("thinking", "hm"),
        ("text", "I add."),
        ("tool call", 'add({"a": 1})'),
    ]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hm</think>yes", [("thinking", "hm"), ("text", "yes")]),  # the prompt ended with <think>
        ("a <think>cut", [("text", "a "), ("thinking", "cut")]),
        ("<tool_call>add(1)</tool_call>", [("tool call", "add(1)")]),  # not JSON: shown as it is
        ('<tool_call>{"name": "f", "arguments": "x"}', [("tool call", "f(x)")]),
        ("<tool_call>[1]</tool_call>", [("tool call", "[1]")]),
        ("0123", [("text", "0123")]),
        ("<|im_end|>", [("text", "<|im_end|>")]),  # the whole answer
        ("<|im_start|>user\n5", [("text", "<|im_start|>user\n5")]),  # markers that a model writes begin no new turn
    ],
)
def test_what_is_not_as_expected_stays_text(text: str, pieces: list[tuple[str, str]]) -> None:
    assert found(sampled_pieces(text)) == pieces


def test_results_of_tools_and_words_of_users_are_told_apart() -> None:
    assert found(other_pieces(QWEN)) == [("tool result", "5")]
    assert found(other_pieces(LLAMA)) == [("tool result", "5")]
    assert found(other_pieces("<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n")) == [
        ("user", "and now?")
    ]
    assert found(other_pieces("6")) == [("text", "6")]


def test_pieces_say_which_turn_they_are_of() -> None:
    pieces = pieces_of([("policy", "a"), ("environment", QWEN), ("policy", "<think>b</think>c")])
    assert [(piece.turn, piece.kind) for piece in pieces] == [
        (0, "text"),
        (1, "tool result"),
        (2, "thinking"),
        (2, "text"),
    ]
