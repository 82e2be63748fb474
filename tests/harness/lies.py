"""Messages that a malicious worker with valid credentials may publish, such as answers of any shape to its prompts.

Each lie is derived from a ``random.Random``: Hypothesis draws its seed in a property, and a storm has one seed for all.
The liar writes under its own name, "evil", as the server's permissions make it, whatever name its message bears.
"""

from __future__ import annotations

import math
import struct
from random import Random
from typing import Any, Final

import numpy as np

from asyncrl.messages import Event, Heartbeat, PromptGroup, Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.messages.codec import encode
from asyncrl.version import SCHEMA
from tests.harness.packed import Ext, packb

NAMES: Final = (*["evil"] * 20, "honest", "w0", "", "w\n0", "W" * 300, "é" * 80, "\x1b[2J", "learner", "../../etc")


def answer_to(prompt: PromptGroup, random: Random, *, max_bytes: int) -> bytes:
    """Return the bytes of one answer to a prompt. It may fail to decode, be impossible, or be honest."""
    how = random.choice(tuple(_WAYS))
    data: bytes = _WAYS[how](prompt, random)
    return data[:max_bytes]


def trajectory(prompt: PromptGroup, random: Random, **changes: Any) -> Trajectory:
    """Return a possible answer of four tokens, with changes."""
    length = changes.pop("length", 4)
    mask = np.full(length, changes.pop("mask", True))
    fields: dict[str, Any] = {
        "tokens": np.array([random.randint(8, 13) for _ in range(length)], np.int32),
        "response_mask": mask,
        "behavior_logprobs": np.where(mask, np.float32(changes.pop("logprob", -1.0)), 0).astype(np.float32),
        "version_spans": (
            VersionSpan(start=0, incarnation=prompt.incarnation, policy_version=prompt.min_policy_version),
        ),
        "reward": random.random(),
    }
    return Trajectory(**(fields | changes))


def group(prompt: PromptGroup, answers: Any, random: Random, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "group_id": prompt.group_id,
        "prompt_tokens": prompt.prompt_tokens,
        "trajectories": tuple(answers),
        "epoch": prompt.epoch,
        "worker": random.choice(NAMES),
    }
    return encode(TrajectoryGroup(**(fields | changes)))


def _all(prompt: PromptGroup, random: Random, **changes: Any) -> bytes:
    return group(prompt, [trajectory(prompt, random, **changes) for _ in range(prompt.group_size)], random)


def _one_odd(prompt: PromptGroup, random: Random, **changes: Any) -> bytes:
    """Return answers that are all possible except one."""
    answers = [trajectory(prompt, random) for _ in range(prompt.group_size)]
    answers[random.randrange(len(answers))] = trajectory(prompt, random, **changes)
    return group(prompt, answers, random)


def _version(prompt: PromptGroup, random: Random) -> bytes:
    odd = VersionSpan(
        start=0,
        incarnation=random.choice([0, prompt.incarnation, 9, 2**31 - 1]),
        policy_version=random.choice([0, 10**6, 2**52]),
    )
    return _one_odd(prompt, random, version_spans=(odd,))


def _reward(prompt: PromptGroup, random: Random) -> bytes:
    return _one_odd(prompt, random, reward=random.choice([math.nan, math.inf, -math.inf, 1e308, -1e308, 1e300, 1e7]))


def _parts(prompt: PromptGroup, random: Random) -> bytes:
    parts = random.choice(
        [{"mean": 1e6}, {f"{number:x}": 0.1 for number in range(3000)}, {"x" * 5000: 1.0}, {"": 0.0}, {"a": math.nan}]
    )
    return _one_odd(prompt, random, reward_parts=parts)


def _error(prompt: PromptGroup, random: Random) -> bytes:
    return group(prompt, (), random, error=random.choice(["no", "E" * 100_000, "\x1b]0;pwned\x07\n"]))


def _mutated(prompt: PromptGroup, random: Random) -> bytes:
    data = bytearray(_all(prompt, random))
    for _ in range(random.randint(1, 4)):
        data[random.randrange(len(data))] = random.randrange(256)
    return bytes(data)


def _bomb(prompt: PromptGroup, random: Random) -> bytes:
    shape = random.choice([(2**32 - 1, 0), (), (2**32 - 1,), (2**32 - 1,) * 255])
    array = Ext(1, struct.pack(f"<B{len(shape)}I", len(shape), *shape) + bytes(4))
    fields = {"group_id": prompt.group_id, "prompt_tokens": array, "trajectories": [], "error": "x"}
    bombs = [
        b"\x91" * 200_000,
        b"\xdf\xff\xff\xff\xff" + bytes(1000),
        b"\xdd\x7f\xff\xff\xff",
        packb(("TrajectoryGroup", SCHEMA, fields)),
        random.randbytes(random.randint(0, 200)),
        _nested(random),
    ]
    return random.choice(bombs)


def _nested(random: Random) -> bytes:
    """Nest as deeply as a decoder unpacks, in the place of a message's type."""
    return b"\x93" + random.choice([b"\x91", b"\x81\xa1a"]) * random.choice([990, 1000, 1020]) + b"\xc0\x01\x80"


_WAYS: Final[dict[str, Any]] = {
    "honest": _all,
    "too few": lambda p, r: group(p, [trajectory(p, r)], r),
    "too many": lambda p, r: group(p, [trajectory(p, r, length=1)] * r.choice([p.group_size + 1, 2000]), r),
    "cancelled": lambda p, r: group(p, [trajectory(p, r)], r, cancelled=r.choice([p.group_size - 1, 2**53 - 1])),
    "amplified": lambda p, r: group(p, [trajectory(p, r)] * p.group_size, r, prompt_tokens=np.full(9999, 5, np.int32)),
    "another prompt": lambda p, r: group(p, [trajectory(p, r)] * p.group_size, r, prompt_tokens=p.prompt_tokens[::-1]),
    "another group": lambda p, r: group(p, [trajectory(p, r)] * p.group_size, r, group_id=r.choice([0, 10**6, 2**52])),
    "epoch": lambda p, r: group(p, [trajectory(p, r)] * p.group_size, r, epoch=2**53 - 1),
    "seconds": lambda p, r: group(p, [trajectory(p, r)] * p.group_size, r, seconds=r.choice([math.nan, 1e308, -1e300])),
    "began": lambda p, r: group(p, [trajectory(p, r)] * p.group_size, r, began=r.choice([math.inf, 1e308, -1.0])),
    "short": lambda p, r: _all(p, r, length=r.randint(1, 3)),
    "long": lambda p, r: _one_odd(p, r, length=r.choice([5, 100, 20_000])),
    "no mask": lambda p, r: _all(p, r, mask=False),
    "one without mask": lambda p, r: _one_odd(p, r, mask=False),
    "vocabulary": lambda p, r: _one_odd(p, r, tokens=np.array([8, 9, r.choice([-1, 10**6, 2**31 - 1]), 9], np.int32)),
    "logprob": lambda p, r: _one_odd(p, r, logprob=r.choice([-1e30, -3e38, -110.0, -80.0, 0.0])),
    "finish": lambda p, r: _one_odd(p, r, finish_reason="length"),
    "version": _version,
    "reward": _reward,
    "parts": _parts,
    "error": _error,
    "mutated": _mutated,
    "bomb": _bomb,
}


def key_of_nobody(random: Random, *, newest: int) -> str:
    """Return the key of a log record that was not requested: no group, a group long done, or a group not issued yet."""
    keys = ["", "x", "-1", "01", "9" * 15, str(max(0, newest - 100)), str(newest + random.randint(500, 10_000))]
    return f"evil/{random.choice(keys)}"


def said_elsewhere(random: Random) -> tuple[str, str, bytes]:
    """Return (topic, key, bytes) of a heartbeat or an event by the liar, the other topics that workers
    write."""
    name = random.choice(("evil", "evil", "honest", "learner"))
    numbers = {random.choice(["rollout/running", "x" * 500]): random.choice([0.0, -1.0, math.nan, 1e308])}
    beat = Heartbeat(actor=name, role="rollout-worker", life="L" * random.choice([1, 5000]), numbers=numbers)
    event = Event(kind=random.choice(["joined", "k" * 1000]), actor=name, time=1e10, data={"worker": "evil"})
    event_key = f"evil/{random.random()}"
    return random.choice(
        [
            ("actors", "evil", encode(beat)),
            ("events", event_key, encode(event)),
            ("actors", "evil", random.randbytes(60)),
            ("actors", "evil", _nested(random)),
            ("events", event_key, _nested(random)),
        ]
    )
