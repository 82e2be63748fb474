"""Who says a message: an ed25519 signature in front of its bytes. Pure; the only file that imports nacl and blake3.

    0xC1 0x02   signer (32)   life (8)   sequence (8)   signature (64)   the message

No message begins with 0xC1 (msgpack never uses it), so what was recorded without a signature stays readable. What is
signed is a BLAKE3 digest (of SHA-256 where the second byte is 0x01, as older versions wrote) over run, topic, key,
signer, life, sequence and message, so that none of them can be exchanged. A life is one start of a process, a sequence
rises within it: who has seen a state refuses what its signer said before, of others than the learner what is older by
some seconds (freshness.py).

The learner's topics (``Topic.is_learners``) and the offers of ``transfers`` are checked by everybody who knows the
learner's key. Tests: tests/unit/messages/test_signing.py, tests/contracts/test_bus_signatures.py.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import blake3
import nacl.bindings
import nacl.exceptions

from asyncrl.messages.freshness import Freshness, Order
from asyncrl.messages.topics import Service, Topic

_MARK: Final = b"\xc1\x02"
_DIGESTS: Final[Mapping[bytes, Callable[[bytes], Any]]] = {b"\xc1\x01": hashlib.sha256, _MARK: blake3.blake3}
"""What is signed, by the mark; the digest is most of a signature's cost, and BLAKE3 takes a quarter of SHA-256's."""
_HEAD: Final = struct.Struct(">2s32sQQ64s")
_CONTEXT: Final = b"asyncrl message 1"
_SEED_BYTES: Final = 32
_PUBLIC_KEY: Final = re.compile("[0-9a-f]{64}")
_LONGEST_NAME: Final = 256

Seen = dict[tuple[str, str], Order]
"""The newest order of what a reader has taken, by topic and key."""


class SigningKey:
    """The secret half of a key pair.  public: the other half, 64 hexadecimal digits"""

    def __init__(self, seed: bytes) -> None:
        public, self._secret = nacl.bindings.crypto_sign_seed_keypair(seed)
        self.public = public.hex()
        self._seed = seed

    @classmethod
    def generate(cls) -> SigningKey:
        return cls(nacl.bindings.randombytes(_SEED_BYTES))

    @classmethod
    def from_text(cls, text: str) -> SigningKey:
        """Raises ValueError."""
        if not _PUBLIC_KEY.fullmatch(text):
            raise ValueError("a signing key is 64 hexadecimal digits")
        return cls(bytes.fromhex(text))

    def text(self) -> str:
        """The secret, as ``from_text`` takes it."""
        return self._seed.hex()

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public!r})"

    def signature(self, digest: bytes) -> bytes:
        return nacl.bindings.crypto_sign(digest, self._secret)[:64]


def is_public_key(text: str) -> bool:
    return bool(_PUBLIC_KEY.fullmatch(text))


@dataclass(frozen=True, slots=True)
class Opened:
    """The message's bytes, or why they are not taken.  signer: public key of who signed them; "" for nobody"""

    data: bytes | memoryview
    problem: str = ""
    signer: str = ""


class Signatures:
    """What one process signs with, whom it believes, and what it has seen; one for each connection to the bus.

    own      signs what this process says; None leaves it unsigned
    life     of this process, higher than that of its key's process before
    learner  public key; empty: not known, and nothing is checked
    learns   the first learner that is heard is believed from then on
    bound    from a name to the public key of who has it, or to its first digits; "" for a name that anybody may use
    """

    def __init__(
        self,
        *,
        run: str = "",
        own: SigningKey | None = None,
        life: int = 0,
        learner: str = "",
        learns: bool = False,
        bound: Callable[[str], str] = lambda name: "",
    ) -> None:
        self._run = run
        self._own = own
        self._life = life
        self._sequence = itertools.count(1)
        self._seen: dict[tuple[str, str], Order] = {}
        self._learns = learns
        self._bound = bound
        self.heard = Freshness()
        self.learner = learner

    def for_another_connection(self) -> Signatures:
        """Of the same process: its life, its sequence and what was heard go on; of the learner nothing is seen yet."""
        other = copy.copy(self)
        other._seen = {}
        return other

    def seal(self, topic: Topic[Any], key: str, data: bytes) -> bytes:
        """The message with our signature in front, if we have a key."""
        return self._sealed(topic.name, key, data)

    def open(self, topic: Topic[Any], key: str, data: bytes, *, seen: Seen | None = None) -> Opened:
        """``seen``: what this reader has taken, and what others of its process had when it began; kept up to date.

        Without it, what any of them has: another one may be ahead.
        """
        opened, order = self._opened(topic.name, key, data, is_learners=topic.is_learners)
        if opened.problem or order is None or topic.kind != "state":
            return opened
        place = (topic.name, key)
        seen = self._seen if seen is None else seen
        if order < seen.get(place, order):
            return Opened(b"", "is an old message of the learner, said again by somebody", opened.signer)
        seen[place] = order
        self._seen[place] = max(order, self._seen.get(place, order))
        return opened

    def impostor(self, topic: Topic[Any], key: str, data: bytes, *, name: str) -> str:
        """Why a message is not what it names says now; empty: it is, or anybody may use that name."""
        owner = self._bound(name)
        if not owner or topic.is_learners:
            return ""
        signer, order, problem = self._verified(topic.name, key, data)
        if problem or not (signer.startswith(owner) or signer == self.learner):
            return _not_of(name)
        return self._problem_of_age(topic, key, signer, order, name=name)

    def open_held(self, topic: Topic[Any], key: str, data: bytes, *, is_namesakes: bool = False) -> Opened:
        """A record of who holds something: where we sign, it counts if its holder has signed it, and lately.

        is_namesakes  only a process with our key may hold it
        """
        if self._own is None:
            return self._opened(topic.name, key, data, is_learners=False)[0]
        signer, order, problem = self._verified(topic.name, key, data)
        if problem:
            return Opened(b"", problem)
        message = memoryview(data)[_HEAD.size :]
        holder = bytes(message[:_LONGEST_NAME]).decode(errors="replace")
        owner = self._own.public if is_namesakes else self._bound(holder)
        problem = "" if signer.startswith(owner) else _not_of(holder)
        return Opened(message, problem or self._problem_of_age(topic, key, signer, order, name=holder), signer)

    def _problem_of_age(self, topic: Topic[Any], key: str, signer: str, order: Order, *, name: str) -> str:
        if topic.kind != "state":  # a log has a place for each key once
            return ""
        if self.heard.is_old((topic.name, key, signer), order, seconds_to_live=topic.seconds_to_live):
            return f"is an old message of {name[:100]!r}, said again by somebody"
        return ""

    def seen(self) -> Seen:
        """What has been taken until now, for a reader that begins."""
        return dict(self._seen)

    def supersedes(self, topic: Topic[Any], key: str, data: bytes, ours: bytes) -> bool:
        """Whether a state may stand where we put ``ours``: the learner said it, and not before."""
        opened, order = self._opened(topic.name, key, data, is_learners=topic.is_learners)
        if opened.problem or order is None:
            return not opened.problem
        _, _, *our_order, _ = _HEAD.unpack_from(ours)
        return order >= tuple(our_order)

    def seal_answer(self, service: Service[Any, Any], question: bytes, data: bytes) -> bytes:
        """It holds for this very question."""
        return self._sealed(f"answer of {service.name}", _digest_text(question), data)

    def open_answer(self, service: Service[Any, Any], question: bytes, data: bytes) -> Opened:
        where, key = f"answer of {service.name}", _digest_text(question)
        if service.is_namesakes and self._own is not None and self._verified(where, key, data)[0] != self._own.public:
            return Opened(b"", "is of somebody with another key")
        return self._opened(where, key, data, is_learners=service.is_answer_signed)[0]

    def _sealed(self, where: str, key: str, data: bytes) -> bytes:
        if self._own is None:
            return data
        order = (self._life, next(self._sequence))
        signer = bytes.fromhex(self._own.public)
        signature = self._own.signature(self._digest(_MARK, where, key, signer, order, data))
        return _HEAD.pack(_MARK, signer, *order, signature) + data

    def _opened(self, where: str, key: str, data: bytes, *, is_learners: bool) -> tuple[Opened, Order | None]:
        """The order of what the learner said; of what others did, None."""
        if data[:1] != _MARK[:1]:
            if is_learners and self.learner:
                return Opened(b"", "is not signed by the run's learner"), None
            return Opened(data), None
        if len(data) < _HEAD.size or bytes(data[:2]) not in _DIGESTS:
            return Opened(b"", "its signature is cut off, or of another version"), None
        message, signer = memoryview(data)[_HEAD.size :], data[2:34].hex()
        if not is_learners or not (self.learner or self._learns):
            return Opened(message, signer=signer), None
        if self.learner and signer != self.learner:
            return Opened(b"", f"is signed by {signer[:8]}..., the run's learner is {self.learner[:8]}..."), None
        _, order, problem = self._verified(where, key, data)
        if problem:
            return Opened(b"", problem), None
        self.learner = signer
        return Opened(message, signer=signer), order

    def _verified(self, where: str, key: str, data: bytes) -> tuple[str, Order, str]:
        """Who signed it, its order, and what is wrong with the signature."""
        if len(data) < _HEAD.size or bytes(data[:2]) not in _DIGESTS:
            return "", (0, 0), "is not signed"
        mark, public, life, sequence, signature = _HEAD.unpack_from(data)
        digest = self._digest(mark, where, key, public, (life, sequence), memoryview(data)[_HEAD.size :])
        try:
            nacl.bindings.crypto_sign_open(signature + digest, public)
        except (nacl.exceptions.CryptoError, ValueError):
            return "", (0, 0), "has a signature that is wrong here"
        return public.hex(), (life, sequence), ""

    def _digest(
        self, mark: bytes, where: str, key: str, signer: bytes, order: Order, data: bytes | memoryview
    ) -> bytes:
        digest = _DIGESTS[mark](_CONTEXT)
        for part in (self._run, where, key):
            text = part.encode()
            digest.update(struct.pack(">I", len(text)) + text)
        digest.update(signer + struct.pack(">QQ", *order))
        digest.update(data)
        return bytes(digest.digest())


UNSIGNED: Final = Signatures()
"""Of who has no key and knows none: signs nothing, checks nothing."""


def _digest_text(question: bytes) -> str:
    return hashlib.sha256(question).hexdigest()


def _not_of(name: str) -> str:
    return f"is said in the name of {name[:100]!r} by somebody else"
