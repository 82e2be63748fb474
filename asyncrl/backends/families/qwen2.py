"""Qwen2: queries, keys and values have biases."""

from asyncrl.backends.families.family import DENSE_ONLY, Family, decoder_shape

FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    models="Qwen2, Qwen2.5, and MiMo-7B, which `asyncrl import-model` writes as a Qwen2",
    shape=lambda config: decoder_shape(config, has_qkv_bias=True),
    only=DENSE_ONLY,
)
