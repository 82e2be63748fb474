"""Imports from other formats: GGUF files, quantized folders, Megatron checkpoints."""
