"""Imports from other formats: GGUF files, quantized folders, and the evaluation files of slime and Miles."""
