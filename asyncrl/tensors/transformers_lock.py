"""A lock to load one transformers model at a time: loading changes the library's state for all threads of the process.

Two loads at once can leave that state changed for good; from then on no embedding is tied to its output layer
(test_models_loaded_at_once_keep_their_tied_weights).
"""

from __future__ import annotations

import threading
from typing import Final

LOADING: Final = threading.Lock()
"""Held while from_pretrained of transformers runs."""
