"""The version of asyncrl that is installed."""

from typing import Final

VERSION: Final = "0.1.0"
