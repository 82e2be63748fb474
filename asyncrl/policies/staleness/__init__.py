"""Staleness control: admission, the order and bound of the buffer, age weights."""
