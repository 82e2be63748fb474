"""Formats recorded groups as table rows and as Markdown, for sinks that show text."""

from __future__ import annotations

import re
from typing import Any, Final

from asyncrl.policies.groups.sample import GroupSample

COLUMNS: Final = (
    "step",
    "group",
    "fate",
    "reason",
    "worker",
    "prompt",
    "answer",
    "reward",
    "advantage",
    "staleness",
    "tokens",
    "finish_reason",
    "oldest_version",
    "newest_version",
)
"""Columns of a row per answer; a group without answers is one row."""
EVALUATION_COLUMNS: Final = ("step", "prompt", "label", "answer", "reward", "tokens", "finish_reason")
"""Columns of a row per answer of an evaluation."""


def rows(sample: GroupSample) -> list[list[Any]]:
    """Return the rows of a group, in the order of COLUMNS."""
    head = [sample.step, sample.group_id, sample.fate, sample.reason, sample.worker, sample.prompt]
    if not sample.answers:
        return [[*head, *([None] * (len(COLUMNS) - len(head)))]]
    made = []
    for answer in sample.answers:
        versions = [version for _, _, version in answer.versions] or [0]
        numbers = [answer.reward, answer.advantage, answer.staleness, len(answer.tokens), answer.finish_reason]
        made.append([*head, answer.text, *numbers, min(versions), max(versions)])
    return made


def evaluation_rows(sample: GroupSample) -> list[list[Any]]:
    """Return the rows of an evaluated prompt, in the order of EVALUATION_COLUMNS."""
    head = [sample.step, sample.prompt, sample.label]
    return [[*head, one.text, one.reward, len(one.tokens), one.finish_reason] for one in sample.answers]


def markdown(sample: GroupSample) -> str:
    """Return the group as Markdown. Its texts are code blocks, so viewers do not interpret them as markup.

    This includes the reason, which may quote an answer, and the worker's name.
    """
    lines = [f"**{sample.name}** {sample.fate} at step {sample.step}", ""]
    lines += _block(f"{sample.worker} {sample.reason}".strip()) if sample.worker or sample.reason else []
    lines += _block(sample.prompt or "")
    lines += ["label:", "", *_block(sample.label)] if sample.label else []
    for answer in sample.answers:
        advantage = "" if answer.advantage is None else f", advantage {answer.advantage:+.3f}"
        lines += [f"reward {answer.reward}{advantage}, {len(answer.tokens)} tokens, {answer.finish_reason}", ""]
        lines += _block(answer.text)
    return "\n".join(lines)


def _block(text: str) -> list[str]:
    """Indented code block; the text could close a fenced one. Markdown also ends lines at carriage returns."""
    return [*(f"    {line}" for line in re.split(r"\r\n?|\n", text)), ""]
