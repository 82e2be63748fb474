"""Measure the cost of a signature by its parts: CPU of one message, and of encoding and decoding it.

    python -m benchmarks.signing [--json FILE]

Prints the least of many repeats, because other load on the machine only adds time. The benchmark first allocates and
frees a block of memory. Until a process has done that once, as every process with torch has, malloc returns pages to
the system after each large message, which costs more than everything measured here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import blake3
import nacl.bindings

from asyncrl.messages import TrajectoryGroup
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.signing import Signatures, SigningKey
from asyncrl.messages.topics import TRAJECTORIES
from benchmarks.bus import SIZES, machine, make_group

CALLS, REPEATS = 20, 25
ADAPT_BYTES = 30 * 2**20


def milliseconds(call: Callable[[], object]) -> float:
    """Return the CPU time of one call."""
    found = []
    for _ in range(REPEATS):
        started = time.process_time()
        for _ in range(CALLS):
            call()
        found.append((time.process_time() - started) / CALLS * 1e3)
    return round(min(found), 4)


def measured(num_bytes: int) -> dict[str, float]:
    key = SigningKey(bytes(32))
    signatures = Signatures(run="r", own=key, learner=key.public, bound=lambda name: key.public)
    group = make_group(num_bytes)
    data = encode(group)
    sealed, digest = signatures.seal(TRAJECTORIES, "1", data), hashlib.sha256(data).digest()
    signed = key.signature(digest) + digest
    public = bytes.fromhex(key.public)
    return {
        "encode": milliseconds(lambda: encode(group)),
        "decode": milliseconds(lambda: decode(data, TrajectoryGroup)),
        "sign": milliseconds(lambda: signatures.seal(TRAJECTORIES, "1", data)),
        "check": milliseconds(lambda: signatures.impostor(TRAJECTORIES, "1", sealed, name="w")),
        "sha256": milliseconds(lambda: hashlib.sha256(data).digest()),
        "blake3": milliseconds(lambda: blake3.blake3(data).digest()),
        "ed25519 sign": milliseconds(lambda: key.signature(digest)),
        "ed25519 check": milliseconds(lambda: nacl.bindings.crypto_sign_open(signed, public)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write one object a line")
    options = parser.parse_args()
    bytearray(ADAPT_BYTES)
    rows: list[dict[str, object]] = [{"machine": machine() | {"command": "python -m benchmarks.signing"}}]
    for name, num_bytes in SIZES.items():
        row = measured(num_bytes)
        rows.append({"size": name, "milliseconds": row})
        print(f"{name:>6}  " + "  ".join(f"{part} {cost:.3f}" for part, cost in row.items()), flush=True)
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
