"""Folders as they are published that hold another model than the one that is trained, and what they become.

Some model types are read only by the model's own code, although transformers has the architecture: `asyncrl
import-model` writes a folder of the architecture that is trained. Others hold a text model within one that reads
images; it writes that model alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.tensors.snapshot import TensorEntry

_OWN_CODE: Final = "is read only by the model's own code, which asyncrl does not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A model type as it is published.

    why      why it is not trained as it is; follows the folder's name; "" if it is
    entries  the entries of config.json that differ in the new folder
    part     the table of config.json that describes the text model; "" if that is config.json itself
    prefix   what the names of the text model's tensors begin with, instead of "model."
    dropped  what the names of tensors begin with that are neither trained nor exported
    """

    why: str
    entries: Mapping[str, Any]
    part: str = ""
    prefix: str = "model."
    dropped: tuple[str, ...] = ()

    def config(self, published: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json of the new folder."""
        if not self.part:
            return {**published, **self.entries}
        outer = {key: published[key] for key in _OF_BOTH if key in published}
        return {**outer, **published[self.part], **self.entries}

    def tensors(self, one: TensorEntry) -> Iterator[TensorEntry]:
        """Yield the tensors that a tensor becomes, in the order of their bytes.

        In files of a model that reads images, all experts of a layer are two tensors: gate and up [E, 2 F, H], and
        down [E, H, F]. A text model has each matrix by itself.
        """
        if one.name.startswith(self.dropped):
            return
        name = one.name
        if name.startswith(self.prefix):
            name = "model." + name.removeprefix(self.prefix)
        experts, _, last = name.rpartition(".")
        if not self.part or not (parts := _FUSED.get(last)) or not experts.endswith(".experts"):
            yield TensorEntry(name=name, dtype=one.dtype, shape=one.shape)
            return
        number, rows, columns = one.shape
        for expert in range(number):
            for part in parts:
                shape = (rows // len(parts), columns)
                yield TensorEntry(name=f"{experts}.{expert}.{part}.weight", dtype=one.dtype, shape=shape)


_OF_BOTH: Final = ("tie_word_embeddings", "dtype", "torch_dtype", "transformers_version")
"""Entries that may stand beside the table of the text model and hold for it."""
_FUSED: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def _text_of_qwen(architecture: str) -> Published:
    return Published(
        why="",
        entries={"architectures": [architecture]},
        part="text_config",
        prefix="model.language_model.",
        dropped=("model.visual.", "mtp."),
    )


PUBLISHED: Final[Mapping[str, Published]] = {
    "kimi_k2": Published(why=_OWN_CODE, entries={"model_type": "deepseek_v3"}),
    "mimo": Published(
        why=_OWN_CODE,
        entries={"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_nextn_predict_layers": 0},
        dropped=("model.mtp_layers.",),
    ),
    "qwen3_5": _text_of_qwen("Qwen3_5ForCausalLM"),
    "qwen3_5_moe": _text_of_qwen("Qwen3_5MoeForCausalLM"),
}
"""By model_type of config.json."""

AS_IT_IS: Final = Published(why="", entries={})
"""A model whose folder needs no other names."""


def partial_rotary_factor(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of a head that is rotated, for a config.json that has it only as rotary_dim; else nothing.

    MiniMax-M2 is published so. transformers would rotate whole heads.
    """
    rotated, size = config.get("rotary_dim"), config.get("head_dim")
    rope = config.get("rope_parameters") or {}
    is_said = "partial_rotary_factor" in config or "partial_rotary_factor" in rope
    if is_said or not rotated or not size or rotated == size:
        return {}
    return {"partial_rotary_factor": rotated / size}
