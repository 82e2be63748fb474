"""Find the answer in a completion. Shared by the rewards; works on plain text, without other packages."""

from __future__ import annotations

import re
from typing import Final

OPEN_BOX: Final = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SETTING: Final = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_FENCE: Final = re.compile(r"^([ \t]*)```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
END_OF_THINKING: Final = "</think>"


def last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{} (or \\fbox{}) of ``text``; None if there is none."""
    begins = [match.end() for match in OPEN_BOX.finditer(text)]
    return _cut_at_brace(text[begins[-1] :]) if begins else None


def after_thinking(text: str) -> str:
    """Return the text after the last </think>; all of it if there is none."""
    return text.rpartition(END_OF_THINKING)[2]


def last_block(text: str, *languages: str) -> str | None:
    """Return the last fenced block (```) that has one of these languages, else the last one that has no language.

    None if there is neither. A block without a language is often output or a command after the answer. The indent of
    the fence, as in a list, is removed from the block.
    """
    tagged, plain = None, None
    for indent, language, block in _FENCE.findall(text):
        if language.lower() in languages:
            tagged = _dedent(block, len(indent))
        elif not language:
            plain = _dedent(block, len(indent))
    return plain if tagged is None else tagged


def _dedent(block: str, width: int) -> str:
    return re.sub(rf"^[ \t]{{1,{width}}}", "", block, flags=re.MULTILINE) if width else block


def bare(text: str) -> str:
    """Return an answer without typesetting: "$\\text{(A)}$." becomes "A". Formulas stay as they are."""
    text = text.strip().rstrip(".").strip().strip("$").strip()
    if setting := _SETTING.fullmatch(text):
        text = setting[1].strip()
    return text[1:-1] if re.fullmatch(r"\(\w\)", text) else text


def _cut_at_brace(text: str) -> str:
    """Return ``text`` up to the brace that closes one opened before it; all of it if no brace does."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return text[:place]
    return text
