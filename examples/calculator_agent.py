"""An agent that uses a calculator, as a program that knows nothing of asyncrl: it speaks to a model server.

The task is that of examples/calculator.py: ask the calculator for the digit after the prompt's last one, then repeat
what it says. Any client of OpenAI's API could be used; this one needs nothing but Python.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

DIGITS = "01234567"


def play(task: Any, endpoint: Any) -> dict[str, Any]:
    """A harness of the user's: rollout.options.harness = "examples.calculator_agent:play"."""
    messages = [{"role": "user", "content": task.prompt}]
    question = ask(endpoint, messages)
    result = DIGITS[(int(question) + 1) % 8] if question in tuple(DIGITS) else ""
    messages += [{"role": "assistant", "content": question}, {"role": "tool", "content": result}]
    answer = ask(endpoint, messages)
    right = task.label[0]
    parts = {"asked": 0.5 * (result == right), "answered": 0.5 * (answer == right)}
    return {"reward": sum(parts.values()), "reward_parts": parts}


def ask(endpoint: Any, messages: list[dict[str, str]]) -> str:
    """One token of the model's."""
    body = json.dumps({"model": endpoint.model, "messages": messages, "max_tokens": 1}).encode()
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(endpoint.base_url + "/v1/chat/completions", data=body, headers=headers)
    with urllib.request.urlopen(request) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])
