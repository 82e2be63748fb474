"""Policy losses per token, before aggregation. Minimised.

Shapes: the M response tokens of a micro-batch, end to end; prompt and observation tokens are left out. Every function
takes ``logprobs`` f32[M] of the policy being trained, the only input that gradients flow through, and the advantages
f32[M]; most take the logprobs of an anchor. It returns the loss f32[M] and ``clipped`` bool[M]: where the rule, not the
advantage, holds the gradient back (an active clip, a cap, a mask). Numpy arrays are taken at the edge, float64 stays
float64, log ratios are clamped to +-20 before exp. ``sg`` in formulas is stop-gradient.

    weighted.py      reinforce, cispo, aipo, topr, p3o, sft: a detached weight times -A logprob
    trust_region.py  ppo_clip, coupled_ppo, decoupled_ppo, gspo, aspo, sapo, dppo, m2po: a bound on the ratio

Anchors. *prox logprobs*: the learner at the start of the step, in its own numerics; what it does not cover is left to a
correction. *behavior logprobs*: what sampled; the loss then corrects and bounds in one, and a correction on top would
count the same ratio twice. ``anchor_logprobs``: either, the caller's choice.
"""

from asyncrl.policies.losses.trust_region import (
    aspo,
    coupled_ppo,
    decoupled_ppo,
    dppo,
    gspo,
    m2po,
    m2po_mask,
    ppo_clip,
    sapo,
    sapo_gate,
)
from asyncrl.policies.losses.weighted import aipo, cispo, p3o, reinforce, sft, topr

__all__ = [
    "aipo",
    "aspo",
    "cispo",
    "coupled_ppo",
    "decoupled_ppo",
    "dppo",
    "gspo",
    "m2po",
    "m2po_mask",
    "p3o",
    "ppo_clip",
    "reinforce",
    "sapo",
    "sapo_gate",
    "sft",
    "topr",
]
