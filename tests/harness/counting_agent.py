"""An agent without any asyncrl code: it asks the model to count on, over HTTP. The run's reward judges the answer."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def play(task: Any, endpoint: Any) -> dict[str, Any]:
    """The harness: rollout.options.harness = "tests.harness.counting_agent:play"."""
    body = json.dumps({"model": endpoint.model, "messages": [{"role": "user", "content": task.prompt}]}).encode()
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(endpoint.base_url + "/v1/chat/completions", data=body, headers=headers)
    with urllib.request.urlopen(request) as reply:
        json.load(reply)
    return {}
