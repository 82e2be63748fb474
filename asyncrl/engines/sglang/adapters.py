"""LoRA adapters in an SGLang server: one per policy version, each loaded under its own name.

A request names the adapter that is current when it starts, and uses that adapter until it ends. So loading a version
pauses nothing, and no answer mixes versions. Each attempt to load has a new name, because the server may still hold the
adapter of the old one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.config.learner import VISION_TOWER, LoraSection
from asyncrl.engines.generation import Version, format_version
from asyncrl.engines.sglang.weights import Post
from asyncrl.errors import EngineDied, EngineError, WeightsError
from asyncrl.tensors.adapter_names import CONFIG_FILE, CUT_BY_INPUTS, module_name
from asyncrl.tensors.model_tensors import Shapes
from asyncrl.weights.port import LoadReport

log = logging.getLogger(__name__)

_AT_ONCE: Final = 8
"""Adapter versions that one batch may mix; requests for more versions wait. Each takes memory besides the weights."""
_AT_ONCE_OF_EXPERTS: Final = 2
"""The same if experts have adapters: those of a 30B model of rank 32 take 3.3 GB a version."""
_CANONICAL: Final = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""SGLang's names for the modules of Mixtral's experts (srt/lora/lora.py)."""


def server_arguments(lora: LoraSection | None, names: Iterable[str], *, device: str) -> dict[str, Any]:
    """Return the server options for such adapters.  names: the model's tensors"""
    if lora is None:
        return {}
    names = list(names)
    of_model = sorted({module_name(name) for name in names} - {""})
    modules = of_model if "all-linear" in lora.modules else lora.modules
    has_experts = adapts_experts(lora, names)
    return {
        "enable-lora": True,
        "max-lora-rank": lora.rank,
        "lora-target-modules": sorted({_CANONICAL.get(module, module) for module in modules}),
        "max-loras-per-batch": _AT_ONCE_OF_EXPERTS if has_experts else _AT_ONCE,
        **({"lora-backend": "torch_native"} if device == "cpu" else {"lora-backend": "triton"} if has_experts else {}),
    }


def buffer_bytes(lora: LoraSection | None, shapes: Shapes, *, given: Mapping[str, Any], ranks: int, width: int) -> int:
    """Return what the server reserves for such adapters on each of its GPUs: places for as many as a batch may mix.

    given   the server options that the user gives
    ranks   GPUs of the server, of which each has a part of one factor of an adapter, and the other whole
    width   bytes of a number
    """
    if lora is None:
        return 0
    numbers = 0
    for name, shape in shapes.items():
        if _is_adapted(lora, name) and len(shape) == 2 and not re.match(VISION_TOWER, name):
            outputs, inputs = shape
            cut, whole = (inputs, outputs) if module_name(name) in CUT_BY_INPUTS else (outputs, inputs)
            numbers += whole + cut // ranks
    options = server_arguments(lora, shapes, device="cuda") | dict(given)
    return width * numbers * int(options["max-lora-rank"]) * int(options["max-loras-per-batch"])


def adapts_experts(lora: LoraSection, names: Iterable[str]) -> bool:
    """Return whether experts are among the adapted matrices.  names: the model's tensors"""
    return any(".experts." in name and _is_adapted(lora, name) for name in names)


def _is_adapted(lora: LoraSection, name: str) -> bool:
    module = module_name(name)
    return bool(module) and ("all-linear" in lora.modules or module in lora.modules)


class Adapters:
    """The adapters of one server. Old versions are unloaded once unused."""

    def __init__(self, post: Post, *, first_version: Version) -> None:
        """``first_version`` is the version of the model without adapters."""
        self._post = post
        self._first_version = first_version
        self._loaded: dict[Version, str] = {}
        self._running: Counter[Version] = Counter()
        self.version = first_version
        """The version that new requests use."""

    async def load(self, version: Version, folder: Path) -> LoadReport:
        """Load a version for new requests. Raises EngineDied, or WeightsError, after which nothing has changed."""
        began = time.monotonic()
        if version not in (self._first_version, *self._loaded):
            name = f"v{version[0]}-{version[1]}-{uuid.uuid4().hex}"
            try:
                json.loads((folder / CONFIG_FILE).read_text())
                await self._load(name, folder)
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
        """Yield the version of a request that starts now, and the request fields that name its adapter.

        The version stays loaded inside the context.
        """
        version = self.version
        self._running[version] += 1
        try:
            yield version, {"lora_path": self._loaded[version]} if version in self._loaded else {}
        finally:
            self._running[version] -= 1

    async def _load(self, name: str, folder: Path) -> None:
        try:
            answer = await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
            if not answer.get("success"):
                raise EngineError(str(answer.get("error_message")))
        except EngineDied:
            raise
        except EngineError:
            await self._try_to_unload(name)  # it may be loaded, for example if the answer came too late
            raise

    async def _try_to_unload(self, name: str) -> None:
        try:
            await self._post("/unload_lora_adapter", {"lora_name": name})
        except EngineDied:
            raise
        except EngineError as error:  # an adapter that stays only takes memory
            log.info("the adapters %s were not unloaded: %s", name, error)

    async def _unload_unused(self) -> None:
        """Unload unused old versions. On an EngineError, stop; the next load tries again."""
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
