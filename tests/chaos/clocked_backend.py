"""The tiny policy's backend, in a learner whose clock a test can set back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.trouble import follow_clock
from tests.harness.tiny import backend as tiny_backend
from tests.harness.tiny.backend import TinyBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(tiny_backend.Options):
    clock: str = ""
    """Names the folder that controls the clock."""


class ClockedBackend(TinyBackend):
    """learner.backend = "tests.chaos.clocked_backend:ClockedBackend" """

    options_type = Options

    def __init__(self, model_path: Path, *, options: Options, **named: Any) -> None:
        super().__init__(model_path, options=options, **named)
        follow_clock(Path(options.clock), role="learner")
