"""Prompt groups: the table of what became of each, which train next, and what a checkpoint keeps of them."""
