"""Two agents that play against each other; each is trained on its own result.

    python -m examples.agents.game runs/game [--tiny]     # heaps to start from

The game is Nim: the players take one, two or three stones from a heap in turn, and the player who takes the last one
wins. One rollout is one game. Each player has its own conversation, so the rollout has two parts, which are trained
separately. A player's result is the reward of its last turn (turn_rewards). The reward of the rollout is 0, because one
player wins what the other loses.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from typing import Any

from examples.agents.chat import Chat, write

MOST_TAKEN = 3
MOST_TOKENS = int(os.environ.get("MOST_TOKENS", "512"))
"""Longest turn of the model."""
TINY = 9
"""Largest heap of the tiny model's games."""
SYSTEM = (
    "You play Nim. You and your opponent take one, two or three stones from a heap in turn; who takes the last stone "
    'wins. Think, and end with your move: "take" and the number.'
)


def find_move(said: str) -> int:
    """Return the last move that a player names; 0 if it names none."""
    found = re.findall(r"take (\d+)", said.lower())
    return int(found[-1]) if found else 0


def play(task: Any, endpoint: Any) -> dict[str, Any]:
    """The harness: rollout.options.harness = "examples.agents.game:play"."""
    heap = int(task.metadata["heap"])
    players = tuple(Chat(endpoint, system=SYSTEM, max_tokens=MOST_TOKENS) for _ in range(2))
    mover, turns = 0, 0
    chances, taken = 0, 0
    while True:
        best = heap % (MOST_TAKEN + 1)  # leaves the other player a multiple of four
        move = find_move(players[mover].ask(f"stones: {heap}"))
        turns += 1
        chances += best > 0
        taken += move == best > 0
        if not 1 <= move <= min(MOST_TAKEN, heap):
            winner, is_legal = 1 - mover, False
            break
        heap -= move
        if not heap:
            winner, is_legal = mover, True
            break
        mover = 1 - mover
    rewards = dict.fromkeys([*players[0].ids, *players[1].ids], 0.0)
    for number, player in enumerate(players):
        if player.ids:  # the second player has none if the first has won, or lost, at once
            rewards[player.ids[-1]] = 1.0 if number == winner else -1.0
    return {
        "reward": 0.0,
        "turn_rewards": rewards,
        "metrics": {
            "best_moves": taken / chances if chances else 1.0,
            "legal": float(is_legal),
            "first_won": float(winner == 0),
            "turns": float(turns),
        },
    }


def rows(*, count: int = 256, seed: int = 0) -> Iterator[dict[str, Any]]:
    draw = random.Random(seed)
    return (row_of(draw.randint(5, 40)) for _ in range(count))


def row_of(heap: int) -> dict[str, Any]:
    return {"prompt": f"stones: {heap}", "metadata": {"heap": heap}}


def phrases() -> list[str]:
    return [*map(str, range(1, TINY + 1)), *(f"take {number}" for number in range(1, MOST_TAKEN + 2))]


if __name__ == "__main__":
    write("game", real=rows(), tiny=(row_of(heap) for heap in range(1, TINY + 1)), phrases=phrases())
