"""Made-up rows of prompts."""

from __future__ import annotations

import numpy as np

from asyncrl.data.prompts import PromptRow


class Rows:
    """``count`` prompts, repeated forever or once; ``overlong`` positions exceed the limit."""

    def __init__(self, count: int = 5, *, epochs: int = 0, overlong: frozenset[int] = frozenset()) -> None:
        self._count, self._epochs, self._overlong = count, epochs, overlong

    def at(self, position: int) -> PromptRow | None:
        epoch, index = divmod(position, self._count)
        if self._epochs and epoch >= self._epochs:
            return None
        tokens = np.zeros(0, np.int32) if position in self._overlong else np.array([1, 4 + index], np.int32)
        response = np.array([4 + index, 5, 3], np.int32)
        return PromptRow(tokens=tokens, prompt=f"p{index}", label=index, metadata={}, epoch=epoch, response=response)
