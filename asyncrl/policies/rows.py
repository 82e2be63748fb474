"""The table of algorithms, one row each: names of its parts, where it departs from their defaults, and its paper.

Which to choose: docs/algorithms.md.
"""

from __future__ import annotations

from asyncrl.policies.algorithms import Row

ALGORITHMS: dict[str, Row] = {
    row.name: row
    for row in (
        Row(
            name="grpo",
            paper="arXiv:2402.03300, token mean of arXiv:2503.14476",
            advantage="grpo",
            loss="ppo_clip",
            aggregation="token_mean",
            correction="tis_token",
        ),
        Row(
            name="dapo",
            paper="arXiv:2503.14476; here grpo with clip_high 0.28, filters, overlong_tokens and mask_truncated apart",
            advantage="grpo",
            loss="ppo_clip",
            aggregation="token_mean",
            correction="tis_token",
            options={"clip_high": 0.28},
        ),
        Row(
            name="dr_grpo",
            paper="arXiv:2503.20783",
            advantage="dr_grpo",
            loss="ppo_clip",
            aggregation="seq_mean_token_sum_norm",
            correction="tis_token",
        ),
        Row(
            name="gspo",
            paper="arXiv:2507.18071",
            advantage="grpo",
            loss="gspo",
            aggregation="seq_mean_token_mean",
            correction="tis_token",
        ),
        Row(
            name="cispo",
            paper="arXiv:2506.13585: the capped ratio to the behavior policy is the correction",
            advantage="grpo",
            loss="cispo",
            aggregation="token_mean",
            correction="none",
        ),
        Row(
            name="rloo",
            paper="arXiv:2402.14740",
            advantage="rloo",
            loss="reinforce",
            aggregation="seq_mean_token_sum",
            correction="tis_token",
        ),
        Row(
            name="reinforce_pp",
            paper="arXiv:2501.03262",
            advantage="reinforce_pp",
            loss="ppo_clip",
            aggregation="token_mean",
            correction="tis_token",
        ),
        Row(
            name="reinforce_pp_baseline",
            paper="arXiv:2501.03262, the variant with a baseline",
            advantage="reinforce_pp_baseline",
            loss="ppo_clip",
            aggregation="token_mean",
            correction="tis_token",
        ),
        Row(
            name="gpg",
            paper="arXiv:2504.02546",
            advantage="gpg",
            loss="reinforce",
            aggregation="token_mean",
            correction="tis_token",
        ),
        Row(
            name="topr",
            paper="arXiv:2503.14286",
            advantage="reinforce",
            loss="topr",
            aggregation="seq_mean_token_sum",
            correction="none",
        ),
        Row(
            name="sapo",
            paper="arXiv:2511.20347",
            advantage="grpo",
            loss="sapo",
            aggregation="seq_mean_token_mean",
            correction="tis_token",
        ),
        Row(
            name="m2po",
            paper="arXiv:2510.01161",
            advantage="grpo",
            loss="m2po",
            aggregation="token_mean",
            correction="tis_token",
        ),
        Row(
            name="ppo",
            paper="arXiv:1707.06347, the advantages of arXiv:1506.02438 whitened over the batch",
            advantage="gae",
            loss="ppo_clip",
            aggregation="token_mean",
            correction="tis_token",
        ),
        Row(
            name="opd",
            paper="on-policy distillation, the reverse KL to the teacher as a reward per token (tinker, 2025)",
            advantage="none",
            loss="opd_reward",
            aggregation="token_mean",
            correction="tis_token",
        ),
        Row(
            name="p3o",
            paper="arXiv:2605.12380",
            advantage="grpo",
            loss="p3o",
            aggregation="token_mean",
            correction="none",
        ),
        Row(
            name="sft",
            paper="maximum likelihood of the responses, whatever their reward",
            advantage="reinforce",
            loss="sft",
            aggregation="token_mean",
            correction="none",
        ),
    )
}
