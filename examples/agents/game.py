"""Two agents play a game against each other; each is trained on its own result.

    python -m examples.agents.game runs/game     # a tiny model and starting heaps

The game is Nim: the players take one or two from a heap in turn, and the player who takes the last one wins. One
rollout is one game. Each player has its own conversation, so the rollout has two parts, which are trained separately.
A player's result is the reward of its last turn (turn_rewards). The reward of the rollout is 0, because one player wins
what the other loses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.agents.chat import Chat, write

LARGEST = 7
MOVES = ("1", "2")


def play(task: Any, endpoint: Any) -> dict[str, Any]:
    """The harness: rollout.options.harness = "examples.agents.game:play"."""
    heap = int(task.prompt)
    players = (Chat(endpoint, max_tokens=1), Chat(endpoint, max_tokens=1))
    turns: list[int] = []  # the player of each turn
    chances, taken, winner = 0, 0, 0
    while True:
        mover = len(turns) % 2
        move = players[mover].ask(str(heap))
        turns.append(mover)
        chances += heap % 3 > 0  # heaps that can be won
        taken += move == str(heap % 3)
        if move not in MOVES or int(move) > heap:
            winner = 1 - mover
            break
        heap -= int(move)
        if not heap:
            winner = mover
            break
    rewards = dict.fromkeys([*players[0].ids, *players[1].ids], 0.0)
    for player in {*turns}:
        rewards[players[player].ids[-1]] = 1.0 if player == winner else -1.0
    best = taken / chances if chances else 1.0
    return {
        "reward": 0.0,
        "turn_rewards": rewards,
        "metrics": {"best_moves": best, "legal": float(heap == 0), "first_won": float(winner == 0)},
    }


def rows() -> Iterator[dict[str, Any]]:
    for heap in range(1, LARGEST + 1):
        yield {"prompt": str(heap), "label": ""}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.agents.game FOLDER")
    write(Path(sys.argv[1]), rows(), characters="01234567")
