"""The pieces of a turn of an answer: text, thoughts, tool calls, tool results. Pure.

For display only. Pieces are found by the marks that chat templates write around roles (ChatML and similar formats),
<think>, <tool_call> and <tool_response>. A turn without marks is one piece of text; only the marks themselves are left
out. Training uses the tokens, whatever is found here.

Tests: tests/unit/policies/groups/test_sample.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

TEXT: Final = "text"
THINKING: Final = "thinking"
TOOL_CALL: Final = "tool call"
TOOL_RESULT: Final = "tool result"

_TOOL_ROLES: Final = ("tool", "ipython", "observation")
_ROLE: Final = re.compile(
    r"<\|im_start\|>(\w+)\n?"
    r"|<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*"
    r"|<start_of_turn>(\w+)\n?"
    r"|<\|(system|user|assistant|observation)\|>\n?"
)
_END: Final = re.compile(r"(<\|(im_end|eot_id|eom_id|end|endoftext)\|>|<end_of_turn>)")
_INSIDE: Final = re.compile(
    r"<think>(?P<thinking>.*?)(?:</think>|\Z)"
    r"|<tool_call>(?P<call>.*?)(?:</tool_call>|\Z)"
    r"|<tool_response>(?P<result>.*?)(?:</tool_response>|\Z)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """
    turn  index of the piece's turn in the answer, from 0
    kind  TEXT, THINKING, TOOL_CALL, TOOL_RESULT, or a role that a template names, such as "user"
    """

    turn: int = 0
    kind: str
    text: str


def pieces_of(turns: Sequence[tuple[str, str]]) -> list[Piece]:
    """Return the pieces of an answer's turns, given as (author, text); author "policy" is the model."""
    return [
        replace(piece, turn=number)
        for number, (by, text) in enumerate(turns)
        for piece in (sampled_pieces(text) if by == "policy" else other_pieces(text))
    ]


_USER: Final = re.compile(
    r"(?:<\|start\|>user<\|message\|>|\[INST\]|<｜User｜>)(.*?)(?:<\|end\|>|\[/INST\]|<｜Assistant｜>|\Z)", re.DOTALL
)
"""User messages of templates whose marks are not in _ROLE: harmony, Mistral, DeepSeek."""


def question_in(prompt: str) -> str:
    """Return the last message of the user, by which people tell prompts apart; the prompt if no template is known."""
    found = [piece.text for piece in other_pieces(prompt) if piece.kind == "user"] or _USER.findall(prompt)
    return (found[-1] if found else prompt).strip() or prompt


def sampled_pieces(text: str) -> list[Piece]:
    """Return the pieces of a turn by the model. A thought may begin in the prompt, and a turn may end in a thought."""
    opened, closed, rest = text.partition("</think>")
    begins_in_thought = closed and "<think>" not in opened
    pieces = [Piece(kind=THINKING, text=opened)] if begins_in_thought else []
    pieces += _inside(rest if begins_in_thought else text, kind=TEXT)
    return _with_text([piece for piece in pieces if _END.sub("", piece.text).strip()] or pieces)


def other_pieces(text: str) -> list[Piece]:
    """Return the pieces of text by tools, users and chat templates, one per message; empty if there are only marks."""
    pieces: list[Piece] = []
    kind, at = TEXT, 0
    for found in _ROLE.finditer(text):
        pieces += _inside(_END.sub("", text[at : found.start()]), kind=kind)
        role = next(filter(None, found.groups()))
        kind, at = TOOL_RESULT if role in _TOOL_ROLES else role, found.end()
    pieces += _inside(_END.sub("", text[at:]), kind=kind)
    return _with_text(pieces)


def _inside(text: str, *, kind: str) -> Iterator[Piece]:
    at = 0
    for found in _INSIDE.finditer(text):
        yield Piece(kind=kind, text=text[at : found.start()])
        if found["thinking"] is not None:
            yield Piece(kind=THINKING, text=found["thinking"])
        elif found["call"] is not None:
            yield Piece(kind=TOOL_CALL, text=_call(found["call"]))
        else:
            yield Piece(kind=TOOL_RESULT, text=found["result"])
        at = found.end()
    yield Piece(kind=kind, text=text[at:])


def _call(text: str) -> str:
    """Format {"name": "add", "arguments": {"a": 1}} as add({"a": 1}); return anything else unchanged."""
    try:
        found = json.loads(text)
        arguments = found.get("arguments", {})
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return f"{found['name']}({written})"
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return text


def _with_text(pieces: list[Piece]) -> list[Piece]:
    return [Piece(kind=piece.kind, text=piece.text.strip("\n")) for piece in pieces if piece.text.strip()]
