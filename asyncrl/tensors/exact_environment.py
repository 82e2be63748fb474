"""What SGLang's kernels read in a server, and in a learner whose logprobs are to be that server's (run.exact)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

TILE: Final = 256
"""Keys of a decoded token that are summed at once."""

EXACT_ENVIRONMENT: Final[Mapping[str, str]] = {
    "SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE": str(TILE),
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM": "0",  # its kernels depend on the number of rows
}
