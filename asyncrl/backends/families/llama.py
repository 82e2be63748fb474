"""Llama: the plain decoder."""

from asyncrl.backends.families.family import DENSE_ONLY, Family, decoder_shape

FAMILY = Family(
    architecture="LlamaForCausalLM",
    models="Llama 2, Llama 3 to 3.3, and others of that architecture",
    shape=decoder_shape,
    only=DENSE_ONLY,
)
