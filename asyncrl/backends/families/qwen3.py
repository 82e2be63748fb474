"""Qwen3: every query and key head is normalised."""

from asyncrl.backends.families.family import DENSE_ONLY, Family, decoder_shape

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    models="Qwen3 0.6B to 32B",
    shape=lambda config: decoder_shape(config, has_qk_norm=True),
    only=DENSE_ONLY,
)
