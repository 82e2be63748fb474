"""The families, by architecture."""

from __future__ import annotations

from typing import Final

from asyncrl.backends.families import deepseek_v3, glm4_moe, llama, qwen2, qwen3, qwen3_moe
from asyncrl.backends.families.family import Family

FAMILIES: Final[dict[str, Family]] = {
    module.FAMILY.architecture: module.FAMILY for module in (qwen2, qwen3, llama, qwen3_moe, glm4_moe, deepseek_v3)
}
