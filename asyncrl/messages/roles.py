"""The roles of a run's actors, as heartbeats and waits name them."""

from __future__ import annotations

from typing import Final

LEARNER: Final = "learner"
LEARNER_RANK: Final = "learner-rank"
"""Another rank of the learner, in its own process. It is not an actor: the learner speaks for all ranks."""
WORKER: Final = "rollout-worker"
EVALUATION_WORKER: Final = "evaluation-worker"
ENGINE_NODE: Final = "engine-node"
"""Another machine of a worker's engine. It is not an actor: the worker speaks for its engine."""
MODEL_SERVER: Final = "model-server"
"""The process of a frozen model's server ([servers.NAME])."""
SERVER_FOLLOWER: Final = "server-follower"
PROMPT_SOURCE: Final = "prompt-source"
FOLLOWER: Final = "weight-follower"
SENDER: Final = "weight-sender"
WATCHER: Final = "watcher"
"""Health monitors, which are not part of the run."""

LEARNERS_ACTORS: Final = {"learner": LEARNER, "prompts": PROMPT_SOURCE, "weights": SENDER}
"""Names and roles of the actors of the learner's process; no other process has them."""

QUARANTINED: Final = "quarantined"
"""Phase of a worker whose groups the learner does not train."""
BEGINS_NOTHING: Final = ("starting", QUARANTINED)
"""Phases of workers that start no group."""


def process_name(actor: str, role: str) -> str:
    """Return the name of the process that an actor belongs to: its learner or its worker."""
    if actor in LEARNERS_ACTORS:
        return LEARNER
    return actor.removesuffix(".weights").removesuffix(".servers") if role in (FOLLOWER, SERVER_FOLLOWER) else actor
