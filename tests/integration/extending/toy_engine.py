"""A custom engine: the in-process engine, with delayed answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.engines.generation import Generation
from asyncrl.engines.inprocess import engine as inprocess
from asyncrl.engines.inprocess.engine import InProcessEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(inprocess.Options):
    answer_seconds: float = 0.0
    """Time from a finished answer until it is returned."""


class LateEngine(InProcessEngine):
    """engine.kind = "tests.integration.extending.toy_engine:LateEngine" """

    options_type = Options

    def __init__(self, model_path: Path, *, device: str, dtype: str, version: Any, options: Options) -> None:
        super().__init__(model_path, device=device, dtype=dtype, version=version, options=options)
        self._answer_seconds = options.answer_seconds

    async def generate(self, *arguments: Any, **named: Any) -> Generation:
        answer = await super().generate(*arguments, **named)
        await asyncio.sleep(self._answer_seconds)
        return answer
