"""docs/reference/models.md: the families that are trained, from asyncrl/backends/families."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Final

from asyncrl.backends.families.family import DENSE_ONLY, ROPE_TYPES, Family
from asyncrl.backends.families.table import MODULES
from asyncrl.data.model_folder import OF_REFERENCE_ALONE, REFUSED_ARCHITECTURES

HEAD: Final = """# Models

What the megatron backend trains, generated from `asyncrl/backends/families` by `python docs/reference/make.py`. A model
is a Hugging Face folder whose `config.json` names the architecture. A tiny model of every family agrees with
transformers in logprobs, gradients, one optimizer step and exported weights
(`tests/contracts/test_backend_families.py`, `test_backend_images.py`). A real SGLang server on a CPU took the weights
of tiny mixtures (Qwen3-MoE, GLM-4.5) and sampled from them (`tests/integration/sglang/test_transfers.py`,
`tests/unit/engines/sglang/test_server.py`). On an H200, SGLang 0.5.16 sampled from small models with heads of real
sizes and took a new version of each: GLM-4, GLM-4.5, GLM-4.7-Flash, Llama, MiniMax-M2, Mistral, Mixtral, Qwen2,
Qwen2-MoE and Qwen3-MoE; its logprobs differ from Megatron's by 0.01 to 0.03 nats on average
(`tests/integration/sglang/test_on_gpu.py`, which has further families that were not served yet). Which published sizes
were trained is in
[results](../results/performance.md). `learner.backend = "reference"` trains these, too, on one device, and
[further ones](#by-the-reference-backend-alone).

All families are mapped with {common}, and with rotary positions of the types {rope}.
Multi-token-prediction layers are neither read nor exported, except where a family trains them. What else is mapped of a
family, and with which values of its keys, is below; a model with others is refused in one line.

"""


FURTHER: Final = """## By the reference backend alone

`learner.backend = "reference"` trains any of these as transformers computes it, on one device, with all parameters:
{names}.
`learner.freeze`, `learner.train_only` and adapters are refused. A tiny model of each agrees with transformers and the
in-process engine (`tests/contracts/test_reference_architectures.py`); with SGLang none was run. `model.family` brings
one to the megatron backend ([a family of your own](../develop/extending.md#family-of-models)).
"""


def page() -> str:
    families = "\n".join(map(_family, MODULES))
    head = HEAD.format(common=_only(DENSE_ONLY), rope=", ".join(f"`{kind}`" for kind in ROPE_TYPES))
    refused = "\n".join(f"| `{name}` | {why} |" for name, why in sorted(REFUSED_ARCHITECTURES.items()))
    further = ", ".join(f"`{name}`" for name in OF_REFERENCE_ALONE)
    head += f"{families}\n{FURTHER.format(names=further)}\n"
    return f"{head}## Not trained\n\n| architecture | why |\n|---|---|\n{refused}\n"


def _family(module: ModuleType) -> str:
    family: Family = module.FAMILY
    about = inspect.getdoc(module) or ""
    own = {key: values for key, values in family.only.items() if DENSE_ONLY.get(key) != values}
    return f"## {family.architecture}\n\n{family.models}.\n\n{about}\n" + (f"\nOnly {_only(own)}.\n" if own else "")


def _only(keys: Mapping[str, tuple[object, ...]]) -> str:
    return ", ".join(f"`{key} = {' or '.join(_said(values))}`" for key, values in keys.items())


def _said(values: tuple[object, ...]) -> list[str]:
    """As JSON says them; none is as good as the first."""
    words = {True: "true", False: "false"}
    return [words[one] if isinstance(one, bool) else str(one) for one in values if one is not None] or ["null"]
