"""An agent that uses a calculator: a program without any asyncrl code, which calls a model server.

The task is the same as in examples/calculator.py: ask the calculator for the digit after the prompt's last one, then
repeat the result. Any client of OpenAI's API can be used; this one only needs Python.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

DIGITS = "01234567"


def play(task: Any, endpoint: Any) -> dict[str, Any]:
    """The harness: rollout.options.harness = "examples.calculator_agent:play"."""
    messages = [{"role": "user", "content": task.prompt}]
    question = ask(endpoint, messages)
    result = DIGITS[(int(question) + 1) % 8] if question in tuple(DIGITS) else ""
    messages += [{"role": "assistant", "content": question}, {"role": "tool", "content": result}]
    answer = ask(endpoint, messages)
    right = task.label[0]
    parts = {"asked": 0.5 * (result == right), "answered": 0.5 * (answer == right)}
    return {"reward": sum(parts.values()), "reward_parts": parts}


def ask(endpoint: Any, messages: list[dict[str, str]]) -> str:
    """Return one token of the model."""
    body = json.dumps({"model": endpoint.model, "messages": messages, "max_tokens": 1}).encode()
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(endpoint.base_url + "/v1/chat/completions", data=body, headers=headers)
    with urllib.request.urlopen(request) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])
