"""docs/reference/megatron.md: Megatron's optimizer, gradient and schedule flags, from asyncrl/backends/megatron."""

from __future__ import annotations

from typing import Final

from asyncrl.backends.megatron.left_out import LEFT_OUT
from asyncrl.backends.megatron.transformer_config import KEYS

HEAD: Final = """# Megatron's flags

Any field of Megatron's TransformerConfig that asyncrl does not decide is set by name under `[learner.megatron]`. The
fields of its OptimizerConfig and DistributedDataParallelConfig, and the flags of its schedule, are keys of the run file
here, or have no meaning. `asyncrl check` says the same of a name that is set there. `python docs/reference/make.py`
generates this page.

| Megatron | asyncrl |
|---|---|
"""


def page() -> str:
    rows = {name: f"`{key}`" for name, key in KEYS.items()} | dict(LEFT_OUT)
    return HEAD + "".join(f"| `{name}` | {said} |\n" for name, said in sorted(rows.items()))
