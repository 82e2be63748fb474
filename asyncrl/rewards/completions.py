"""Decode what a rollout's model wrote, for rewards: with the special tokens that mean something to its reader.

A special <think> or <|channel|> separates the thought from the answer, so what the model sampled keeps such marks. Left
out are tokens that only end an answer, and the special tokens around an environment's text.
(tests/unit/rewards/test_completions.py)
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from asyncrl.messages import Trajectory
from asyncrl.rewards.answers import ends_thinking

_ROLES: Final = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")


class CompletionReader:
    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: of Hugging Face; one without added tokens has no special ones to keep"""
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {int(token): str(text) for token, text in added.items() if text.special}
        self._ids = np.array(sorted(self._special), np.int32)
        roles = {getattr(tokenizer, f"{role}_token_id", None) for role in _ROLES}
        self._meaningful = np.array(sorted(self._special.keys() - roles), np.int32)

    def read(self, trajectory: Trajectory) -> tuple[str, str]:
        """Return the text with the special tokens that the model sampled, and the text without any."""
        plain = str(self._tokenizer.decode(trajectory.tokens, skip_special_tokens=True))
        is_kept = trajectory.response_mask & np.isin(trajectory.tokens, self._meaningful)
        if is_kept[-1] and trajectory.finish_reason == "stop":
            last = self._special[int(trajectory.tokens[-1])]
            is_kept[-1] = "/" in last or ends_thinking(last)  # as </answer> in rollout.stop_token_ids
        if not is_kept.any():
            return plain, plain
        tokens = trajectory.tokens[is_kept | ~np.isin(trajectory.tokens, self._ids)]
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False)), plain
