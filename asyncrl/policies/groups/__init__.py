"""Prompt groups: the table of their states, the choice of what to train next, and what a checkpoint keeps of them."""
