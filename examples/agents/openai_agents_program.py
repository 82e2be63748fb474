"""An unchanged program of the OpenAI Agents SDK without any training code; OPENAI_BASE_URL names its model server.

A clerk is asked how many lamps an island has, and looks the number up with a tool. The program's last line of output is
the reward.
"""

from __future__ import annotations

import json
import os
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

LAMPS = {"Koro": 7, "Mava": 3, "Tilo": 5}


@function_tool
def look_up(island: str) -> str:
    """How many lamps an island has."""
    return str(LAMPS.get(island, "there is no such island"))


def main() -> None:
    task = json.loads(sys.stdin.readline())
    set_tracing_disabled(True)
    set_default_openai_api("chat_completions")
    clerk = Agent(
        name="clerk", instructions="Look it up, then answer.", tools=[look_up], model=os.environ["OPENAI_MODEL"]
    )
    answer = str(Runner.run_sync(clerk, task["prompt"], max_turns=4).final_output)
    print(json.dumps({"reward": float(str(task["label"]) in answer)}))


if __name__ == "__main__":
    main()
