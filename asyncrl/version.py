"""The installed version of asyncrl, and the number of its formats."""

from typing import Final

VERSION: Final = "0.1.0"

SCHEMA: Final = 1
"""Number of everything that is sent or written to be read again: messages and checkpoints. Raise it when a reader of
the old number would misread the new form. Another number is refused in one line; nothing is translated."""
