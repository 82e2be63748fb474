"""Shared by the agents of this folder: a conversation with a model server, and the files that their runs start from.

Only ``write``, which makes a tiny model, uses asyncrl. Any client of OpenAI's API can replace ``Chat``.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Chat:
    """One conversation.

    max_tokens   longest answer of the model; None leaves the limit to the server
    """

    def __init__(self, endpoint: Any, *, system: str = "", max_tokens: int | None = None) -> None:
        self._endpoint, self._max_tokens = endpoint, max_tokens
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.ids: list[str] = []
        """Ids of the model's answers, by which they may be given rewards."""

    def ask(self, said: str, *, role: str = "user") -> str:
        """Return the model's answer."""
        self.messages.append({"role": role, "content": said})
        body: dict[str, Any] = {"model": self._endpoint.model, "messages": self.messages}
        if self._max_tokens is not None:
            body["max_tokens"] = self._max_tokens
        request = urllib.request.Request(
            self._endpoint.base_url + "/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._endpoint.api_key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as reply:
            completion = json.load(reply)
        answer = completion["choices"][0]["message"]["content"]
        self.ids.append(completion["id"])
        self.messages.append({"role": "assistant", "content": answer})
        return str(answer)


def write(folder: Path, rows: Iterable[dict[str, Any]], *, characters: str) -> None:
    """Write ``folder``/prompts.jsonl, and ``folder``/model with random weights and a token for each of ``characters``.

    The tokenizer skips characters without a token: the model reads "Island K has 5 lamps." as "K5".
    """
    from asyncrl.data.tiny_model import make_tiny_model  # torch: the agents import this file without it

    make_tiny_model(folder / "model", characters=characters, max_positions=128, initializer_range=0.05)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
