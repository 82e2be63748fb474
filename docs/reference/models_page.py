"""docs/reference/models.md: the families that are trained, from asyncrl/backends/families."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Final

from asyncrl.backends.families.family import DENSE_ONLY, ROPE_TYPES, Family
from asyncrl.backends.families.table import MODULES
from asyncrl.data.model_folder import OF_REFERENCE_ALONE, REFUSED_ARCHITECTURES

HEAD: Final = """# Models

What the megatron backend trains, generated from `asyncrl/backends/families` by `python docs/reference/make.py`. A model
is a Hugging Face folder whose `config.json` names the architecture, with the values of the last column; others are
refused in one line. [Which sizes were trained](../results/performance.md).

| architecture | published models | only with |
|---|---|---|
{families}

Unless the last column says otherwise, all need {common}, and rotary positions of the types {rope}.

- **Tested.** A tiny model of every family agrees with transformers in logprobs, gradients, an optimizer step and
  exported weights (`tests/contracts/test_backend_families.py`). On an H200, SGLang 0.5.16 sampled from tiny models of
  [most families](../results/performance.md#families-with-sglang-on-a-gpu) and took a new version of each.
- **Multi-token-prediction layers** of DeepSeek-V3 and GLM-4.5 are trained with
  [`learner.options.draft_coefficient`](../guides/scaling.md#speculative-decoding), and else neither read nor exported;
  those of other families never are.
- **Linear attention** (Qwen3-Next, Qwen3.5): tensor- and context-parallel ranks divide its key heads among them. On
  GPUs in 16 bits the package flash-linear-attention computes it, if it is installed and works (on Hopper with Triton
  3.7.1 or newer). SGLang without a GPU and the in-process engine refuse it.
- **Qwen3.5** as published is a `...ForConditionalGeneration` and trains as it is. `asyncrl import-model` writes its
  text part alone, which SGLang serves from 0.5.23 on (not run yet).
- **[Images](../guides/images.md)**: the tower is frozen unless `learner.train_vision` is set.
- **DeepSeek-V3.2, GLM-5**: [sparse attention](../guides/scaling.md#sparse-attention).
- **gpt-oss**: its experts take no adapters.
- **MiniMax-M2**: `rotary_dim` and `rope_parameters` must say the same.

"""


FURTHER: Final = """## By the reference backend alone

`learner.backend = "reference"` trains all of the above and these as transformers computes them, on one device, with
all parameters: {names}.
`learner.freeze`, `learner.train_only` and adapters are refused. A tiny model of each agrees with transformers and the
in-process engine (`tests/contracts/test_reference_architectures.py`); with SGLang none was run. `model.family` brings
one to the megatron backend ([a family of your own](../develop/extending.md#family-of-models)).
"""


def page() -> str:
    head = HEAD.format(
        families="\n".join(map(_family, MODULES)),
        common=_only(DENSE_ONLY),
        rope=", ".join(f"`{kind}`" for kind in ROPE_TYPES),
    )
    refused = "\n".join(f"| `{name}` | {why} |" for name, why in sorted(REFUSED_ARCHITECTURES.items()))
    further = ", ".join(f"`{name}`" for name in OF_REFERENCE_ALONE)
    head += f"{FURTHER.format(names=further)}\n"
    return f"{head}## Not trained\n\n| architecture | why |\n|---|---|\n{refused}\n"


def _family(module: ModuleType) -> str:
    family: Family = module.FAMILY
    own = {key: values for key, values in family.only.items() if DENSE_ONLY.get(key) != values}
    return f"| `{family.architecture}` | {family.models} | {_only(own)} |"


def _only(keys: Mapping[str, tuple[object, ...]]) -> str:
    return ", ".join(f"`{key} = {' or '.join(_said(values))}`" for key, values in keys.items())


def _said(values: tuple[object, ...]) -> list[str]:
    """As JSON says them; none is as good as the first."""
    words = {True: "true", False: "false"}
    return [words[one] if isinstance(one, bool) else str(one) for one in values if one is not None] or ["null"]
