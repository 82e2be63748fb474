"""An agent that answers about the prompt's image, is shown another one, and answers again. It knows no asyncrl."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.request
from pathlib import Path
from typing import Any


async def play(task: Any, endpoint: Any) -> dict[str, Any]:
    return await asyncio.to_thread(_play, task, endpoint)


def _play(task: Any, endpoint: Any) -> dict[str, Any]:
    messages = list(task.messages)
    first = _ask(endpoint, messages)
    shown = base64.b64encode(Path(task.metadata["next"]).read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{shown}"}}
    messages += [first, {"role": "user", "content": [image, {"type": "text", "text": "now"}]}]
    return {"reward": float(len(_ask(endpoint, messages)["content"]) % 2)}


def _ask(endpoint: Any, messages: list[Any]) -> dict[str, Any]:
    body = {"model": endpoint.model, "messages": messages, "max_tokens": 2}
    request = urllib.request.Request(
        f"{endpoint.base_url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return {"role": "assistant", "content": message["content"]}
