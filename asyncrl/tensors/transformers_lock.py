"""One model at a time: transformers changes itself while it loads one, for every thread of the process.

Two at once can leave it changed for good: from then on no embedding is tied to its output layer
(test_models_loaded_at_once_keep_their_tied_weights).
"""

from __future__ import annotations

import threading
from typing import Final

LOADING: Final = threading.Lock()
"""Held while transformers' from_pretrained runs."""
