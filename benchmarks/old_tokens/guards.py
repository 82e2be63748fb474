"""The guards of the table: what each changes of the run file, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

_HERE: Final = "benchmarks.old_tokens.candidates"
_AROUND_BEHAVIOR: Final[Mapping[str, Any]] = {"algorithm.correction": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """
    settings   keys of the run file
    safe_at    the learning rate is multiplied by min(1, safe_at / staleness); 0: it is not
    damps      whether GAC changes the gradients
    critic     "gae", "brace": advantages are of a critic, which learns beside the policy; tiny runs alone have one
    trace      BRACE's lambda
    drops      a quarter of the groups is not trained: the "longest", as where late ones are dropped, or "any", its
               control with as many samples; tiny runs alone drop
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    safe_at: float = 0.0
    damps: bool = False
    critic: Literal["", "gae", "brace"] = ""
    trace: float = 1.0
    drops: Literal["", "longest", "any"] = ""


def _corrected(chain: str, **options: float) -> Guard:
    return Guard(settings={"algorithm.correction": chain, **{f"algorithm.options.{k}": v for k, v in options.items()}})


def _loss(name: str, **options: float) -> Guard:
    return Guard(
        settings={
            "algorithm.loss": name,
            **_AROUND_BEHAVIOR,
            **{f"algorithm.options.{k}": v for k, v in options.items()},
        }
    )


GUARDS: Final[Mapping[str, Guard]] = {
    "tis": Guard(),  # the default: grpo with tis_token, cap 2
    "none": Guard(settings={"algorithm.correction": "none", "algorithm.allow_uncorrected": True}),
    "tis_1": _corrected("tis_token", cap=1.0),
    "tis_sequence": _corrected("tis_sequence"),
    "icepop": _corrected("icepop"),
    "mis_sequence": _corrected("mis_sequence"),
    "opsm": _corrected("opsm + tis_token", delta=0.05),
    "cispo": _loss("cispo"),
    "topr": _loss("topr"),
    "dppo": _loss("dppo"),
    "ppo": _loss(f"{_HERE}:ESTR", tau=1e9),  # its clip around mu, without the mask
    "ess": Guard(settings={"staleness.learning_rate": "ess_sqrt"}),
    "beta1_0.5": Guard(settings={"learner.betas": [0.5, 0.95]}),
    "beta1_0": Guard(settings={"learner.betas": [0.0, 0.95]}),
    "rate_1": Guard(safe_at=1.0),
    "rate_2": Guard(safe_at=2.0),
    "gate": _loss(f"{_HERE}:SequenceGate"),
    "gate_0.05": _loss(f"{_HERE}:SequenceGate", delta=0.05),
    "estr": _loss(f"{_HERE}:ESTR"),
    "estr_2": _loss(f"{_HERE}:ESTR", tau=2.0),
    "sat": _loss(f"{_HERE}:SAT"),
    "gac": Guard(damps=True),
    "drop_longest": Guard(drops="longest"),
    "drop_any": Guard(drops="any"),
    "critic": Guard(critic="gae"),
    "brace": Guard(critic="brace"),
    "brace_0.95": Guard(critic="brace", trace=0.95),
}
