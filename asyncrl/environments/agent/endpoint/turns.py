"""The turns of a session: the answers that its agent received, the prompts that they continue, and what is trained.

Turns form a forest. The parent of a turn is the turn whose prompt and answer are a prefix of the new prompt, token by
token. If a harness rewrites the history, the turn has no parent and starts a new tree. Each branch becomes a sequence,
and each answer is trained in exactly one sequence. Where branches part, the later ones have the shared part in their
prompt.

  S1 tokens, logprobs and versions of a sequence are exactly those that the engine received and returned
  S2 every sampled token of an answer that the agent received is trained once
Tests: tests/unit/environments/agent/test_turns.py.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation import Generation
from asyncrl.environments.agent.endpoint.request import Json
from asyncrl.environments.trajectory_builder import TrajectoryBuilder
from asyncrl.messages import Trajectory
from asyncrl.messages.images import ImageRef

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One answer of the model.

    number      number of the answer in its session, from 0, in the order of requests
    tag         digest of session, prompt and occurrence; the same if the sample runs again, in any order of requests
    call        tag of the first answer to the same request: the id that the client sees ends with it
    after       the turn after which the request goes on, also if the agent changed its answer; None if after none
    given       i32[*], tokens given to the engine after the parent's tokens
    message     the answer as a message; empty if the request consisted of tokens
    asked, said digests of the messages before this answer, and up to it with the tools; empty for a request of tokens
    overridden      requested settings that were not obeyed
    stopped_by  stop string of the request that ended the answer, and that ``message`` lacks; "" if none did
    images      images that the context shows, in order
    """

    number: int
    tag: str
    parent: Turn | None
    given: Tokens
    answer: Generation
    call: str = ""
    after: Turn | None = None
    message: Json = field(default_factory=dict)
    asked: bytes = b""
    said: bytes = b""
    overridden: Json = field(default_factory=dict)
    stopped_by: str = ""
    images: tuple[ImageRef, ...] = ()

    @property
    def path(self) -> list[Turn]:
        """The turns from the root to this one."""
        found, turn = [], self.parent
        while turn is not None:
            found.append(turn)
            turn = turn.parent
        return [*reversed(found), self]

    @property
    def context(self) -> Tokens:
        """The engine's input, i32[P]."""
        return self.tokens[: -len(self.answer.tokens) or None]

    @property
    def tokens(self) -> Tokens:
        """The context and the answer."""
        return np.concatenate([part for turn in self.path for part in (turn.given, turn.answer.tokens)])

    @property
    def prompt_length(self) -> int:
        return sum(len(turn.given) + len(turn.answer.tokens) for turn in self.path) - len(self.answer.tokens)


class Turns:
    """The turns of one session."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._children: dict[Turn | None, list[Turn]] = {}

    def __iter__(self) -> Iterator[Turn]:
        """Iterate in the order of requests."""
        return iter(sorted(self._turns, key=lambda turn: turn.number))

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, turn: Turn) -> None:
        self._turns.append(turn)
        self._children.setdefault(turn.parent, []).append(turn)

    def remove(self, turn: Turn) -> None:
        """Remove a turn that no other one continues."""
        self._turns.remove(turn)
        self._children[turn.parent].remove(turn)

    def longest_prefix(self, tokens: Tokens) -> tuple[Turn | None, int]:
        """Return the turn whose prompt and answer are the longest prefix of ``tokens``, and that prefix's length."""
        best, length = None, 0
        open_turns = [(turn, 0) for turn in self._children.get(None, ())]
        while open_turns:
            turn, begin = open_turns.pop()
            middle, end = begin + len(turn.given), begin + len(turn.given) + len(turn.answer.tokens)
            if not np.array_equal(tokens[begin:middle], turn.given):
                continue
            if not np.array_equal(tokens[middle:end], turn.answer.tokens):
                continue
            if end > length:
                best, length = turn, end
            open_turns += [(child, end) for child in self._children.get(turn, ())]
        return best, length

    def sequences(self) -> list[TrainedSequence]:
        """Return one training sequence per branch, in the order of requests. Answers without tokens end no branch."""
        continued: set[Turn] = set()
        sampled = [turn for turn in self if len(turn.answer.tokens)]
        for turn in sampled:
            above = turn.parent
            while above is not None and above not in continued:
                continued.add(above)
                above = above.parent
        owned: set[Turn] = set()
        made = []
        for leaf in sampled:
            if leaf in continued:
                continue
            path = leaf.path
            own = [turn for turn in path if turn not in owned]
            owned.update(own)
            made.append(_sequence(own))
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSequence:
    """One sequence to train.

    prompt_tokens  the context of its first own answer
    turns          (number, start in the trajectory's tokens) of each answer that it trains
    """

    prompt_tokens: Tokens
    trajectory: Trajectory
    turns: tuple[tuple[int, int], ...]


def _sequence(own: Sequence[Turn]) -> TrainedSequence:
    """Build the sequence of a chain of turns, each the parent of the next."""
    prompt = own[0].context
    builder = TrajectoryBuilder(prompt, images=own[0].images)
    places = []
    for turn in own:
        if turn is not own[0]:
            known = len(builder.tokens)
            builder.add_observation(turn.given, images=[one for one in turn.images if one.start >= known])
        if len(turn.answer.tokens):
            places.append((turn.number, builder.num_tokens))
            builder.add_answer(turn.answer)
    return TrainedSequence(prompt_tokens=prompt, trajectory=builder.trajectory(), turns=tuple(places))


class Tags:
    """Makes names of turns that do not depend on the order of calls. Prompts may contain them, as tool call ids."""

    def __init__(self, session: str) -> None:
        """session   name of the session; the same if the sample runs again"""
        self._session = session.encode()
        self._seen: Counter[bytes] = Counter()

    def next(self, tokens: Tokens) -> str:
        digest = hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).digest()
        occurrence, self._seen[digest] = self._seen[digest], self._seen[digest] + 1
        return hashlib.blake2b(digest, digest_size=12, key=self._session, salt=occurrence.to_bytes(8)).hexdigest()


def call_id(tag: str, place: int) -> str:
    """Return the id of a tool call: nine letters and digits, as Mistral's templates require."""
    digits = hashlib.blake2b(f"{tag} {place}".encode(), digest_size=5).digest()
    return "c" + "".join("0123456789abcdefghijklmnopqrstuv"[int.from_bytes(digits) >> 5 * n & 31] for n in range(8))
