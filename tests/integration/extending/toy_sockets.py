"""A second memory-to-memory weight channel: over a socket, in place of RDMA or shared GPU memory."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from asyncrl.errors import WeightsError
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.adapter import PullReceiver
from asyncrl.weights.files import FilesChannel
from asyncrl.weights.port import Transfer, WeightUpdater

PATIENCE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    log: str = ""
    """File that receives one line per version that an engine took: the engine and the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The payload of this channel's offers."""

    port: int


class SocketChannel(FilesChannel):
    """weights.channel = "tests.integration.extending.toy_sockets:SocketChannel" """

    options_type = Options

    def __init__(self, directory: Path, *, keep: int, model_path: Path, options: Options) -> None:
        super().__init__(directory, keep=keep, model_path=model_path)
        self._sender = SocketSender(options.log)

    @property
    def sender(self) -> SocketSender:
        return self._sender

    def receiver(self, updater: WeightUpdater, *, engine: str) -> PullReceiver:
        return PullReceiver(updater, tensors, engine=engine)


def tensors(payload: bytes, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Runs in the engine, once for each offer."""
    address = decode(payload, Address)
    with socket.create_connection(("127.0.0.1", address.port), timeout=PATIENCE) as connection:
        data = connection.makefile("rb").read()
    for name, tensor in safetensors.torch.load(data).items():
        yield name, tensor.to(device)


class SocketSender:
    """See Sender in asyncrl/weights/port.py."""

    def __init__(self, log: str) -> None:
        self._log = log
        self._held: tuple[Snapshot, int, int] | None = None

    def set_weights(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> None:
        self._held = snapshot, incarnation, policy_version

    def withdraw(self) -> None:
        """The old weights are sent until the new ones are there."""

    def begin(self, request: TransferRequest) -> Transfer:
        if self._held is None:
            raise WeightsError("the learner has no weights to send yet")
        snapshot, incarnation, policy_version = self._held
        listener = socket.create_server(("127.0.0.1", 0))
        payload = encode(Address(port=listener.getsockname()[1]))
        offer = TransferOffer(incarnation=incarnation, policy_version=policy_version, payload=payload)

        def send() -> None:
            try:
                with listener:
                    listener.settimeout(PATIENCE)
                    connection, _ = listener.accept()
                with connection:
                    connection.sendall(safetensors.torch.save(dict(snapshot.tensors())))
            except OSError as error:
                raise WeightsError(f"the engine did not take its weights: {error}") from error
            if self._log:
                with Path(self._log).open("a") as log:
                    log.write(f"{request.engine} {policy_version}\n")

        return Transfer(offer=offer, send=send)

    def forget(self, *, engines: Collection[str]) -> None:
        """Nothing is kept of an engine."""
