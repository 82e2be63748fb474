"""GLM-5: GLM-4.7-Flash whose queries see the tokens that an indexer chooses, as in DeepSeek-V3.2.

The indexer's rotation is that of indexer_rope_interleave, which SGLang reads too. From GLM-5.2 on some layers use the
choice of a layer before them; both must be on the same pipeline stage.
"""

from asyncrl.backends.families import deepseek_v32
from asyncrl.backends.families.family import SIGMOID_ONLY, Family

FAMILY = Family(
    architecture="GlmMoeDsaForCausalLM",
    models="GLM-5, GLM-5.1, GLM-5.2, GLM-5.3",
    shape=deepseek_v32.shape,
    only={**SIGMOID_ONLY, **deepseek_v32.CHOICE},
)
