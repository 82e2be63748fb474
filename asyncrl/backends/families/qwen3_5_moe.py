"""Qwen3.5's mixtures of experts (text): Qwen3.5 with the experts of Qwen3-Next in every layer.

Published models are a Qwen3_5MoeForConditionalGeneration, which trains as it is; see Qwen3.5.
"""

from asyncrl.backends.families import qwen3_5, qwen3_next
from asyncrl.backends.families.family import Family

FAMILY = Family(
    architecture="Qwen3_5MoeForCausalLM",
    models="Qwen3.5-35B-A3B, 122B-A10B and 397B-A17B (text)",
    shape=qwen3_next.shape,
    only={**qwen3_5.FAMILY.only, "norm_topk_prob": (True,)},
    layer=qwen3_5.layer,
)
