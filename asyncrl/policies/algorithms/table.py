"""The table of algorithms. Each row has the paper, and the components with the options that the algorithm sets.

Which to choose: docs/guides/algorithms.md.
"""

from __future__ import annotations

from typing import Final

from asyncrl.policies.advantages.groups import GPG, GRPO, RLOO, DrGRPO
from asyncrl.policies.advantages.returns import GAE, ReinforcePP, ReinforcePPBaseline, Returns
from asyncrl.policies.advantages.table import NoAdvantage
from asyncrl.policies.algorithms.spec import AlgorithmSpec
from asyncrl.policies.corrections.weights import NoCorrection, TISToken
from asyncrl.policies.losses.aggregation import SeqMeanTokenMean, SeqMeanTokenSum, SeqMeanTokenSumNorm, TokenMean
from asyncrl.policies.losses.cispo import Cispo
from asyncrl.policies.losses.distillation import Distill, OPDReward
from asyncrl.policies.losses.ppo import GSPO, PPOClip
from asyncrl.policies.losses.reinforce import SFT, Reinforce

_TIS: Final = (TISToken(),)
_NONE: Final = (NoCorrection(),)

ALGORITHMS: dict[str, AlgorithmSpec] = {
    spec.name: spec
    for spec in (
        # name, advantage, loss, aggregation, correction, paper
        AlgorithmSpec("grpo", GRPO(), PPOClip(), TokenMean(), _TIS, "arXiv:2402.03300, token mean of arXiv:2503.14476"),
        AlgorithmSpec(
            "dapo",
            GRPO(),
            PPOClip(clip_high=0.28),
            TokenMean(),
            _TIS,
            "arXiv:2503.14476; grpo with clip_high 0.28; filters, overlong_tokens, mask_truncated are separate",
        ),
        AlgorithmSpec("dr_grpo", DrGRPO(), PPOClip(), SeqMeanTokenSumNorm(), _TIS, "arXiv:2503.20783"),
        AlgorithmSpec("gspo", GRPO(), GSPO(), SeqMeanTokenMean(), _TIS, "arXiv:2507.18071"),
        AlgorithmSpec(
            "cispo",
            GRPO(),
            Cispo(),
            TokenMean(),
            _NONE,
            "arXiv:2506.13585: the capped ratio to the behavior policy is the correction",
        ),
        AlgorithmSpec("rloo", RLOO(), Reinforce(), SeqMeanTokenSum(), _TIS, "arXiv:2402.14740"),
        AlgorithmSpec("reinforce_pp", ReinforcePP(), PPOClip(), TokenMean(), _TIS, "arXiv:2501.03262"),
        AlgorithmSpec(
            "reinforce_pp_baseline",
            ReinforcePPBaseline(),
            PPOClip(),
            TokenMean(),
            _TIS,
            "arXiv:2501.03262, the variant with a baseline",
        ),
        AlgorithmSpec("gpg", GPG(), Reinforce(), TokenMean(), _TIS, "arXiv:2504.02546"),
        AlgorithmSpec("topr", Returns(), "topr", SeqMeanTokenSum(), _NONE, "arXiv:2503.14286"),
        AlgorithmSpec("sapo", GRPO(), "sapo", SeqMeanTokenMean(), _TIS, "arXiv:2511.20347"),
        AlgorithmSpec("m2po", GRPO(), "m2po", TokenMean(), _TIS, "arXiv:2510.01161"),
        AlgorithmSpec(
            "ppo",
            GAE(),
            PPOClip(),
            TokenMean(),
            _TIS,
            "arXiv:1707.06347, the advantages of arXiv:1506.02438 whitened over the batch",
        ),
        AlgorithmSpec(
            "opd",
            NoAdvantage(),
            OPDReward(),
            TokenMean(),
            _TIS,
            "on-policy distillation, the reverse KL to the teacher as a reward per token (tinker, 2025)",
        ),
        AlgorithmSpec(
            "distill",
            NoAdvantage(),
            Distill(),
            TokenMean(),
            _NONE,
            "arXiv:2306.13649 on the policy's own samples: the KL to a served teacher's likeliest tokens",
        ),
        AlgorithmSpec("p3o", GRPO(), "p3o", TokenMean(), _NONE, "arXiv:2605.12380"),
        AlgorithmSpec(
            "sft", Returns(), SFT(), TokenMean(), _NONE, "maximum likelihood of the responses, whatever their reward"
        ),
    )
}
