"""An agent that searches a local index and then answers, as in Search-R1 (arXiv:2503.09516).

    python -m examples.agents.search runs/search     # a tiny model, and questions about the corpus below

A turn that begins with "?" is a query, and the model gets the best document. Any other turn is the answer. An answer
counts only after a search that found the right document, so memorizing the corpus earns nothing.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.agents.chat import Chat, write

ISLANDS = "BCDFGJKL"
COUNTS = "01234567"
CORPUS = [f"Island {name} has {COUNTS[5 * place % 8]} lamps." for place, name in enumerate(ISLANDS)]
SYSTEM = "to look something up, write ? and a name; then answer with the number alone."
MOST_TURNS = 2


class Index:
    """BM25 (Robertson and Zaragoza 2009) over words, in memory."""

    def __init__(self, documents: Sequence[str], *, k1: float = 1.2, b: float = 0.75) -> None:
        self._documents, self._k1, self._b = documents, k1, b
        self._words = [Counter(_words(document)) for document in documents]
        self._holders = Counter(word for words in self._words for word in words)
        self._mean_length = sum(map(Counter.total, self._words)) / len(documents)

    def best(self, query: str) -> str:
        """Return the document that fits best, "" if none has a word of the query."""
        score, place = max((self._score(query, words), -place) for place, words in enumerate(self._words))
        return self._documents[-place] if score > 0 else ""

    def _score(self, query: str, words: Counter[str]) -> float:
        norm = self._k1 * (1 - self._b + self._b * words.total() / self._mean_length)
        return sum(self._rarity(word) * words[word] * (self._k1 + 1) / (words[word] + norm) for word in _words(query))

    def _rarity(self, word: str) -> float:
        holders = self._holders[word]
        return math.log(1 + (len(self._documents) - holders + 0.5) / (holders + 0.5))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


INDEX = Index(CORPUS)


def play(task: Any, endpoint: Any) -> dict[str, Any]:
    """The harness: rollout.options.harness = "examples.agents.search:play"."""
    chat = Chat(endpoint, system=SYSTEM, max_tokens=2)
    parts = {"searched": 0.0, "found": 0.0, "right": 0.0}
    said = chat.ask(task.prompt)
    for _ in range(MOST_TURNS - 1):
        if not said.startswith("?"):
            break
        document = INDEX.best(said)
        if document:
            parts["searched"] = 0.1
        if document == task.metadata["document"]:
            parts["found"] = 0.4
        said = chat.ask(document or "nothing was found", role="tool")
    if parts["found"] and said.strip() == task.label:
        parts["right"] = 0.5
    return {"reward": sum(parts.values()), "reward_parts": parts}


def rows() -> Iterator[dict[str, Any]]:
    for name, document in zip(ISLANDS, CORPUS, strict=True):
        label = document.split()[3]
        yield {"prompt": f"How many lamps has island {name}", "label": label, "metadata": {"document": document}}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.agents.search FOLDER")
    write(Path(sys.argv[1]), rows(), characters=ISLANDS + COUNTS + "?")
