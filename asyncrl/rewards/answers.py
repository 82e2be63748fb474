"""Find the answer in a completion. Shared by the rewards; works on plain text, without other packages."""

from __future__ import annotations

import re
from typing import Final

OPEN_BOX: Final = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SETTING: Final = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_FENCE: Final = re.compile(r"^([ \t]*)```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_OPEN: Final = (
    r"(?:<(?:\w+[:_])?(?:think|thinking|thought|reasoning)>|\[THINK\]|◁think▷"
    r"|<\|(?:START_THINKING|begin_of_thought)\|>|<\|channel>thought|<\|channel\|>analysis<\|message\|>)"
)
_OPENED: Final = re.compile(rf"^[ \t]*{_OPEN}|{_OPEN}[ \t]*$", re.MULTILINE)
_OPENS_AT_END: Final = re.compile(rf"{_OPEN}\s*\Z")
_CLOSED: Final = re.compile(
    r"</(?:\w+[:_])?(?:think|thinking|thought|reasoning)>|\[/THINK\]|◁/think▷"
    r"|<\|(?:END_THINKING|end_of_thought)\|>|<channel\|>"
)
"""The marks around the thoughts of Qwen, DeepSeek, Magistral, Command A, Kimi, Gemma and others. A mark opens a thought
only at the start or the end of a line: an answer may speak of <think>."""
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+).*?(?:<\|message\|>|\Z)", re.DOTALL)
_END_OF_MESSAGE: Final = re.compile(r"<\|(?:end|return|call|start|channel)\|>")
"""Harmony, the format of gpt-oss:
<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>..."""
_MARKED: Final = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_SPECIAL: Final = re.compile(r"<[|｜][^|｜<>\s]{1,40}[|｜]>")


def last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{} (or \\fbox{}) of ``text``; None if there is none."""
    begins = [match.end() for match in OPEN_BOX.finditer(text)]
    return _cut_at_brace(text[begins[-1] :]) if begins else None


def after_thinking(text: str, *, prompt: str = "") -> str:
    """Return the answer in a completion: what follows its last thought, without special tokens such as <|im_end|>.

    All of it if there is no thought; "" if the last thought never ends, whether the completion or the end of ``prompt``
    opened it: what a thought guesses is no answer.
    """
    if channels := list(_CHANNEL.finditer(text)):
        answer = text[channels[-1].end() :] if channels[-1][1] == "final" else ""
        return _SPECIAL.sub("", _END_OF_MESSAGE.split(answer, maxsplit=1)[0])
    if thoughts := list(_CLOSED.finditer(text)):
        text = text[thoughts[-1].end() :]
    elif _OPENS_AT_END.search(prompt[-100:]):
        return ""
    return "" if _OPENED.search(text) else _SPECIAL.sub("", text)


def marked(answer: str) -> str:
    """Return what stands in the last <answer>...</answer>, as R1's prompt asks for it; else all of it."""
    found = [text for text in _MARKED.findall(answer) if text.strip()]
    return found[-1].strip() if found else answer


def ends_thinking(text: str) -> bool:
    """Whether a thought ends in the completion, so that an answer follows it."""
    return bool(_CLOSED.search(text)) or any(channel[1] == "final" for channel in _CHANNEL.finditer(text))


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


def without_settings(text: str) -> str:
    """Return a text without \\text{} and the like around its parts: "\\textbf{(B)}\\ 5" becomes "(B)\\ 5"."""
    return _SETTING.sub(r"\1", text)


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
