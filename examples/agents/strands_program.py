"""An unchanged program of Strands Agents without any training code; OPENAI_BASE_URL names its model server.

A clerk is asked how many lamps an island has, and looks the number up with a tool. The program's last line of output is
the reward.
"""

from __future__ import annotations

import json
import os
import sys

from strands import Agent, tool
from strands.models.openai import OpenAIModel

LAMPS = {"Koro": 7, "Mava": 3, "Tilo": 5}


@tool
def look_up(island: str) -> str:
    """How many lamps an island has."""
    return str(LAMPS.get(island, "there is no such island"))


def main() -> None:
    task = json.loads(sys.stdin.readline())
    clerk = Agent(
        model=OpenAIModel(model_id=os.environ["OPENAI_MODEL"]),
        system_prompt="Look it up, then answer.",
        tools=[look_up],
        callback_handler=None,
    )
    answer = str(clerk(task["prompt"]))
    print(json.dumps({"reward": float(str(task["label"]) in answer)}))


if __name__ == "__main__":
    main()
