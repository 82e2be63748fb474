"""Where in a completion its answer is: what rewards have in common. Pure text, no vendor."""

from __future__ import annotations

import re
from typing import Final

_BOXED: Final = "\\boxed{"
_SETTING: Final = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_FENCE: Final = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
END_OF_THINKING: Final = "</think>"


def last_boxed(text: str) -> str | None:
    """What the last \\boxed{} of ``text`` holds; None if it has none."""
    begin = text.rfind(_BOXED)
    return None if begin < 0 else _inside(text[begin + len(_BOXED) :])


def after_thinking(text: str) -> str:
    """What follows the last </think>; all of it if there is none."""
    return text.rpartition(END_OF_THINKING)[2]


def last_block(text: str, *languages: str) -> str | None:
    """The last fenced block (```) of one of these languages, or of none; None if there is none."""
    found = [match[2] for match in _FENCE.finditer(text) if match[1].lower() in ("", *languages)]
    return found[-1] if found else None


def bare(text: str) -> str:
    """An answer without what only sets it: "$\\text{(A)}$." is "A". Formulas stay as they are."""
    text = text.strip().rstrip(".").strip().strip("$").strip()
    if setting := _SETTING.fullmatch(text):
        text = setting[1].strip()
    return text[1:-1] if re.fullmatch(r"\(\w\)", text) else text


def _inside(text: str) -> str:
    """Up to the brace that closes what was opened before ``text``; all of it if none does."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return text[:place]
    return text
