"""Shared by the agents of this folder: a conversation with a model server, and the files that their runs start from.

Only ``write --tiny``, which makes a tiny model, uses asyncrl. Any client of OpenAI's API can replace ``Chat``.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


class Chat:
    """One conversation.

    max_tokens   longest answer of the model; None leaves the limit to the server
    tools        that the model may call, in OpenAI's form
    """

    def __init__(
        self, endpoint: Any, *, system: str = "", max_tokens: int | None = None, tools: Sequence[dict[str, Any]] = ()
    ) -> None:
        self._endpoint, self._max_tokens, self._tools = endpoint, max_tokens, list(tools)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.ids: list[str] = []
        """Ids of the model's answers, by which they may be given rewards."""

    def ask(self, said: str, *, role: str = "user") -> str:
        """Return the model's answer; "" if the sample's tokens or the context are used up."""
        message = self.send({"role": role, "content": said})
        return str(message["content"]) if message else ""

    def send(self, *messages: dict[str, Any]) -> dict[str, Any] | None:
        """Return the model's next message, with its tool_calls; None if the sample's tokens or the context are used
        up."""
        self.messages += messages
        body: dict[str, Any] = {"model": self._endpoint.model, "messages": self.messages}
        if self._max_tokens is not None:
            body["max_tokens"] = self._max_tokens
        if self._tools:
            body["tools"] = self._tools
        request = urllib.request.Request(
            self._endpoint.base_url + "/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._endpoint.api_key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request) as reply:
                completion = json.load(reply)
        except urllib.error.HTTPError as error:
            if error.code == 400 and json.load(error)["error"]["code"] == "context_length_exceeded":
                return None
            raise
        message: dict[str, Any] = completion["choices"][0]["message"]
        self.ids.append(completion["id"])
        self.messages.append(message)
        return message


def write(name: str, *, real: Iterable[dict[str, Any]], tiny: Iterable[dict[str, Any]], phrases: Sequence[str]) -> None:
    """The command ``python -m examples.agents.NAME FOLDER [--tiny]``: write FOLDER/prompts.jsonl.

    real     rows for models that read and write text
    tiny     rows for FOLDER/model, which --tiny makes: random weights, and ``phrases`` as its whole vocabulary

    The tiny tokenizer skips what is no phrase: its model reads "Iron (symbol Fe) ... number 26." as "Iron", "26", and
    answers in one token, such as "<answer>26</answer>". So it learns on a CPU what a real model does in sentences.
    """
    arguments = sys.argv[1:]
    is_tiny = "--tiny" in arguments
    if len(folders := [one for one in arguments if one != "--tiny"]) != 1 or folders[0].startswith("-"):
        sys.exit(f"usage: python -m examples.agents.{name} FOLDER [--tiny]")
    folder = Path(folders[0])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (tiny if is_tiny else real)))
    if is_tiny:
        from asyncrl.data.tiny_model import make_tiny_model  # torch: the agents import this file without it

        make_tiny_model(folder / "model", characters="", phrases=phrases, max_positions=128, initializer_range=0.05)
