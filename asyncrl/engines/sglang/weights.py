"""Loads weights into an SGLang server: pause, update from a folder or from the learner's memory, continue.

The server continues only with complete weights. A partial update leaves it paused until another update succeeds
(test_a_torn_update_keeps_the_server_paused).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.engines.generation import Version, format_version
from asyncrl.engines.sglang import loader, receiving
from asyncrl.engines.sglang.client import Places
from asyncrl.engines.sglang.options import LOADER
from asyncrl.engines.sglang.versions import Stamps
from asyncrl.errors import EngineDied, EngineError, WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.messages.weight_transfer import BucketLayout
from asyncrl.tensors import weight_files
from asyncrl.tensors.model_tensors import Shapes, check_layout
from asyncrl.weights.port import LoadReport, Source

Post = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""POSTs a body to a path of the server and returns the response. Raises EngineError, EngineDied."""
Update = tuple[str, dict[str, Any]]
"""Path and body of a request."""

_FROM_FOLDER: Final = "/update_weights_from_disk"
_BY_LOADER: Final = "/update_weights_from_tensor"
_FROM_LEARNER: Final = "/update_weights_from_distributed"
_BEGIN: Final = "/begin_weight_update"
_END: Final = "/end_weight_update"
_IS_CLOSED: Final = "no weight-update session is open"
"""In the answer to _END (weight_updater.py of 0.5.23; 0.5.16 has no sessions)."""
_UNCHANGED: Final = "Failed to get model loader"
"""In the answer to _FROM_FOLDER if every rank refused it before it changed anything. Any other failure may come after
a change: a load that broke off is "rolled back" to the same folder, a cache that is not flushed fails a load that
happened, and an answer may be lost (weight_updater.py of 0.5.16 and 0.5.23)."""
_NO_FILES: Final = "Failed to get weights iterator"
"""In that answer if the rank that answers found no files, before it changed anything. Others may have found them."""
_NO_VERSION: Final = (-1, -1)
"""Version of a server with partly updated weights; any offered version is newer."""
_STUCK_SECONDS: Final = 90.0
"""Timeout of a collective. If the learner leaves, the collective never returns and blocks the server."""
_SLOWEST_WEIGHTS_PER_SECOND: Final = 2e7
"""Rate that extends the timeout for a large model. The learner gives up earlier."""


class WeightLoader:
    """Loads weights into one server, one version at a time."""

    def __init__(self, post: Post, *, pause: str, first_version: Version, stamps: Stamps, places: Places) -> None:
        """``places`` are closed while the server is paused; new requests wait for them."""
        self._post = post
        self._pause = pause
        self._places = places
        self._lock = asyncio.Lock()
        self.version = first_version
        self._stamps = stamps
        self.num_loads = 0
        self.has_sessions = False
        """Whether the server needs tensor updates between a begin and an end request (0.5.23 does)."""
        self.ranks_with_loader = 0
        """Ranks of the server if they have our loader (loader.py); 0 if SGLang's own loader is used."""
        self.is_whole = False
        """Whether one process of the server has all weights, so its answer to a load is that of every rank."""
        self.keeps_draft = False
        """Whether the server has a draft model that loads must leave alone."""
        self.finds_groups = True
        """False once our loader has not found a group that the server had joined."""
        self.is_held = False
        """Whether the server stays paused for another process."""
        self._is_torn = False
        self._knows_session = True

    def doubt_session(self) -> None:
        """Note that an earlier process may have left a session open; the next load ends it first."""
        self._knows_session = False

    @contextlib.contextmanager
    def in_use(self) -> Iterator[tuple[Version, dict[str, str]]]:
        """Yield the version that a request starts with; a load may change it inside. No adapter is named."""
        yield self.version, {}

    async def hold(self) -> None:
        """Keep the server paused, through loads too, until ``let_go``."""
        async with self._lock:
            await self._places.close()  # what is sent before a load would be labelled with both versions
            await self._post("/pause_generation", {"mode": "in_place"})
            self.is_held = True

    async def let_go(self) -> None:
        async with self._lock:
            self.is_held = False
            if not self._is_torn:
                await self._continue()

    async def load(self, weights: WeightVersion, folder: Path) -> LoadReport:
        """Load a folder whose tensors have been checked.

        Raises WeightsError, after which the old weights stay or the server stays paused. Raises EngineDied if our
        loader cannot read the file, since an error in the loader kills the server.
        """
        # The files are held open, so our loader can read them even if the folder is removed. (A load is cancelled only
        # when the worker exits, and a server with our loader, which we launched, exits with it.)
        with contextlib.ExitStack() as stack:
            try:
                paths = await asyncio.to_thread(weight_files.paths, folder)
                streams = [stack.enter_context(await asyncio.to_thread(path.open, "rb")) for path in paths]
            except OSError as error:
                raise WeightsError(f"{folder}: {error.strerror}; removed to make room for newer versions?") from error
            if not self.ranks_with_loader:
                updates = [(_FROM_FOLDER, {"model_path": str(folder)} | self._body(weights.version))]
                files = () if self.is_whole else paths
                return await self._switch(weights.version, updates, what=str(folder), files=files)
            held = [Path(f"/proc/{os.getpid()}/fd/{stream.fileno()}") for stream in streams]
            instruction = loader.serialize_files(*zip(held, paths, strict=True))
            return await self.load_with_loader(weights.version, instruction, what=str(folder))

    async def load_with_loader(self, version: Version, instruction: str, *, what: str) -> LoadReport:
        """Run an instruction of our loader. Raises WeightsError if the server lacks the loader, EngineDied if it
        fails."""
        if not self.ranks_with_loader:
            raise WeightsError(
                f"weights {format_version(version)} from {what}: this SGLang server lacks asyncrl's loader; only "
                "servers that asyncrl launches have it, with one or two GPUs and without FP8"
            )
        return await self._switch(version, self._in_session([self._by_loader(version, instruction)]), what=what)

    @property
    def receives(self) -> bool:
        """Whether our loader receives from NCCL groups itself, all buckets in one order."""
        return self.ranks_with_loader > 0 and self.finds_groups

    async def receive(self, version: Version, parts: receiving.Parts, *, is_nccl: bool) -> LoadReport:
        """Receive each group's buckets from the learner, which has begun to send. Raises WeightsError.

        Gloo's groups are left to SGLang: if one breaks, it reports an error, and a folder repairs its weights. An error
        in our loader would kill it. With NCCL a server whose learner is gone is lost anyway (_STUCK_SECONDS).
        """
        what = f"group {parts[0][0]}"
        if is_nccl and self.receives:
            problem = Path(tempfile.gettempdir()) / f"asyncrl-{uuid.uuid4().hex}"
            update = self._by_loader(version, loader.serialize_groups(parts, problem=problem))
            return await self._switch(version, self._in_session([update]), what=what, problem=problem)
        updates = [
            (_FROM_LEARNER, _describe_bucket(bucket) | {"group_name": group} | self._body(version) | self._for_policy)
            for group, buckets in parts
            for bucket in buckets
        ]
        for _, body in updates[:-1]:
            del body["weight_version"]  # set with the last bucket only
        return await self._switch(version, self._in_session(updates), what=what)

    def _by_loader(self, version: Version, instruction: str) -> Update:
        body = self._body(version) | self._for_policy
        body["load_format"] = LOADER
        body["serialized_named_tensors"] = [instruction] * self.ranks_with_loader
        return _BY_LOADER, body

    @property
    def _for_policy(self) -> dict[str, Any]:
        """What a request needs so that a draft model stays as it is, by 0.5.23 and by 0.5.16."""
        if not self.keeps_draft:
            return {}
        return {"selector": "target"} if self.has_sessions else {"disable_draft_model": True}

    def _in_session(self, updates: list[Update]) -> list[Update]:
        return [(_BEGIN, {}), *updates, (_END, {})] if self.has_sessions else updates

    def _body(self, version: Version) -> dict[str, Any]:
        # The KV cache of requests kept in place cannot be flushed; the cache of retracted requests must be.
        return {"weight_version": self._stamps.format(version), "flush_cache": self._pause == "retract"}

    async def _switch(
        self,
        version: Version,
        updates: list[Update],
        *,
        what: str,
        problem: Path | None = None,
        files: Sequence[Path] = (),
    ) -> LoadReport:
        """Pause, update, continue.

        problem  the file in which our loader says why it did nothing
        files    what each of several ranks reads by its path. The server answers for one rank only, so the load counts
                 if no file was removed meanwhile
        """
        asked = time.monotonic()
        async with self._lock:
            self.num_loads += 1  # before the update: if it succeeds but its response is lost, no old key may be reused
            was_torn = self._is_torn
            try:
                await self._places.close()
                began = time.monotonic()
                await self._post("/pause_generation", {"mode": self._pause})
                if self.has_sessions and (self._is_torn or not self._knows_session):
                    await self._end_open_session()
                    self._knows_session = True
                for path, body in updates:
                    self._is_torn = True
                    await self._control(path, body)
                if problem is not None and (reason := _read_problem(problem)):
                    self.finds_groups = False
                    raise EngineError(f"our loader in the server cannot receive: {reason}; from now on SGLang's does")
                if gone := await asyncio.to_thread(_first_missing, files):
                    raise EngineError(f"{gone} was removed during the load, so some ranks may lack its weights")
                self._is_torn = False
                self.version = version
            except EngineDied:
                raise
            except EngineError as error:
                if _UNCHANGED in str(error) or (self.is_whole and _NO_FILES in str(error)):
                    self._is_torn = was_torn
                if self._is_torn:
                    self.version = _NO_VERSION
                raise WeightsError(f"weights {format_version(version)} from {what}: {error}") from error
            finally:
                if not self._is_torn:
                    await self._continue()
            now = time.monotonic()
        return LoadReport(pause_seconds=now - began, load_seconds=now - asked)

    async def _end_open_session(self) -> None:
        """End the session that a failed load may have left open."""
        try:
            await self._control(_END, {})
        except EngineError as error:
            if isinstance(error, EngineDied) or _IS_CLOSED not in str(error):
                raise

    async def _control(self, path: str, body: Mapping[str, Any]) -> None:
        answer = await self._post(path, body)
        if not answer.get("success"):
            raise EngineError(str(answer.get("message")))

    async def _continue(self) -> None:
        if self.is_held:
            return
        try:
            await self._post("/continue_generation", {})
        except EngineDied:
            raise
        except EngineError as error:
            raise EngineDied(f"the server stays paused: {error}") from error
        self._places.is_open.set()


class SGLangUpdater:
    """See BroadcastUpdater in weights/port.py."""

    def __init__(
        self, post: Post, loader: WeightLoader, *, num_ranks: int, shapes: Shapes, optional: frozenset[str]
    ) -> None:
        """``shapes`` are the model's tensors; ``optional`` names those that may be absent."""
        self._post = post
        self._loader = loader
        self._shapes = shapes
        self._optional = optional
        self._kinds: dict[str, str] = {}  # by name of a joined group
        self.num_ranks = num_ranks

    @property
    def buckets_at_once(self) -> int:
        return receiving.AT_ONCE if self._loader.receives else 1

    @property
    def can_update(self) -> bool:
        return self._loader.ranks_with_loader > 0

    async def update(self, version: Version, source: Source, payload: bytes) -> LoadReport:
        instruction = loader.serialize_source(source, payload, expected=self._shapes, optional=self._optional)
        return await self._in_time(
            self._loader.load_with_loader(version, instruction, what=source.__module__), self._shapes
        )

    async def join(self, group: str, *, host: str, port: int, kind: str) -> None:
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + self.num_ranks,
            "group_name": group,
            "backend": kind,
        }
        hint = f"; can it reach the learner at {host}:{port} (weights.options.host)?"
        answer = await self._answer("/init_weights_update_group", body, hint=hint)
        if not answer.get("success"):
            raise WeightsError(f"cannot meet the learner at {host}:{port}: {answer.get('message')}")
        self._kinds[group] = kind

    async def receive(self, version: Version, parts: receiving.Parts) -> LoadReport:
        shapes = {
            name: tuple(shape)
            for _, buckets in parts
            for bucket in buckets
            for name, shape in zip(bucket.names, bucket.shapes, strict=True)
        }
        check_layout(shapes, expected=self._shapes, optional=self._optional, where=f"group {parts[0][0]}")
        is_nccl = all(self._kinds.get(group) == "nccl" for group, _ in parts)
        return await self._in_time(self._loader.receive(version, parts, is_nccl=is_nccl), shapes)

    async def leave(self, group: str) -> None:
        self._kinds.pop(group, None)
        await self._answer("/destroy_weights_update_group", {"group_name": group})

    async def _in_time(self, switch: Awaitable[LoadReport], shapes: Shapes) -> LoadReport:
        seconds = _STUCK_SECONDS + sum(map(math.prod, shapes.values())) / _SLOWEST_WEIGHTS_PER_SECOND
        try:
            async with asyncio.timeout(seconds):
                return await switch
        except TimeoutError:
            raise EngineDied(f"the learner did not send its weights within {seconds:g} s") from None

    async def _answer(self, path: str, body: Mapping[str, Any], *, hint: str = "") -> Any:
        try:
            async with asyncio.timeout(_STUCK_SECONDS):
                return await self._post(path, body)
        except TimeoutError:
            raise EngineDied(f"{path}: no response within {_STUCK_SECONDS:g} s{hint}") from None
        except EngineDied:
            raise
        except EngineError as error:
            return {"success": False, "message": str(error)}


def _read_problem(problem: Path) -> str:
    """Read and remove the file; return an empty string if there is none."""
    try:
        reason = problem.read_text()
        problem.unlink()
    except FileNotFoundError:
        return ""
    return reason


def _first_missing(files: Sequence[Path]) -> Path | None:
    return next((file for file in files if not file.exists()), None)


def _describe_bucket(bucket: BucketLayout) -> dict[str, Any]:
    return {
        "names": list(bucket.names),
        "dtypes": list(bucket.dtypes),
        "shapes": [list(shape) for shape in bucket.shapes],
        "load_format": "flattened_bucket",
    }
