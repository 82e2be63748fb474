"""Signs messages: an ed25519 signature precedes the message. Pure; the only file that imports nacl and blake3.

    0xC1 0x02   signer (32)   life (8)   sequence (8)   signature (64)   the message

No message begins with 0xC1 (msgpack never uses it), so recorded unsigned messages stay readable. The signature covers a
BLAKE3 digest of run, topic, key, signer, life, sequence and message, so none of them can be exchanged. Older versions
signed a SHA-256 digest; their second byte is 0x01. A life is one start of a process. A sequence rises within a life. A
reader of a state rejects a message of the learner that is older than the last one seen. From other signers it rejects
messages that are older by some seconds (freshness.py).

Every process that knows the learner's key checks the learner's topics (``Topic.is_learners``) and the offers of
``transfers``. Tests: tests/unit/messages/test_signing.py, tests/contracts/test_bus_signatures.py.
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
"""Mark -> digest that is signed. The digest is most of a signature's cost, and BLAKE3 takes a quarter of SHA-256's."""
_HEAD: Final = struct.Struct(">2s32sQQ64s")
_CONTEXT: Final = b"asyncrl message 1"
_SEED_BYTES: Final = 32
_PUBLIC_KEY: Final = re.compile("[0-9a-f]{64}")
_LONGEST_NAME: Final = 256

Seen = dict[tuple[str, str], Order]
"""Topic and key -> order of the newest message that a reader has accepted."""


class SigningKey:
    """The secret key of a key pair. ``public``: the public key, 64 hexadecimal digits."""

    def __init__(self, seed: bytes) -> None:
        public, self._secret = nacl.bindings.crypto_sign_seed_keypair(seed)
        self.public = public.hex()
        self._seed = seed

    @classmethod
    def generate(cls) -> SigningKey:
        return cls(nacl.bindings.randombytes(_SEED_BYTES))

    @classmethod
    def from_text(cls, text: str) -> SigningKey:
        """Parse a secret key. Raises ValueError."""
        if not _PUBLIC_KEY.fullmatch(text):
            raise ValueError("a signing key is 64 hexadecimal digits")
        return cls(bytes.fromhex(text))

    def text(self) -> str:
        """The secret key in the form that ``from_text`` parses."""
        return self._seed.hex()

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public!r})"

    def signature(self, digest: bytes) -> bytes:
        return nacl.bindings.crypto_sign(digest, self._secret)[:64]


def is_public_key(text: str) -> bool:
    return bool(_PUBLIC_KEY.fullmatch(text))


@dataclass(frozen=True, slots=True)
class Opened:
    """The bytes of a message, or the problem that rejects it.  signer: public key of the signer; "" if unsigned"""

    data: bytes | memoryview
    problem: str = ""
    signer: str = ""


class Signatures:
    """Signs and verifies the messages of one process; one instance for each connection to the bus.

    own      key that signs our messages; None leaves them unsigned
    life     life of this process; higher than that of any earlier process with the same key
    learner  public key of the learner; if empty, it is unknown and nothing is checked
    learns   whether to trust the first learner heard from then on
    bound    maps a name to the public key, or its first digits, of the process that owns the name; "" for a free name
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
        """Return signatures of the same process. Life, sequence and freshness are shared, but not the learner's states
        seen so far."""
        other = copy.copy(self)
        other._seen = {}
        return other

    def seal(self, topic: Topic[Any], key: str, data: bytes) -> bytes:
        """Return the message with our signature in front, if we have a key."""
        return self._sealed(topic.name, key, data)

    def open(self, topic: Topic[Any], key: str, data: bytes, *, seen: Seen | None = None) -> Opened:
        """Verify a message and strip its signature.

        ``seen``: the newest states that this reader has accepted, starting from those that its process had accepted
        when it began. Updated here. None: the newest states of all readers of the process; another may be ahead.
        """
        opened, order = self._opened(topic.name, key, data, is_learners=topic.is_learners)
        if opened.problem or order is None or topic.kind != "state":
            return opened
        place = (topic.name, key)
        seen = self._seen if seen is None else seen
        if order < seen.get(place, order):
            return Opened(b"", "is an old message of the learner, replayed by somebody else", opened.signer)
        seen[place] = order
        self._seen[place] = max(order, self._seen.get(place, order))
        return opened

    def impostor(self, topic: Topic[Any], key: str, data: bytes, *, name: str) -> str:
        """Why a message is not a current one of the process it names; "" if it is, or if anybody may use the name."""
        owner = self._bound(name)
        if not owner or topic.is_learners:
            return ""
        signer, order, problem = self._verified(topic.name, key, data)
        if problem or not (signer.startswith(owner) or signer == self.learner):
            return _not_of(name)
        return self._problem_of_age(topic, key, signer, order, name=name)

    def open_held(self, topic: Topic[Any], key: str, data: bytes, *, is_namesakes: bool = False) -> Opened:
        """Open a record of a holder. If we have a key, the record counts only if its holder signed it recently.

        is_namesakes  only a process with our key may be the holder
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
        if topic.kind != "state":  # a log takes each key only once
            return ""
        if self.heard.is_old((topic.name, key, signer), order, seconds_to_live=topic.seconds_to_live):
            return f"is an old message of {name[:100]!r}, replayed by somebody else"
        return ""

    def seen(self) -> Seen:
        """Return what this process has accepted until now, for a reader that begins."""
        return dict(self._seen)

    def supersedes(self, topic: Topic[Any], key: str, data: bytes, ours: bytes) -> bool:
        """Whether a state may stay where we put ``ours``: the learner signed it, not before ``ours``."""
        opened, order = self._opened(topic.name, key, data, is_learners=topic.is_learners)
        if opened.problem or order is None:
            return not opened.problem
        _, _, *our_order, _ = _HEAD.unpack_from(ours)
        return order >= tuple(our_order)

    def seal_answer(self, service: Service[Any, Any], question: bytes, data: bytes) -> bytes:
        """Sign an answer. The signature is valid only for this question."""
        return self._sealed(f"answer of {service.name}", _digest_text(question), data)

    def open_answer(self, service: Service[Any, Any], question: bytes, data: bytes) -> Opened:
        where, key = f"answer of {service.name}", _digest_text(question)
        if service.is_namesakes and self._own is not None and self._verified(where, key, data)[0] != self._own.public:
            return Opened(b"", "is not signed with our key")
        return self._opened(where, key, data, is_learners=service.is_answer_signed)[0]

    def _sealed(self, where: str, key: str, data: bytes) -> bytes:
        if self._own is None:
            return data
        order = (self._life, next(self._sequence))
        signer = bytes.fromhex(self._own.public)
        signature = self._own.signature(self._digest(_MARK, where, key, signer, order, data))
        return _HEAD.pack(_MARK, signer, *order, signature) + data

    def _opened(self, where: str, key: str, data: bytes, *, is_learners: bool) -> tuple[Opened, Order | None]:
        """Strip a signature. Verify it and return its order only on the learner's topics; elsewhere it is None."""
        if data[:1] != _MARK[:1]:
            if is_learners and self.learner:
                return Opened(b"", "is not signed by the run's learner"), None
            return Opened(data), None
        if len(data) < _HEAD.size or bytes(data[:2]) not in _DIGESTS:
            return Opened(b"", "its signature is truncated or has another version"), None
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
        """Return the signer, the order, and the problem of the signature."""
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
"""For a process without keys: signs nothing, checks nothing."""


def _digest_text(question: bytes) -> str:
    return hashlib.sha256(question).hexdigest()


def _not_of(name: str) -> str:
    return f"bears the name {name[:100]!r} but was signed by another process"
