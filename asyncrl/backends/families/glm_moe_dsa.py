"""GLM-5: GLM-4.7-Flash whose queries see the tokens that an indexer chooses, as in DeepSeek-V3.2.

In GLM-5.2 some layers use the choice of a layer before them. Up to index_topk tokens, the model's context here,
training is exact.
"""

from asyncrl.backends.families import deepseek_v32
from asyncrl.backends.families.family import SIGMOID_ONLY, Family

FAMILY = Family(
    architecture="GlmMoeDsaForCausalLM",
    models="GLM-5, GLM-5.1, GLM-5.2",
    shape=deepseek_v32.shape,
    only=SIGMOID_ONLY,
)
