"""An agent that searches documents and then answers, as in Search-R1 (arXiv:2503.09516).

    python -m examples.agents.search runs/search [--tiny]     # questions about the chemical elements

The model writes <search>words</search>, as often as it needs, and gets the documents that fit best; then it writes
<answer>...</answer>. An answer counts only if the documents that it needs were shown, so knowing the elements by heart
earns nothing. Another corpus is a file of rows {"title", "text"}, named by SEARCH_CORPUS; a row's metadata names the
titles that its answer needs.
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.agents.chat import Chat, write

CORPUS = Path(os.environ.get("SEARCH_CORPUS", Path(__file__).parent / "elements.jsonl"))
MOST_TOKENS = int(os.environ.get("MOST_TOKENS", "512"))
"""Longest turn of the model."""
MOST_DOCUMENTS = 3
MOST_TURNS = 4
SYSTEM = (
    "Answer from the documents of a search engine, not from memory. Write <search>words</search> to see the documents "
    "that fit best, as often as you need. Then write <answer>the answer</answer>, in as few words as possible."
)
TINY = ("Iron", "Copper", "Zinc", "Silver", "Tin", "Iodine", "Gold", "Lead")
"""The elements that the tiny model is asked about. It searches among all."""


class Index:
    """BM25 (Robertson and Zaragoza 2009) over words, in memory."""

    def __init__(self, documents: Sequence[str], *, k1: float = 1.2, b: float = 0.75) -> None:
        self._k1, self._b = k1, b
        self._lengths: list[int] = []
        self._holders: dict[str, list[tuple[int, int]]] = defaultdict(list)  # word -> (document, count)
        for place, document in enumerate(documents):
            words = Counter(_words(document))
            self._lengths.append(words.total())
            for word, count in words.items():
                self._holders[word].append((place, count))
        self._mean_length = sum(self._lengths) / len(self._lengths)

    def best(self, query: str, *, count: int) -> list[int]:
        """Return the places of at most ``count`` documents that have a word of the query, the best first."""
        scores: Counter[int] = Counter()
        for word in _words(query):
            holders = self._holders.get(word, ())
            rarity = math.log(1 + (len(self._lengths) - len(holders) + 0.5) / (len(holders) + 0.5))
            for place, found in holders:
                norm = self._k1 * (1 - self._b + self._b * self._lengths[place] / self._mean_length)
                scores[place] += rarity * found * (self._k1 + 1) / (found + norm)
        return sorted(scores, key=lambda place: (-scores[place], place))[:count]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@functools.cache
def corpus() -> list[dict[str, Any]]:
    return [json.loads(line) for line in CORPUS.read_text().splitlines()]


@functools.cache
def index() -> Index:
    return Index([f"{document['title']} {document['text']}" for document in corpus()])


def written(tag: str, said: str) -> str | None:
    """Return what the model wrote between <tag> and </tag>, the last if there are several; None if there is none."""
    found = re.findall(f"<{tag}>(.*?)</{tag}>", said, re.DOTALL)
    return str(found[-1]).strip() if found else None


def play(task: Any, endpoint: Any) -> dict[str, Any]:
    """The harness: rollout.options.harness = "examples.agents.search:play"."""
    chat = Chat(endpoint, system=SYSTEM, max_tokens=MOST_TOKENS)
    parts = {"searched": 0.0, "found": 0.0, "right": 0.0}
    shown: set[str] = set()
    said, role = task.prompt, "user"
    for _ in range(MOST_TURNS):
        turn = chat.ask(said, role=role)
        if (answer := written("answer", turn)) is not None:
            if parts["found"] and answer.lower() == task.label.lower():
                parts["right"] = 0.5
            break
        query = written("search", turn)
        if query is None:
            said, role = "Write <search>words</search> or <answer>the answer</answer>.", "user"
            continue
        documents = [corpus()[place] for place in index().best(query, count=MOST_DOCUMENTS)]
        shown.update(document["title"] for document in documents)
        if documents:
            parts["searched"] = 0.1
        if shown.issuperset(task.metadata["titles"]):
            parts["found"] = 0.4
        said = "\n".join(f"{document['title']}: {document['text']}" for document in documents) or "nothing was found"
        role = "tool"
    return {"reward": sum(parts.values()), "reward_parts": parts}


def rows(*, count: int = 512, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield questions that need one document or two."""
    draw = random.Random(seed)
    for _ in range(count):
        place = draw.randrange(len(corpus()) - 1)
        one, following = corpus()[place : place + 2]
        number, symbol = one["number"], one["symbol"]
        prompt, label, titles = draw.choice(
            [
                (f"What is the atomic number of {one['title']}?", number, [one]),
                (f"Which element has the symbol {symbol}?", one["title"], [one]),
                (f"What is the symbol of the element with atomic number {number}?", symbol, [one]),
                (
                    f"The atomic number of which element is one more than that of {one['title']}?",
                    following["title"],
                    [one, following],
                ),
            ]
        )
        yield {"prompt": prompt, "label": str(label), "metadata": {"titles": [need["title"] for need in titles]}}


def tiny_rows() -> Iterator[dict[str, Any]]:
    for name in TINY:
        prompt = f"What is the atomic number of {name}?"
        yield {"prompt": prompt, "label": numbers()[name], "metadata": {"titles": [name]}}


def numbers() -> dict[str, str]:
    return {document["title"]: str(document["number"]) for document in corpus() if document["title"] in TINY}


def phrases() -> list[str]:
    said = [f"<search>{name}</search>" for name in TINY] + [
        f"<answer>{number}</answer>" for number in numbers().values()
    ]
    return [*TINY, *numbers().values(), *said]


if __name__ == "__main__":
    write("search", real=rows(), tiny=tiny_rows(), phrases=phrases())
