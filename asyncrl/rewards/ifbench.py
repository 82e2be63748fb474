"""reward.kind = "ifbench": the completion follows instructions of IFBench that a program can check.

IFBench (Pyatkin et al. 2025, arXiv 2507.02833) has 58 instructions beyond those of `ifeval`. One of them is not
supported (ifbench_rules.py). Rows have the same format as for `ifeval` and may also name instructions of IFEval. A row
whose instructions cannot be checked is refused before the run starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.rewards.ifbench_rules import follows
from asyncrl.rewards.ifeval import IfEvalReward, Options, instructions_of

__all__ = ["IfBenchReward", "Options"]


class IfBenchReward(IfEvalReward):
    follows = staticmethod(follows)

    def check_label(self, label: Any, metadata: Mapping[str, Any]) -> None:
        for kind, given in zip(*instructions_of(label, metadata), strict=True):
            follows("a", kind, given)
