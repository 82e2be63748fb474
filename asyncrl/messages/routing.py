"""Which experts of a mixture the engine sent each token to, so that the learner sends it to the same (routing replay,
arXiv:2510.11370).

experts  uint8 or uint16 [R, layers, experts per token]: of the last R tokens of a text, in all layers.
         The largest number of the type, ``unrouted``, stands where nobody chose: there the learner's router does. An
         engine has not routed the last token that it sampled.

Tests: tests/unit/messages/test_routing.py.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages.validation import require

ExpertArray: TypeAlias = NDArray[Any]

NO_EXPERTS: Final[NDArray[np.uint8]] = np.zeros((0, 0, 0), np.uint8)


def dtype_for(num_experts: int) -> np.dtype[Any]:
    """The smaller type that holds the numbers of all experts and ``unrouted``."""
    return np.dtype(np.uint8 if num_experts < 256 else np.uint16)


def unrouted(experts: NDArray[Any]) -> int:
    """What stands in such an array where nobody chose."""
    return int(np.iinfo(experts.dtype).max)


def unrouted_rows(count: int, *, like: NDArray[Any]) -> NDArray[Any]:
    """``count`` more tokens that nobody routed."""
    return np.full((count, *like.shape[1:]), unrouted(like), like.dtype)


def joined(before: NDArray[Any], rest: NDArray[Any], num_tokens: int) -> NDArray[Any]:
    """Experts of a text and of what continues it.

    before      of the last tokens of the text
    rest        of the last tokens of the whole, as the engine that continued says; it may know some of the text's
    num_tokens  by which the whole is longer than the text

    A token keeps the experts with which its successor was sampled, so the text's last one has those of ``rest``.
    """
    if not len(before):
        return rest
    if not len(rest):
        return np.concatenate([before, unrouted_rows(num_tokens, like=before)])
    rows = max(len(before) + num_tokens, len(rest))
    known = np.concatenate(
        [
            unrouted_rows(rows - len(before) - num_tokens, like=before),
            before[:-1],
            unrouted_rows(num_tokens + 1, like=before),
        ]
    )
    told = np.concatenate([unrouted_rows(rows - len(rest), like=rest), rest])
    return np.where(known[..., :1] != unrouted(known), known, told)


def last(experts: NDArray[Any], count: int) -> NDArray[Any]:
    """Of the last ``count`` tokens, or of as many as there are."""
    return experts[max(0, len(experts) - count) :]


def check_experts(experts: NDArray[Any], *, num_tokens: int) -> None:
    """Raises MessageError unless there are none, or experts of ``num_tokens`` tokens or more."""
    require(
        experts.ndim == 3 and experts.dtype in (np.uint8, np.uint16),
        f"experts must have three dimensions of uint8 or uint16, has {experts.ndim} of {experts.dtype}",
    )
    require(
        len(experts) == 0 or len(experts) >= num_tokens,
        f"experts has {len(experts)} rows for {num_tokens} tokens",
    )
