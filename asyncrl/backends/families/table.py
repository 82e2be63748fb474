"""All families by architecture."""

from __future__ import annotations

from types import ModuleType
from typing import Final

from asyncrl.backends.families import (
    deepseek_v3,
    deepseek_v32,
    gemma3,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    gpt_oss,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_5_moe_vl,
    qwen3_5_vl,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    qwen3_vl_moe,
)
from asyncrl.backends.families.family import Family

MODULES: Final[tuple[ModuleType, ...]] = (
    qwen2,
    qwen3,
    llama,
    mistral,
    glm4,
    gemma3,
    mixtral,
    qwen2_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_5,
    qwen3_5_moe,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    deepseek_v3,
    deepseek_v32,
    minimax_m2,
    gpt_oss,
    qwen2_5_vl,
    qwen3_vl,
    qwen3_vl_moe,
    qwen3_5_vl,
    qwen3_5_moe_vl,
)

FAMILIES: Final[dict[str, Family]] = {module.FAMILY.architecture: module.FAMILY for module in MODULES}
