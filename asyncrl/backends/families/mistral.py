"""Mistral: the layers of Llama. Its first model, whose attention has a window, is refused."""

from asyncrl.backends.families.family import DENSE_ONLY, Family, decoder_shape

FAMILY = Family(
    architecture="MistralForCausalLM",
    models="Mistral 7B from v0.2, Nemo, Small 24B (text)",
    shape=decoder_shape,
    only={**DENSE_ONLY, "sliding_window": (None,)},
)
