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
LEFT: Final = """
## Without a key

| what holds here | Megatron |
|---|---|
"""


def page() -> str:
    flags: dict[str, list[str]] = {}
    for name, why in sorted(LEFT_OUT.items()):
        flags.setdefault(why, []).append(f"`{name}`")
    left = "".join(f"| {why} | {', '.join(names)} |\n" for why, names in flags.items())
    return HEAD + "".join(f"| `{name}` | `{key}` |\n" for name, key in sorted(KEYS.items())) + LEFT + left
