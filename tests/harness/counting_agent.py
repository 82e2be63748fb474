"""An agent without any asyncrl code: it asks the model to count on, over HTTP. The run's reward judges the answer."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_THREADS = ThreadPoolExecutor(64)
"""A thread each for as many samples as run at once: an engine with a full batch takes a fraction of the CPU time."""


async def play(task: Any, endpoint: Any) -> dict[str, Any]:
    """The harness: rollout.options.harness = "tests.harness.counting_agent:play"."""
    body = json.dumps({"model": endpoint.model, "messages": [{"role": "user", "content": task.prompt}]}).encode()
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(endpoint.base_url + "/v1/chat/completions", data=body, headers=headers)
    await asyncio.get_running_loop().run_in_executor(_THREADS, _answer, request)
    return {}


def _answer(request: urllib.request.Request) -> None:
    with urllib.request.urlopen(request) as reply:
        json.load(reply)
