"""Staleness control: admission, the buffer's order and bound, age weights."""
