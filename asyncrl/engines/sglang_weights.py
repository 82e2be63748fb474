"""How new weights get into an SGLang server: pause, update from a folder or from the learner's memory, continue.

The server goes on only with whole weights: an update that failed half-way leaves it paused until another one succeeds
(test_a_torn_update_keeps_the_server_paused).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.engines import sglang_loader
from asyncrl.engines.checks import WEIGHTS_FILE, Shapes, check_layout
from asyncrl.engines.sglang_server import LOADER
from asyncrl.engines.spans import Version, format_version
from asyncrl.errors import EngineDied, EngineError, WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.protocols import LoadReport
from asyncrl.transfer_messages import BucketLayout, TransferOffer, TransferRequest

Post = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""POST a body to a path of the server; its answer. Raises EngineError, EngineDied."""
Order = tuple[str, dict[str, Any]]
"""Path and body."""

_FROM_FOLDER: Final = "/update_weights_from_disk"
_FROM_FILE: Final = "/update_weights_from_tensor"
_FROM_LEARNER: Final = "/update_weights_from_distributed"
_NO_VERSION: Final = (-1, -1)
"""Of a server left between two versions: whichever is offered is newer."""
_STUCK_SECONDS: Final = 90.0
"""A collective that the learner left never returns, and the server does nothing else meanwhile."""
_REACH_SECONDS: Final = 5.0
_SLOWEST_WEIGHTS_PER_SECOND: Final = 2e7
"""What a large model may take beside that; the learner gives up earlier."""


class WeightLoader:
    """Loads weights into one server, one version at a time."""

    def __init__(self, post: Post, *, pause: str, first_version: Version, is_open: asyncio.Event) -> None:
        """``is_open`` is cleared while the server is paused: new requests wait for it."""
        self._post = post
        self._pause = pause
        self._is_open = is_open
        self._lock = asyncio.Lock()
        self.version = first_version
        self.num_loads = 0
        self.has_sessions = False
        """Whether the server wants updates of tensors between a begin and an end (0.5.23 does)."""
        self.ranks_with_loader = 0
        """Of the server, when they have our loader of files (sglang_loader.py); 0 when SGLang's own reads them."""
        self._is_torn = False

    async def load(self, weights: WeightVersion, folder: Path) -> LoadReport:
        """From a folder whose tensors were checked.

        Raises WeightsError: the old weights stay, or the server stays paused; EngineDied where our loader cannot read
        the file, since an error in there ends the server.
        """
        body = self._body(weights.order)
        if not self.ranks_with_loader:
            updates = [(_FROM_FOLDER, {"model_path": str(folder)} | body)]
            return await self._switch(weights.order, updates, what=str(folder))
        try:
            stream = await asyncio.to_thread((folder / WEIGHTS_FILE).open, "rb")
        except OSError as error:
            raise WeightsError(f"{folder}: {error.strerror}; collected for newer versions?") from error
        # Open here, it is there until the server has read it, whoever removes the folder. (Only the end of the worker
        # cancels a load, and its server ends with it.)
        with stream:
            names = Path(f"/proc/{os.getpid()}/fd/{stream.fileno()}"), folder / WEIGHTS_FILE
            body["load_format"] = LOADER
            body["serialized_named_tensors"] = [sglang_loader.serialized(*names)] * self.ranks_with_loader
            updates = self._in_session([(_FROM_FILE, body)])
            return await self._switch(weights.order, updates, what=str(folder))

    async def receive(self, offer: TransferOffer, group: str) -> LoadReport:
        """From the learner, who has begun to send. Raises WeightsError."""
        updates = [
            (_FROM_LEARNER, _described(bucket) | {"group_name": group} | self._body(offer.order))
            for bucket in offer.buckets
        ]
        for _, body in updates[:-1]:
            del body["weight_version"]  # the last bucket makes it that version
        return await self._switch(offer.order, self._in_session(updates), what=f"group {group}")

    def _in_session(self, updates: list[Order]) -> list[Order]:
        if not self.has_sessions:
            return updates
        return [("/begin_weight_update", {}), *updates, ("/end_weight_update", {})]

    def _body(self, version: Version) -> dict[str, Any]:
        # Keys of requests in place cannot be flushed; those of retracted ones must be.
        return {"weight_version": format_version(version), "flush_cache": self._pause == "retract"}

    async def _switch(self, version: Version, updates: list[Order], *, what: str) -> LoadReport:
        asked = time.monotonic()
        async with self._lock:
            began = time.monotonic()
            self.num_loads += 1  # now: should an update succeed and its answer get lost, no old key is found
            self._is_open.clear()
            try:
                await self._post("/pause_generation", {"mode": self._pause})
                if self._is_torn and self.has_sessions:
                    with contextlib.suppress(EngineError):  # the one that failed may be open still
                        await self._post("/end_weight_update", {})
                for path, body in updates:
                    self._is_torn |= path != _FROM_FOLDER  # that the server rolls back
                    answer = await self._post(path, body)
                    if not answer.get("success"):
                        raise EngineError(str(answer.get("message")))
                self._is_torn = False
                self.version = version
            except EngineDied:
                raise
            except EngineError as error:
                if self._is_torn:
                    self.version = _NO_VERSION
                raise WeightsError(f"weights {format_version(version)} from {what}: {error}") from error
            finally:
                if not self._is_torn:
                    await self._continue()
            now = time.monotonic()
        return LoadReport(pause_seconds=now - began, load_seconds=now - asked)

    async def _continue(self) -> None:
        try:
            await self._post("/continue_generation", {})
        except EngineDied:
            raise
        except EngineError as error:
            raise EngineDied(f"the server stays paused: {error}") from error
        self._is_open.set()


class SGLangReceiver:
    """See Receiver in protocols/engine.py."""

    def __init__(
        self, post: Post, loader: WeightLoader, *, name: str, num_ranks: int, shapes: Shapes, optional: frozenset[str]
    ) -> None:
        """``name``: the engine's in the run. ``shapes``, ``optional``: tensors of the model and those it may lack."""
        self._post = post
        self._loader = loader
        self._engine = name
        self._num_ranks = num_ranks
        self._shapes, self._optional = shapes, optional
        self._group = ""
        self._has_joined = False
        self._rename()

    @property
    def request(self) -> TransferRequest:
        return TransferRequest(
            engine=self._engine, group=self._group, num_ranks=self._num_ranks, has_joined=self._has_joined
        )

    async def join(self, offer: TransferOffer) -> None:
        await _reach(offer.host, offer.port)  # the server would wait for minutes, and do nothing else
        body = {
            "master_address": offer.host,
            "master_port": offer.port,
            "rank_offset": 1,
            "world_size": 1 + self._num_ranks,
            "group_name": self._group,
            "backend": offer.collective,
        }
        hint = f"; can it reach the learner at {offer.host}:{offer.port} (weights.host)?"
        answer = await self._in_time("/init_weights_update_group", body, hint=hint)
        if not answer.get("success"):
            message = answer.get("message")
            self._rename()
            raise WeightsError(f"cannot meet the learner at {offer.host}:{offer.port}: {message}")
        self._has_joined = True

    async def receive(self, offer: TransferOffer) -> LoadReport:
        shapes = {
            name: tuple(shape)
            for bucket in offer.buckets
            for name, shape in zip(bucket.names, bucket.shapes, strict=True)
        }
        seconds = _STUCK_SECONDS + sum(map(math.prod, shapes.values())) / _SLOWEST_WEIGHTS_PER_SECOND
        try:
            check_layout(shapes, expected=self._shapes, optional=self._optional, where=f"group {self._group}")
            async with asyncio.timeout(seconds):
                return await self._loader.receive(offer, self._group)
        except TimeoutError:
            raise EngineDied(f"the learner did not send its weights within {seconds:g} s") from None
        except WeightsError:
            await self.leave()
            raise

    async def leave(self) -> None:
        left, has_joined = self._group, self._has_joined
        self._rename()
        if has_joined:
            await self._in_time("/destroy_weights_update_group", {"group_name": left})

    def _rename(self) -> None:
        self._group = f"{self._engine}-{uuid.uuid4().hex[:8]}"
        self._has_joined = False

    async def _in_time(self, path: str, body: Mapping[str, Any], *, hint: str = "") -> Any:
        try:
            async with asyncio.timeout(_STUCK_SECONDS):
                return await self._post(path, body)
        except TimeoutError:
            raise EngineDied(f"{path}: no answer in {_STUCK_SECONDS:g} s{hint}") from None
        except EngineDied:
            raise
        except EngineError as error:
            return {"success": False, "message": str(error)}


async def _reach(host: str, port: int) -> None:
    """Raises WeightsError when nobody listens there."""
    try:
        async with asyncio.timeout(_REACH_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        reason = str(error) or f"no answer in {_REACH_SECONDS:g} s"
        raise WeightsError(
            f"cannot reach the learner at {host}:{port}: {reason}; set weights.host to its address as engines see it"
        ) from error
    writer.close()


def _described(bucket: BucketLayout) -> dict[str, Any]:
    return {
        "names": list(bucket.names),
        "dtypes": list(bucket.dtypes),
        "shapes": [list(shape) for shape in bucket.shapes],
        "load_format": "flattened_bucket",
    }
