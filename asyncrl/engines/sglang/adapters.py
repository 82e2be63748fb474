"""Adapters in an SGLang server, one per policy version and each under a name of its own: a request names the one that
it begins with and ends with it, so a new version pauses nothing and no answer has tokens of two.

A name is never used twice: the server may still hold what it had under it.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from asyncrl.config.learner import LoraSection
from asyncrl.engines.sglang.weights import Post
from asyncrl.engines.version_spans import Version, format_version
from asyncrl.errors import EngineDied, EngineError, WeightsError
from asyncrl.protocols import LoadReport
from asyncrl.tensors.adapter_names import CONFIG_FILE, module_of

_AT_ONCE: Final = 8
"""Versions that a batch may have tokens of; requests of others wait. Each takes room beside the weights."""


def server_arguments(lora: LoraSection | None, names: Iterable[str], *, device: str) -> dict[str, Any]:
    """Options of a server that is to have such adapters.  names: the model's tensors"""
    if lora is None:
        return {}
    of_model = sorted({module_of(name) for name in names} - {""})
    return {
        "enable-lora": True,
        "max-lora-rank": lora.rank,
        "lora-target-modules": of_model if "all-linear" in lora.modules else list(lora.modules),
        "max-loras-per-batch": _AT_ONCE,
        **({"lora-backend": "torch_native"} if device == "cpu" else {}),
    }


class Adapters:
    """Those of one server. Unused old ones are unloaded."""

    def __init__(self, post: Post, *, first_version: Version) -> None:
        """``first_version``: of the model without adapters."""
        self._post = post
        self._owner = uuid.uuid4().hex[:8]
        self._first_version = first_version
        self._loaded: dict[Version, str] = {}
        self._running: Counter[Version] = Counter()
        self.version = first_version
        """Of new requests."""

    async def load(self, version: Version, folder: Path) -> LoadReport:
        """Requests from now on have these. Raises WeightsError, which changes nothing, or EngineDied."""
        began = time.monotonic()
        if version not in (self._first_version, *self._loaded):
            name = f"v{version[0]}-{version[1]}-{self._owner}"
            try:
                json.loads((folder / CONFIG_FILE).read_text())
                answer = await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
                if not answer.get("success"):
                    raise EngineError(str(answer.get("error_message")))
            except EngineDied:
                raise
            except (EngineError, OSError, ValueError) as error:
                raise WeightsError(f"adapters {format_version(version)} from {folder}: {error}") from error
            self._loaded[version] = name
        self.version = version
        await self._unload_unused()
        return LoadReport(pause_seconds=0.0, load_seconds=time.monotonic() - began)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[tuple[Version, dict[str, str]]]:
        """The version of a request that begins now, which stays loaded inside, and how the request names it."""
        version = self.version
        self._running[version] += 1
        try:
            yield version, {"lora_path": self._loaded[version]} if version in self._loaded else {}
        finally:
            self._running[version] -= 1

    async def _unload_unused(self) -> None:
        """Fails silently: what stays is tried again with the next version, and a dead server is noticed elsewhere."""
        for version in [old for old in self._loaded if old != self.version and not self._running[old]]:
            name = self._loaded.pop(version)
            del self._running[version]
            try:
                await self._post("/unload_lora_adapter", {"lora_name": name})
            except EngineDied:
                raise
            except EngineError:
                self._loaded[version] = name
                return
