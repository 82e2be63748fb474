"""The experts to which the engine routed each token of a mixture-of-experts model. The learner routes the token to the
same experts (routing replay, arXiv:2510.11370).

experts  uint8 or uint16 [R, layers, experts per token]: of the last R tokens of a text, in all layers.
         The largest number of the type, ``unrouted``, marks a token that was not routed; the learner's router chooses
         its experts. An engine has not routed the last token that it sampled.

Tests: tests/unit/messages/test_consistency.py.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import MessageError
from asyncrl.messages.validation import require

ExpertArray: TypeAlias = NDArray[Any]

NO_EXPERTS: Final[NDArray[np.uint8]] = np.zeros((0, 0, 0), np.uint8)


def dtype_for(num_experts: int) -> np.dtype[Any]:
    """Return the smallest type that holds the numbers of all experts and ``unrouted``."""
    return np.dtype(np.uint8 if num_experts < 256 else np.uint16)


def unrouted(experts: NDArray[Any]) -> int:
    """Value that marks unrouted tokens in such an array."""
    return int(np.iinfo(experts.dtype).max)


def unrouted_rows(count: int, *, like: NDArray[Any]) -> NDArray[Any]:
    """Return rows for ``count`` unrouted tokens."""
    return np.full((count, *like.shape[1:]), unrouted(like), like.dtype)


def join(before: NDArray[Any], rest: NDArray[Any], num_tokens: int) -> NDArray[Any]:
    """Join the experts of a text and of its continuation.

    before      experts of the last tokens of the text
    rest        experts of the last tokens of the whole, as reported by the engine that continued; may include some
                tokens of the text
    num_tokens  length of the continuation

    A token keeps the experts with which its successor was sampled, so the text's last token takes them from ``rest``.
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


def keep_last(experts: NDArray[Any], count: int) -> NDArray[Any]:
    """Return the experts of the last ``count`` tokens, or of fewer if there are fewer."""
    return experts[max(0, len(experts) - count) :]


def check_experts(experts: NDArray[Any], *, num_tokens: int) -> None:
    """Raise MessageError unless ``experts`` is empty or has a row for at least ``num_tokens`` tokens."""
    if experts.ndim != 3 or experts.dtype not in (np.uint8, np.uint16):  # formats the error only if there is one
        raise MessageError(
            f"experts must have three dimensions of uint8 or uint16, has {experts.ndim} of {experts.dtype}"
        )
    require(
        len(experts) == 0 or len(experts) >= num_tokens,
        f"experts has {len(experts)} rows for {num_tokens} tokens",
    )
