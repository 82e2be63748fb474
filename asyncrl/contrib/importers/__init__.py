"""Imports from other formats: evaluation files of slime, GGUF files, quantized folders, Megatron checkpoints."""
