"""A clerk who serves a simulated customer: tau-bench (arXiv:2406.12045). Tasks, tools and reward are the package's own.

The clerk, which is trained, talks to a customer and changes a database with tools. The reward is 1 if the database is
in the end as the task's own actions leave it, and the customer was told what the task wants told; else 0. The customer
is played by a server of the run file, [servers.user], by the prompt of the package. rollout.options.harness is
"examples.agents.tau:Clerk"; only the package and this folder are needed in its virtual environment.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from examples.agents.chat import Chat

RESPOND = "respond"
"""tau-bench's name for what the clerk says to the customer, in place of a tool's."""
CUSTOMER_SECONDS = 300.0
"""A customer's message that takes longer is a time-out."""


@dataclass(frozen=True, kw_only=True)
class Options:
    domain: str = "retail"
    """retail, or airline."""
    split: str = "train"
    """Of retail: train (500 tasks), dev or test (115). airline has test alone (50)."""
    most_turns: int = 30
    """Messages of the clerk."""
    most_tokens: int = 1024
    """Longest message of the clerk."""


class Clerk:
    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, task: Any, endpoint: Any) -> dict[str, Any]:
        from tau_bench.envs import get_env
        from tau_bench.types import Action

        number, options = task.metadata["task"], self._options
        env = get_env(options.domain, user_strategy="human", user_model="", task_split=options.split, task_index=number)
        env.user = customer(task.servers["user"], seed=task.seed)
        chat = Chat(endpoint, system=env.wiki, tools=env.tools_info, max_tokens=options.most_tokens)
        said = env.reset(task_index=number).observation
        return serve(chat, said, act=lambda name, kwargs: env.step(Action(name=name, kwargs=kwargs)), options=options)


def serve(chat: Any, said: str, *, act: Callable[[str, dict[str, Any]], Any], options: Options) -> dict[str, Any]:
    """Let the clerk answer the customer, who has ``said`` something, until the conversation is over.

    act  an action by name and arguments, as the step of tau-bench's Env
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": said}]
    for turn in range(options.most_turns):
        message = chat.send(*messages)
        if message is None:
            break
        messages = []
        for name, arguments, reply in actions(message):
            if arguments is None:
                messages.append({**reply, "content": "Error: no such tool, or its arguments are not a JSON object"})
                continue
            response = act(name, arguments)
            if response.done:
                return {"reward": float(response.reward), "metrics": {"turns": turn + 1.0}}
            messages.append({**reply, "content": response.observation})
    return {"reward": 0.0, "finish_reason": "length"}


def actions(message: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any] | None, dict[str, Any]]]:
    """Yield name and arguments of what a message of the clerk does, and the message that answers it, yet empty.

    The arguments are None if they are not a JSON object, or the tool is RESPOND, which is none.
    """
    if not (calls := message.get("tool_calls")):
        yield RESPOND, {"content": message["content"] or ""}, {"role": "user"}
        return
    for call in calls:
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            arguments = None
        name, reply = call["function"]["name"], {"role": "tool", "tool_call_id": call["id"]}
        yield name, arguments if isinstance(arguments, dict) and name != RESPOND else None, reply


def customer(server: Mapping[str, str], *, seed: int) -> Any:
    """Return tau-bench's simulated customer, who is played by a server of OpenAI's protocol."""
    from tau_bench.envs.user import LLMUserSimulationEnv

    class Customer(LLMUserSimulationEnv):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:  # the base class asks litellm at once
            self.messages: list[dict[str, Any]] = []
            self.total_cost = 0.0

        def generate_next_message(self, messages: list[dict[str, Any]]) -> str:
            said = ask(server, messages, seed=seed)
            self.messages.append({"role": "assistant", "content": said})
            return said

    return Customer()


def ask(server: Mapping[str, str], messages: list[dict[str, Any]], *, seed: int) -> str:
    """Return the next message of the server's model. If the server is away or hangs, the sample runs again later."""
    request = urllib.request.Request(
        server["url"].rstrip("/") + "/chat/completions",
        data=json.dumps({"model": server["model"], "messages": messages, "seed": seed % 2**31}).encode(),
        headers={"Authorization": f"Bearer {server['key']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=CUSTOMER_SECONDS) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])
