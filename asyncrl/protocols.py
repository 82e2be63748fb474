"""What actors ask of the world. Each protocol is a port; its adapters pass one contract test file.

Bus          tests/test_bus_contract.py       memory, JetStream
Engine       tests/test_engine_contract.py    in-process Hugging Face model, SGLang
Backend      tests/test_backend_contract.py   reference PyTorch, Megatron-Core
WeightChannel tests/test_weights_contract.py  files, objects (NCCL sends besides: tests/test_nccl.py)
ObjectStore  tests/test_objects.py            memory, JetStream
Launcher     tests/test_launcher_contract.py  local, Ray (launchers/port.py)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.generation import Generation as Generation
from asyncrl.generation import Partial as Partial
from asyncrl.messages import (
    PromptGroup,
    Sampling,
    Trajectory,
    TransferOffer,
    TransferRequest,
    WeightVersion,
)
from asyncrl.refusals import Refusals
from asyncrl.topics import Service, Topic

if TYPE_CHECKING:
    from asyncrl.policies.packing import MicroBatch
    from asyncrl.snapshot import Snapshot

M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)
Q = TypeVar("Q")
A = TypeVar("A")
Q_co = TypeVar("Q_co", covariant=True)
A_contra = TypeVar("A_contra", contravariant=True)


# -- bus ---------------------------------------------------------------------------------------------------------------


class Delivery(Protocol[M_co]):
    """A work message on loan. Until it is acked the bus gives it to somebody else when we are gone or too slow."""

    @property
    def key(self) -> str: ...

    @property
    def attempt(self) -> int:
        """1 the first time this message is delivered to anybody."""
        ...

    @property
    def message(self) -> M_co | None:
        """None when the bytes were not a message; ``problem`` says why."""
        ...

    @property
    def problem(self) -> str: ...

    async def ack(self) -> None:
        """Done: when this returns, nobody gets the message again, and the bus no longer counts it (a cluster: a moment
        later)."""
        ...

    async def retry(self, *, delay: float = 0.0) -> None:
        """Give it to somebody (perhaps us) again after ``delay`` seconds, with attempt + 1."""
        ...

    async def keep(self) -> None:
        """Still working on it: start the redelivery clock anew."""
        ...


class Deliveries(Protocol[M_co]):
    """Work messages as they come, an AsyncIterator. A cancelled ``anext`` is a ``stop``."""

    def __aiter__(self) -> AsyncIterator[Delivery[M_co]]: ...

    async def __anext__(self) -> Delivery[M_co]: ...

    def want(self, count: int) -> None:
        """How many may be lent ahead of ``anext``, so that far away they need no round trip each; 1 at first."""
        ...

    async def stop(self) -> None:
        """Nothing more is lent until the next ``anext``; what was lent ahead of it goes to others."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Generic[M]):
    """One entry of a log. ``sequence`` rises by one per entry from 1; ``message`` is None when it did not decode."""

    sequence: int
    key: str
    message: M | None
    problem: str = ""
    num_bytes: int = 0


class Asked(Protocol[Q_co, A_contra]):
    """A question somebody waits with."""

    @property
    def question(self) -> Q_co: ...

    async def answer(self, answer: A_contra) -> None: ...


class Bus(Protocol):
    """Carries typed messages between processes that share nothing else. Every method may raise BusError."""

    async def publish(self, topic: Topic[M], message: M, *, key: str) -> bool:
        """Store a message on a work or log topic. False: one with this key is or was there lately; nothing was stored.

        Raises BusFull when the topic is full, MessageTooLarge when no retry can help.
        """
        ...

    def consume(self, topic: Topic[M]) -> AbstractAsyncContextManager[Deliveries[M]]:
        """Work, one message at a time, shared with every other consumer. Leaving gives back what was not acked."""
        ...

    def read(self, topic: Topic[M], *, after: int = 0) -> AbstractAsyncContextManager[AsyncIterator[Record[M]]]:
        """The log from sequence ``after`` + 1 on, then what is published next, for ever."""
        ...

    async def trim(self, topic: Topic[Any], *, through: int) -> None:
        """Forget log entries up to sequence ``through``."""
        ...

    async def put(self, topic: Topic[M], message: M, *, key: str = "", is_sure: bool = True) -> None:
        """Set a state. ``is_sure`` False: it may be lost and nobody says so; for what is said again soon anyway."""
        ...

    def watch(self, topic: Topic[M], *, key: str = "") -> AbstractAsyncContextManager[AsyncIterator[M]]:
        """The state of one key if there is one, then each newer one; states in between may be skipped."""
        ...

    async def states(self, topic: Topic[M], *, under: str = "") -> dict[str, M]:
        """The present state of every key, or of those that begin with ``under``: "a/" or "a/b/" of "a/b/c"."""
        ...

    async def forget(self, topic: Topic[Any], *, key: str) -> None:
        """Remove a state; with a key that ends in "/", all that begin with it."""
        ...

    async def depth(self, topic: Topic[Any]) -> int:
        """Messages stored: on a work topic those not yet acked, on a log those not yet trimmed."""
        ...

    async def keys(self, topic: Topic[Any]) -> set[str]:
        """Keys of the messages stored on a work or log topic."""
        ...

    async def last_sequence(self, topic: Topic[Any]) -> int:
        """How many messages were ever published on a work or log topic."""
        ...

    async def ask(self, service: Service[Q, A], question: Q, *, seconds: float) -> A | None:
        """What whoever serves it answers; None when nobody serves it, or not within ``seconds``."""
        ...

    def serve(self, service: Service[Q, A]) -> AbstractAsyncContextManager[AsyncIterator[Asked[Q, A]]]:
        """Questions as they come; one left unanswered is None to whoever asked."""
        ...

    def lease(self, name: str, *, holder: str) -> AbstractAsyncContextManager[None]:
        """Held by one at a time, among all processes of the run; entering waits until it is free, in no order.

        A holder that dies loses it within five seconds or so. One that is cut off from the bus, or blocks its event
        loop, for that long loses it too and is not told: a lease limits load, it does not protect data. It is not
        reentrant. ``holder``: for people who look at the bus.
        """
        ...

    def objects(self) -> ObjectStore:
        """The run's large objects; the same store each time. It ends with the bus."""
        ...

    @property
    def max_message_bytes(self) -> int: ...

    @property
    def refusals(self) -> Refusals:
        """What this process would not take. The bus notes states, questions and answers; actors what they read."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """sha256: of its bytes, hexadecimal."""

    name: str
    num_bytes: int
    sha256: str
    metadata: Mapping[str, str]


class ObjectStore(Protocol):
    """Bytes too many for a message, under a name. Blocking and thread-safe; one writer. May raise BusError."""

    def put(self, name: str, blocks: Iterable[bytes | memoryview], *, metadata: Mapping[str, str]) -> ObjectInfo:
        """Store an object, whole or not at all; one of that name is replaced. Takes ``blocks`` as it sends them."""
        ...

    def info(self, name: str) -> ObjectInfo | None:
        """None when there is none of that name."""
        ...

    def read(self, name: str, *, start: int = 0) -> Iterator[bytes]:
        """Its bytes from ``start`` on, in order, whatever happens to the connection. Raises ObjectGone.

        Nothing is checked against its sha256: who has all of it does that.
        """
        ...

    def names(self) -> set[str]: ...

    def remove(self, name: str) -> None:
        """Nothing happens when it is not there."""
        ...


# -- engine ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """running: sequences being decoded; queued: waiting for a place; tokens_generated: since start.

    is_live  tokens_generated moves with the tokens, not only when an answer is done: when it stands still, so does the
             engine
    """

    running: int = 0
    queued: int = 0
    tokens_generated: int = 0
    is_live: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """pause_seconds: how long no token was decoded; load_seconds: from the order to the new weights sampling."""

    pause_seconds: float
    load_seconds: float


class Engine(Protocol):
    """Samples from a model whose weights may change between any two tokens."""

    async def start(self) -> None: ...

    async def generate(
        self, prompt_tokens: NDArray[np.int32], sampling: Sampling, *, seed: int, partial: Partial | None = None
    ) -> Generation:
        """One sampled answer. Many run at once; the engine batches them.

        With ``partial`` the answer begins with its prefix, and can be seen while it grows. An engine that ignores it
        begins anew: that is right too, only nothing is salvaged of what a dead worker had.

        Every token carries the version of the weights that sampled it. Engines that can sample the same tokens for
        the same seed and weights. Raises EngineError (try elsewhere), PromptError (no engine can)
        or EngineDied (this process is over).
        """
        ...

    async def load(self, weights: WeightVersion) -> LoadReport:
        """Switch to newer weights. Generations in progress go on with them from the next token.

        Raises WeightsError and keeps the old weights when the new ones cannot be read. Whether the checksum is right
        the caller has seen to (WeightChannel.verify).
        """
        ...

    @property
    def version(self) -> tuple[int, int]:
        """(run_epoch, policy_version) of the weights that sample now; below all others when it has no whole weights."""
        ...

    @property
    def receiver(self) -> Receiver | None:
        """Takes weights out of the learner's memory; None when this engine loads folders only."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


class Receiver(Protocol):
    """The engine's side of a transfer (Sender is the learner's)."""

    @property
    def request(self) -> TransferRequest:
        """What to ask the learner next: where to meet, or, once joined, for the weights."""
        ...

    async def join(self, offer: TransferOffer) -> None:
        """Meet the learner. Raises WeightsError."""
        ...

    async def receive(self, offer: TransferOffer) -> LoadReport:
        """Take what the learner sends now, as Engine.load takes a folder. Raises WeightsError.

        When it fails half-way the engine stays paused until a load succeeds: it never samples from mixed weights.
        """
        ...

    async def leave(self) -> None:
        """Forget the learner that was met: the next request asks where to meet."""
        ...


# -- backend -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """metrics: named as in design section 6, already reduced over micro-batches and data-parallel ranks."""

    metrics: Mapping[str, float]


class Backend(Protocol):
    """Holds the policy and, by name, the models an algorithm needs beside it (backends.models.AuxiliaryModel): a
    trained "critic", a frozen "reference" or "teacher".

    Every method blocks: the learner calls them from the backend's own thread. With several data-parallel ranks only
    rank 0 has a Backend; it leads the others through its own collectives. ``shares[r]`` is what data-parallel rank r
    works on.
    """

    def start(self) -> None:
        """Load the models and make the optimizers."""
        ...

    def step(
        self, shares: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = "policy"
    ) -> StepResult:
        """One optimizer step of a trained model on one batch; gradients are summed over the shares.

        Metrics are the objective's, and of the critic critic/grad_norm, critic/learning_rate, critic/skipped_steps.
        """
        ...

    def score(
        self, shares: Sequence[Sequence[MicroBatch]], *, model: str = "policy"
    ) -> list[list[NDArray[np.float32]]]:
        """What a model says of every token, without gradient: f32[N] per micro-batch, shaped as ``shares``.

        Of policy, reference and teacher the logprobs at the sampling temperature, 0 at document starts. Of the critic
        the value after each token: the state in which token n was chosen is worth values[n - 1], and what a truncated
        answer might still have earned is the value at its last token.
        """
        ...

    def export(self) -> Snapshot:
        """The policy's weights under their Hugging Face names and in its folder's type, where they are trained."""
        ...

    def save(self, folder: Path) -> None:
        """Everything a resumed run needs besides what the learner itself knows: weights, optimizers, RNG.

        Of the trained models; frozen ones are loaded from their own folders again.
        """
        ...

    def restore(self, folder: Path) -> None: ...

    def close(self) -> None: ...


# -- weights -----------------------------------------------------------------------------------------------------------


class WeightChannel(Protocol):
    """Moves weights from the learner to wherever engines can load them. Blocking; called from a thread."""

    def publish(self, snapshot: Snapshot, *, run_epoch: int, policy_version: int) -> WeightVersion:
        """Store one version, whole or not at all, and forget versions nobody should load any more."""
        ...

    def verify(self, weights: WeightVersion) -> Path:
        """The folder of a version whose checksum is right, fetched if need be. Raises WeightsError."""
        ...

    @property
    def progress(self) -> int:
        """Rises while a publish or verify gets on: a sign of life for who waits for it. Any thread may look."""
        ...

    @property
    def published_bytes(self) -> int:
        """What the last publish stored."""
        ...

    @property
    def sender(self) -> Sender | None:
        """Sends the newest weights out of memory as well; None when the channel knows folders only."""
        ...


class Sender(Protocol):
    """Holds the newest weights for engines that ask. Blocking and thread-safe."""

    def hold(self, snapshot: Snapshot, *, run_epoch: int, policy_version: int) -> None:
        """From now on this is what is sent."""
        ...

    def begin(self, request: TransferRequest) -> Transfer:
        """What to answer an engine, and what to do then. Raises WeightsError."""
        ...

    def forget(self, *, engines: Collection[str]) -> None:
        """Of engines that are none of these keep nothing, unless they came or took weights a moment ago."""
        ...


class Transfer(Protocol):
    """One engine's turn."""

    @property
    def offer(self) -> TransferOffer: ...

    def send(self) -> None:
        """Blocks until the engine has everything. Raises WeightsError when it does not take it."""
        ...


# -- plugins: "package.module:object" in the run file ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a reward function sees of one trajectory."""

    prompt: str
    completion: str
    label: Any
    metadata: Mapping[str, Any]
    trajectory: Trajectory
    prompt_tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


class RewardFn(Protocol):
    """Rewards one group. What it raises buries the group with the reason; it never ends the worker."""

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Reward]: ...

    async def close(self) -> None: ...


class Generate(Protocol):
    """Continues a token sequence with the group's sampling; bound to one sample of one group."""

    async def __call__(self, tokens: NDArray[np.int32], *, max_new_tokens: int | None = None) -> Generation:
        """The answer to ``tokens``, the prompt included. Call it once a turn; each call has a seed of its own.

        ``max_new_tokens``: instead of the group's, to keep a budget over several turns; None takes the group's. A
        trajectory longer than rollout.max_new_tokens in all may not fit into a message, and is buried then.
        """
        ...


class RolloutFn(Protocol):
    """One trajectory of one prompt. The default answers once; multi-turn and tools are other RolloutFns."""

    async def __call__(self, prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        """``index``: which sample of the group this is, 0 to group_size - 1."""
        ...
