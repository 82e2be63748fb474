"""Every type that crosses the bus, and nothing else.

Messages are frozen: nobody writes to a message it received. Each checks itself on construction, so
a message that decodes is a message that makes sense. Arrays are numpy, little-endian on the wire.

Example of one group of one trajectory, prompt "7+5=" and answer "12<eos>":

    TrajectoryGroup(group_id=3, prompt_tokens=[9, 2, 7, 4], trajectories=(
        Trajectory(tokens=[3, 4, 1], response_mask=[T, T, T], behavior_logprobs=[-.1, -.3, -.0],
                   version_spans=(VersionSpan(run_epoch=0, policy_version=6, start=0),
                                  VersionSpan(run_epoch=0, policy_version=7, start=2)),
                   reward=1.0, finish_reason="stop"),))
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.message_checks import array, counts, require

SCHEMA: Final = 1
"""Raised when a message changes so that an older reader would misread it. Readers refuse other schemas."""

FinishReason = Literal["stop", "length", "abort"]
FINISH_REASONS: Final = ("stop", "length", "abort")

ANY_EPOCH: Final = 2**31 - 1
"""Run epoch of tokens that no policy sampled: they belong to every history."""

_POSITIVE_LOGPROB: Final = 1e-3
"""Largest logprob above 0 that rounding in an engine can explain (bf16 softmax); above it the sampler lies."""

_MAX_GROUP: Final = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an engine samples one trajectory of a group.

    ``temperature`` divides the logits, also in the behavior logprobs. ``top_p``/``top_k`` truncation is refused by
    engines whose logprobs are not those of the truncated distribution.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 1, f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        require(0 < self.temperature < math.inf, f"temperature must be > 0, got {self.temperature}")
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        require(self.top_k >= 0, f"top_k must be >= 0, got {self.top_k}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """One prompt to be answered ``group_size`` times.  Topic ``prompts``: prompt source -> rollout workers.

    group_id            number of the group in the run, dense from 0; with the run it is the message id
    min_policy_version  a worker starts no generation of this group on older weights (admission.version_to_begin)
    run_epoch           of the learner that published it
    label, metadata     what the reward function gets besides the text; anything msgpack can carry
    response_tokens     i32[R], an answer to imitate, <eos> included; empty where the data has none
    policy_version      of the learner when it was published: from then on a given answer ages
    """

    group_id: int
    prompt_tokens: NDArray[np.int32]
    group_size: int
    sampling: Sampling
    prompt: str = ""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0
    min_policy_version: int = 0
    response_tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    policy_version: int = 0
    run_epoch: int = 0

    def __post_init__(self) -> None:
        array(self, "prompt_tokens", np.int32)
        array(self, "response_tokens", np.int32)
        require(len(self.prompt_tokens) > 0, "prompt_tokens is empty")
        require(
            1 <= self.group_size <= _MAX_GROUP, f"group_size must be >= 1 and <= {_MAX_GROUP}, got {self.group_size}"
        )
        counts(self, "group_id", "epoch", "min_policy_version", "run_epoch")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class VersionSpan:
    """From token ``start`` on, up to the next span, the policy of (run_epoch, policy_version) sampled.

    run_epoch is ANY_EPOCH where no policy did: a learner that falls back makes no token older that was not sampled.
    """

    start: int
    run_epoch: int
    policy_version: int

    def __post_init__(self) -> None:
        counts(self, "start", "run_epoch", "policy_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sampled answer: everything after the prompt, and per token what sampled it.

    tokens             i32[T]
    response_mask      bool[T]; True where the policy sampled the token, False where an environment wrote it
    behavior_logprobs  f32[T]; log-probability under the distribution really sampled from; 0 where the mask is False
    version_spans      sorted by start, the first at 0
    reward             NaN until rewarded
    """

    tokens: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    version_spans: tuple[VersionSpan, ...]
    reward: float = math.nan
    reward_parts: dict[str, float] = field(default_factory=dict)
    finish_reason: str = "stop"

    def __post_init__(self) -> None:
        array(self, "tokens", np.int32)
        array(self, "response_mask", np.bool_)
        array(self, "behavior_logprobs", np.float32)
        length = len(self.tokens)
        require(length > 0, "a trajectory has no tokens")
        require(len(self.response_mask) == length, f"response_mask has {len(self.response_mask)} of {length} tokens")
        require(
            len(self.behavior_logprobs) == length,
            f"behavior_logprobs has {len(self.behavior_logprobs)} of {length} tokens",
        )
        require(bool(np.isfinite(self.behavior_logprobs).all()), "behavior_logprobs holds NaN or infinity")
        require(float(self.behavior_logprobs.max()) <= _POSITIVE_LOGPROB, "behavior_logprobs holds a value above 0")
        starts = [span.start for span in self.version_spans]
        require(
            bool(starts) and starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < length,
            f"version_spans must start at 0 and rise below {length}, got {starts}",
        )
        require(self.finish_reason in FINISH_REASONS, f"finish_reason {self.finish_reason!r} is unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """All answers to one prompt, rewarded.  Topic ``trajectories``: rollout workers -> the log, read by the learner.

    A group that could not be made carries ``error`` and no trajectories: it is buried, counted, and frees its place
    in the admission window.  cancelled: answers that were cut off so that the others could be trained (stragglers.py)
    """

    group_id: int
    prompt_tokens: NDArray[np.int32]
    trajectories: tuple[Trajectory, ...]
    epoch: int = 0
    worker: str = ""
    seconds: float = 0.0
    error: str = ""
    cancelled: int = 0

    def __post_init__(self) -> None:
        array(self, "prompt_tokens", np.int32)
        counts(self, "group_id", "epoch", "cancelled")
        require(bool(self.trajectories) != bool(self.error), "a group has either trajectories or an error")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSegment:
    """Some tokens that one call of ``generate`` gave: call ``call``, from 0, of sample ``index``'s RolloutFn.

    prompt_digest      of the tokens that the call continues
    start              tokens of the call before these
    tokens             i32[T]
    behavior_logprobs  f32[T], as version_spans like a trajectory's, those counted from ``start``
    finish_reason      empty unless these are its last
    """

    index: int
    call: int
    prompt_digest: bytes
    start: int
    tokens: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str = ""

    def __post_init__(self) -> None:
        array(self, "tokens", np.int32)
        array(self, "behavior_logprobs", np.float32)
        for name in ("index", "call", "start"):
            require(getattr(self, name) >= 0, f"{name} must be >= 0, got {getattr(self, name)}")
        require(self.finish_reason in ("", *FINISH_REASONS), f"finish_reason {self.finish_reason!r} is unknown")
        Trajectory(  # the checks are the same
            tokens=self.tokens,
            response_mask=np.ones(len(self.tokens), np.bool_),
            behavior_logprobs=self.behavior_logprobs,
            version_spans=self.version_spans,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSegment:
    """A segment of an unfinished prompt group: what was sampled for it since the segment before.

    Topic ``segments``, key GROUP/ATTEMPT/SEGMENT: rollout worker -> whoever takes the prompt over from it.
    """

    group_id: int
    worker: str
    calls: tuple[CallSegment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """Where the weights of one policy version are.  Topic ``weights``: learner -> weight followers.

    uri          folder with config.json and model.safetensors, as every worker sees it; empty under the key ``sent``:
                 the learner has them in memory and sends them to engines that ask (service ``transfers``)
    sha256       of model.safetensors
    num_engines  workers the learner knows of; an eighth of them may load at once
    fork         policy version that run_epoch started from
    """

    run_epoch: int
    policy_version: int
    uri: str = ""
    sha256: str = ""
    num_bytes: int = 0
    num_engines: int = 0
    fork: int = 0

    def __post_init__(self) -> None:
        counts(self, "run_epoch", "policy_version", "num_bytes", "num_engines", "fork")
        require("\0" not in self.uri, "uri is no path")

    @property
    def order(self) -> tuple[int, int]:
        """Newer weights compare greater: a new run epoch supersedes whatever an older one published."""
        return (self.run_epoch, self.policy_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the learner is.  Topic ``progress``: learner -> prompt source, workers, observers.

    step           optimizer steps done;  batches_taken: steps begun
    bound          versions of slack that admission gives now; None: the run file's max_staleness
    groups_lost    dropped (too stale), buried (could not be made) or filtered (nothing to learn from): they left the
                   window untrained
    finished       no more work will come: workers drain
    """

    run_epoch: int
    step: int
    policy_version: int
    batches_taken: int = 0
    groups_trained: int = 0
    groups_dropped: int = 0
    groups_buried: int = 0
    groups_filtered: int = 0
    bound: int | None = None
    finished: bool = False

    def __post_init__(self) -> None:
        counts(self, "run_epoch", "step", "policy_version", "batches_taken", "groups_trained")
        counts(self, "groups_dropped", "groups_buried", "groups_filtered")

    @property
    def groups_lost(self) -> int:
        return self.groups_dropped + self.groups_buried + self.groups_filtered


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Something an actor waits for.

    what     for a person: "trajectories"
    on       who could unblock it: a role ("rollout-worker"), or a part of its own process (faults.PARTS: "engine");
             empty when that is itself
    seconds  so long, on the actor's monotonic clock; of a part that shows signs of life, since the last one
    usual    of a wait for a part: seconds that it took in the past, the median; 0 when none has ended yet
    limit    of a wait for a part: longer is a stall; 0 when no length of it is one
    count    how many such waits it has; ``seconds`` is of the longest
    """

    what: str
    on: str = ""
    seconds: float = 0.0
    usual: float = 0.0
    limit: float = 0.0
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What one actor does and waits for.  Topic ``actors``, one entry an actor, gone when it stops beating.

    beat         counts up: who reads twice sees whether the actor beat in between, whatever the clocks say
    life         names this start of the actor: the next process of its name has another
    phase        starting, running, draining or quarantined
    waits        what it waits for, the longest first
    problem      the last thing that went wrong and has not gone right since, in one line
    clock_shift  seconds that this machine's wall clock moved against its monotonic one in the last minute
    numbers      its gauges and counters by metric name, such as ``rollout/running``
    """

    actor: str
    role: str
    run_epoch: int = 0
    policy_version: int = 0
    beat: int = 0
    phase: str = "running"
    waits: tuple[Wait, ...] = ()
    problem: str = ""
    clock_shift: float = 0.0
    host: str = ""
    pid: int = 0
    life: str = ""
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def waits_for(self) -> str:
        """Its longest wait; empty when it waits for nothing."""
        return self.waits[0].what if self.waits else ""

    @property
    def waiting_seconds(self) -> float:
        return self.waits[0].seconds if self.waits else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something a person may ask about later: a dropped group, an error, a worker that came or went."""

    kind: str
    actor: str
    time: float
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What the newest step was like.  Topic ``metrics``: learner -> observers.

    numbers    by metric name, as metrics/schema.py lists them; those that are not finite are left out
    staleness  trained tokens that were 0, 1, 2, ... policy versions old
    """

    step: int
    numbers: dict[str, float] = field(default_factory=dict)
    staleness: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """The learner trains nothing of this worker any more.  Topic ``quarantine``, keyed by worker: learner -> it.

    life  as in its heartbeat; the next worker of that name is not meant. Empty: it had ended already
    """

    worker: str
    run_epoch: int
    reason: str
    life: str = ""


def replace(message: Any, **changes: Any) -> Any:
    """A copy of a message with some fields changed, checked again."""
    return dataclasses.replace(message, **changes)
