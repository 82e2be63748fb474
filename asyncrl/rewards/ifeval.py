"""reward.kind = "ifeval": the completion follows instructions that a program can check.

IFEval (Zhou et al. 2023, arXiv 2311.07911). The row's metadata hold the data set's fields ``instruction_id_list`` and
``kwargs``, one table of values per instruction. The label may hold them instead, as a table or as JSON text. The text
after </think> is checked. An unknown instruction fails its group with an error that names it; it never counts as
followed or not followed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from asyncrl.rewards.answers import after_thinking
from asyncrl.rewards.instructions import follows
from asyncrl.rewards.port import Reward, Sample

_NAMES: Final = "instruction_id_list"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    score: Literal["all", "share"] = "all"
    """all: 1 if every instruction is followed, else 0. share: the share of instructions that are followed."""
    loose: bool = False
    """Also accept an instruction if the completion follows it without its first line, its last line, both, or without
    asterisks (the paper's loose accuracy)."""


class IfEvalReward:
    follows = staticmethod(follows)

    def __init__(self, options: Options) -> None:
        self._options = options

    def check_label(self, label: Any, metadata: Mapping[str, Any]) -> None:
        instructions_of(label, metadata)

    def __call__(self, sample: Sample) -> Reward:
        kinds, values = instructions_of(sample.label, sample.metadata)
        response = after_thinking(sample.completion)
        texts = _variants(response) if self._options.loose else [response]
        followed = [
            any([self.follows(text, kind, given) for text in texts]) for kind, given in zip(kinds, values, strict=True)
        ]
        share = sum(followed) / len(followed)
        return Reward(
            value=share if self._options.score == "share" else float(all(followed)), parts={"followed": share}
        )


def _variants(response: str) -> list[str]:
    lines = response.split("\n")
    cuts = [lines, lines[1:], lines[:-1], lines[1:-1]]
    texts = ["\n".join(cut).strip() for cut in cuts]
    return [*texts, *(text.replace("*", "") for text in texts)]


def instructions_of(label: Any, metadata: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[Mapping[str, Any]]]:
    """Return the instructions of a row and the values of each. Raises ValueError if there are none."""
    table: Any = metadata if _NAMES in metadata else label
    if isinstance(table, str):
        try:
            table = json.loads(table)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the label is not a table of instructions: {error}") from None
    kinds = table.get(_NAMES) if isinstance(table, Mapping) else None
    if not isinstance(kinds, list | tuple) or not kinds or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(f"metadata or label must hold {_NAMES}, a list of names; the label is {str(table)[:60]!r}")
    values = table.get("kwargs") or [{}] * len(kinds)
    if not isinstance(values, list | tuple) or len(values) != len(kinds):
        raise ValueError(f"kwargs must be a list of {len(kinds)} tables, one for each of {_NAMES}")
    if not all(isinstance(given, Mapping | None) for given in values):
        raise ValueError("kwargs must be tables")
    return kinds, [given or {} for given in values]
