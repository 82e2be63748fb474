"""Base class of engines. engines/port.py specifies what engines must do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, cast

from asyncrl.config.adapter import Adapter, RunConfig
from asyncrl.engines.port import Engine
from asyncrl.tensors.device import require_gpu, resolve_device
from asyncrl.weights.port import WeightUpdater

FIRST_VERSION = (0, 0)
"""(incarnation, policy version) of the weights in model.path."""


class EngineAdapter(Adapter):
    """Defaults for an engine that reads model.path and uses one GPU."""

    section: ClassVar[str] = "engine"

    takes: ClassVar[frozenset[str]] = frozenset()
    """What the engine can load besides whole models in their trained dtype: "adapters" (learner.lora.publish), and
    values of weights.quantization."""

    generates: ClassVar[bool] = True
    """False for an engine that serves only rollout functions without generation."""

    reads_images: ClassVar[bool] = False
    """Whether prompts may show images (``generate(images=...)``)."""

    @classmethod
    def why_no_experts(cls, run: RunConfig) -> str:
        """Return why generations cannot report the experts of each token (Generation.experts); "" if they can.

        If so, ``build`` passes ``reports_experts`` to the constructor when ``run.rollout.routing_replay`` is "on".
        """
        return f'engine.kind = "{run.engine.kind}" does not report its experts'

    @classmethod
    def context_tokens(cls, run: RunConfig, *, of_model: int) -> int:
        """Return how many tokens a prompt and its answer may have together.

        of_model  context length of the model in tokens, which is the limit unless the engine takes less
        """
        return of_model

    @classmethod
    def check_weight_updater(cls, run: RunConfig) -> None:
        """Refuse options with which the engine cannot receive weights from the learner's memory
        (``weight_updater``)."""

    @classmethod
    def build(cls, run: RunConfig, *, name: str) -> Engine:
        """Create the engine of rollout worker ``name`` without starting it.

        ``run.rollout.routing_replay`` is "on" or "off".
        """
        return cast(Any, cls)(  # type: ignore[no-any-return]
            Path(run.model.path),
            device=resolve_device(run.engine.device, section="engine"),
            dtype=run.model.dtype,
            version=FIRST_VERSION,
            options=cls.options(run),
            **({"reports_experts": True} if run.rollout.routing_replay == "on" else {}),
            **({"is_exact": True} if run.run.exact else {}),
        )

    @classmethod
    def check_machine(cls, run: RunConfig) -> None:
        if run.engine.device == "cuda":
            require_gpu("engine")

    @classmethod
    def check_device(cls, run: RunConfig, device: str) -> None:
        """Refuse what the engine cannot do on ``device``, "cpu" or "cuda", of this machine or of another."""

    @classmethod
    def num_gpus(cls, run: RunConfig) -> int:
        return int(run.engine.device != "cpu")

    @classmethod
    def gpu_bytes(cls, run: RunConfig) -> int:
        """Return the least that the engine reserves of a GPU that it shares with the learner (LimitsMemory), an
        estimate; 0 if it takes memory as it needs it, or as the user says."""
        return 0

    @classmethod
    def machines(cls, run: RunConfig) -> int:
        """Return over how many machines one engine runs. With several it is SpansMachines."""
        return 1

    @property
    def weight_updater(self) -> WeightUpdater | None:
        """None: the engine only loads folders. See Engine."""
        return None
