"""The installed version of asyncrl."""

from typing import Final

VERSION: Final = "0.1.0"
