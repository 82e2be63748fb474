"""The table of algorithms. Each row has the paper, and the components with the options that the algorithm sets.

Which to choose: docs/guides/algorithms.md.
"""

from __future__ import annotations

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

ALGORITHMS: dict[str, AlgorithmSpec] = {
    spec.name: spec
    for spec in (
        AlgorithmSpec(
            name="grpo",
            paper="arXiv:2402.03300, token mean of arXiv:2503.14476",
            advantage=GRPO(),
            loss=PPOClip(),
            aggregation=TokenMean(),
            correction=(TISToken(),),
        ),
        AlgorithmSpec(
            name="dapo",
            paper="arXiv:2503.14476; grpo with clip_high 0.28; filters, overlong_tokens, mask_truncated are separate",
            advantage=GRPO(),
            loss=PPOClip(clip_high=0.28),
            aggregation=TokenMean(),
            correction=(TISToken(),),
        ),
        AlgorithmSpec(
            name="dr_grpo",
            paper="arXiv:2503.20783",
            advantage=DrGRPO(),
            loss=PPOClip(),
            aggregation=SeqMeanTokenSumNorm(),
            correction=(TISToken(),),
        ),
        AlgorithmSpec(
            name="gspo",
            paper="arXiv:2507.18071",
            advantage=GRPO(),
            loss=GSPO(),
            aggregation=SeqMeanTokenMean(),
            correction=(TISToken(),),
        ),
        AlgorithmSpec(
            name="cispo",
            paper="arXiv:2506.13585: the capped ratio to the behavior policy is the correction",
            advantage=GRPO(),
            loss=Cispo(),
            aggregation=TokenMean(),
            correction=(NoCorrection(),),
        ),
        AlgorithmSpec(
            name="rloo",
            paper="arXiv:2402.14740",
            advantage=RLOO(),
            loss=Reinforce(),
            aggregation=SeqMeanTokenSum(),
            correction=(TISToken(),),
        ),
        AlgorithmSpec(
            name="reinforce_pp",
            paper="arXiv:2501.03262",
            advantage=ReinforcePP(),
            loss=PPOClip(),
            aggregation=TokenMean(),
            correction=(TISToken(),),
        ),
        AlgorithmSpec(
            name="reinforce_pp_baseline",
            paper="arXiv:2501.03262, the variant with a baseline",
            advantage=ReinforcePPBaseline(),
            loss=PPOClip(),
            aggregation=TokenMean(),
            correction=(TISToken(),),
        ),
        AlgorithmSpec(
            name="gpg",
            paper="arXiv:2504.02546",
            advantage=GPG(),
            loss=Reinforce(),
            aggregation=TokenMean(),
            correction=(TISToken(),),
        ),
        AlgorithmSpec(
            name="topr",
            paper="arXiv:2503.14286",
            advantage=Returns(),
            loss="topr",
            aggregation=SeqMeanTokenSum(),
            correction=(NoCorrection(),),
        ),
        AlgorithmSpec(
            name="sapo",
            paper="arXiv:2511.20347",
            advantage=GRPO(),
            loss="sapo",
            aggregation=SeqMeanTokenMean(),
            correction=(TISToken(),),
        ),
        AlgorithmSpec(
            name="m2po",
            paper="arXiv:2510.01161",
            advantage=GRPO(),
            loss="m2po",
            aggregation=TokenMean(),
            correction=(TISToken(),),
        ),
        AlgorithmSpec(
            name="ppo",
            paper="arXiv:1707.06347, the advantages of arXiv:1506.02438 whitened over the batch",
            advantage=GAE(),
            loss=PPOClip(),
            aggregation=TokenMean(),
            correction=(TISToken(),),
        ),
        AlgorithmSpec(
            name="opd",
            paper="on-policy distillation, the reverse KL to the teacher as a reward per token (tinker, 2025)",
            advantage=NoAdvantage(),
            loss=OPDReward(),
            aggregation=TokenMean(),
            correction=(TISToken(),),
        ),
        AlgorithmSpec(
            name="distill",
            paper="arXiv:2306.13649 on the policy's own samples: the KL to a served teacher's likeliest tokens",
            advantage=NoAdvantage(),
            loss=Distill(),
            aggregation=TokenMean(),
            correction=(NoCorrection(),),
        ),
        AlgorithmSpec(
            name="p3o",
            paper="arXiv:2605.12380",
            advantage=GRPO(),
            loss="p3o",
            aggregation=TokenMean(),
            correction=(NoCorrection(),),
        ),
        AlgorithmSpec(
            name="sft",
            paper="maximum likelihood of the responses, whatever their reward",
            advantage=Returns(),
            loss=SFT(),
            aggregation=TokenMean(),
            correction=(NoCorrection(),),
        ),
    )
}
