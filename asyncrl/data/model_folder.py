"""Check in milliseconds whether asyncrl can train the model in a folder, without torch and without reading weights."""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import math
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from asyncrl.errors import ConfigError

SUPPORTED_ARCHITECTURES = (
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Glm4ForCausalLM",
    "Gemma3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "MiniMaxM2ForCausalLM",
    "GptOssForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""The architectures of backends/families. Repeated here because that package imports torch."""

OF_REFERENCE_ALONE = (
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM",
    "FlexOlmoForCausalLM",
    "GPTNeoXForCausalLM",
    "GemmaForCausalLM",
    "GlmForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "Jais2ForCausalLM",
    "MinistralForCausalLM",
    "OlmoForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
    "PersimmonForCausalLM",
    "PhiForCausalLM",
    "Phi3ForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
)
"""Architectures of transformers that learner.backend = "reference" trains as well: their logits are those of the output
layer, and their weights have the same names in files. Test: tests/contracts/test_reference_architectures.py."""

REFUSED_ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "its router's scores are grouped in another way than DeepSeek-V3's",
    "MiniMaxForCausalLM": "its lightning attention is none that Megatron has here",
    "MiniMaxText01ForCausalLM": "its lightning attention is none that Megatron has here",
    "MiniMaxM1ForCausalLM": "its lightning attention is none that Megatron has here",
    "MiMoForCausalLM": "only its own code reads its config.json; `asyncrl import-model` writes it as a Qwen2",
    "MiMoV2FlashForCausalLM": "its layers with a window have another number of key heads",
    "KimiLinearForCausalLM": "its linear attention has a decay for every channel",
    "KimiK25ForConditionalGeneration": "it reads images, too",
    "Gemma2ForCausalLM": "its scores and logits have soft caps, every second layer a window",
    "Gemma3ForConditionalGeneration": "it reads images, too, whose tokens attend both ways, and all attention here is "
    "causal; save its text part as a Gemma3ForCausalLM",
}
"""Known architectures that are not supported, and why."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_OWN_TOKENIZER = "tiktoken.model"
"""Kimi-K2's tokenizer. transformers reads it only with the model's own code."""
_FURTHER_TABLES = ("generation_config.json", "tokenizer_config.json")
"""Optional files. They must parse, because transformers and engines silently use defaults for one that does not."""
_PARTS: Final = ("text_config", "vision_config", "quantization_config", "rope_parameters", "rope_scaling")
"""Entries of config.json that are objects themselves."""
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 * 2**20
"""Largest header the safetensors format allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCounts:
    """Sizes of a mixture-of-experts model.

    num_layers  all layers of the model, including those without experts
    """

    num_experts: int
    experts_per_token: int
    num_layers: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's expert indices (messages/routing.py)."""
        return self.num_layers * self.experts_per_token * (1 if self.num_experts < 256 else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """Properties of a model folder, from ``check_model``.

    end_tokens  tokens that end an answer, from config.json and generation_config.json
    experts     None for a model without experts
    """

    path: Path
    architecture: str
    vocab_size: int
    context_tokens: int
    end_tokens: frozenset[int] = frozenset()
    experts: ExpertCounts | None = None


def check_model(path: Path) -> ModelFolder:
    """Check the model folder ``path``. Raises ConfigError if something that a run needs is missing or damaged."""
    if not path.is_dir():
        hint = "; `asyncrl import-model` makes one from a GGUF file" if path.suffix == ".gguf" else ""
        if len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists():  # perhaps a hub name
            hub = f"ORGANISATION/{path.name}" if path.parts[0] == "models" else path
            hint = f"; from the Hugging Face hub: hf download {hub} --local-dir {path}"
        if path.parts[:1] and path.parts[0].startswith("~"):
            hint = f"; {path.parts[0]} is not expanded here, write the whole path"
        problem = "is a file, not a model folder" if path.is_file() else "no such model folder"
        raise ConfigError(f"{path}: {problem}{hint}")
    config = check_weights(path)
    find_tokenizer(path, trusts_code=True)  # load_tokenizer refuses one that must not run
    further = {name: _read_table(path / name) for name in _FURTHER_TABLES if (path / name).exists()}
    return ModelFolder(
        path=path,
        architecture=_architecture(path, config),
        vocab_size=config["vocab_size"],
        context_tokens=context_of(config),
        end_tokens=_end_tokens(config) | _end_tokens(further.get("generation_config.json", {})),
        experts=experts_of(config),
    )


def _end_tokens(table: Mapping[str, Any]) -> frozenset[int]:
    ends = table.get("eos_token_id")
    return frozenset(end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int))


def check_weights(path: Path, shapes: Shapes | None = None) -> dict[str, Any]:
    """Check that config.json in ``path`` fits the weights, and return its ``decoder_config``. Raises ConfigError.

    shapes  shapes by Hugging Face names of weights that are elsewhere; None: of the files in ``path``
    """
    config = decoder_config(_read_config(path))
    _architecture(path, config)
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ConfigError(f"{path / 'config.json'}: vocab_size must be a whole number > 0, got {vocab_size!r}")
    if shapes is None:
        shapes = _read_shapes(path)
    if problem := find_size_problem(config, shapes):
        raise ConfigError(f"{path / 'config.json'}: {problem}; take this file and the weights from the same model")
    return config


def decoder_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys of text_config, where a model with a vision tower has those of its decoder."""
    text = config.get("text_config")
    return {**text, **config} if isinstance(text, dict) else dict(config)


def context_of(config: Mapping[str, Any]) -> int:
    """Return the tokens of the longest sequence of the model of this config.json."""
    return config.get("max_position_embeddings") or 2**31


def experts_of(config: Mapping[str, Any]) -> ExpertCounts | None:
    """Return the sizes of the model of this config.json; None for a model without experts."""
    config = decoder_config(config)
    num_experts = next((config[name] for name in EXPERTS if config.get(name)), None)
    per_token, num_layers = config.get("num_experts_per_tok"), config.get("num_hidden_layers")
    if not (num_experts and per_token and num_layers):
        return None
    return ExpertCounts(num_experts=num_experts, experts_per_token=per_token, num_layers=num_layers)


def check_model_at(key: str, path: Path) -> ModelFolder:
    """Call ``check_model`` for the folder at ``key`` of the run file, such as model.path. Errors name the key."""
    try:
        return check_model(path)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def find_tokenizer(path: Path, *, trusts_code: bool = False) -> Path:
    """Return the file with the tokenizer's vocabulary. Raises ConfigError if there is none.

    trusts_code: whether the model's own code may read it
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such model folder")
    for name in _TOKENIZER_FILES:
        if (path / name).is_file():
            return path / name
    mend = "copy the model's own files there"
    if (path / _OWN_TOKENIZER).is_file():
        if trusts_code:
            return path / _OWN_TOKENIZER
        mend = (
            f"{_OWN_TOKENIZER} is read only by the model's own code; set model.trust_remote_code = true if you trust "
            "it, or convert it to a tokenizer.json"
        )
    raise ConfigError(f"{path}: no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); {mend}")


def _read_config(path: Path) -> dict[str, Any]:
    if not (path / "config.json").exists():
        there = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise ConfigError(f"{path}: no config.json, so not a Hugging Face model folder; there is {there}")
    return _read_table(path / "config.json")


def _read_table(file: Path) -> dict[str, Any]:
    try:
        table = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: must be a JSON object, is {type(table).__name__}")
    for name in _PARTS:  # text_config first: it may hold the others
        for part in (table, table.get("text_config") or {}):
            if part.get(name) is not None and not isinstance(part[name], dict):
                raise ConfigError(f"{file}: {name} must be a JSON object, is {type(part[name]).__name__}")
    return table


def read_if_valid(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model folder; {} if it has none. ``check_model`` says what is wrong."""
    try:
        return _read_table(file)
    except ConfigError:
        return {}


def _architecture(path: Path, config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not names:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ConfigError(f"{path / 'config.json'}: names no architecture; asyncrl trains {supported}")
    return str(names[0])


def require_supported(key: str, path: Path, *, backend: str = "megatron") -> None:
    """Raise ConfigError for an architecture that ``backend`` does not train. ``key``: the run file's.

    A folder that ``check_model`` refuses may pass.
    """
    try:
        name = _architecture(path, _read_config(path))
    except (ConfigError, OSError):
        return
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    if name in SUPPORTED_ARCHITECTURES or (backend == "reference" and name in OF_REFERENCE_ALONE):
        return
    where = f"{key}: {path / 'config.json'}"
    if name in OF_REFERENCE_ALONE:
        raise ConfigError(
            f'{where}: learner.backend = "{backend}" does not train {name}; use "reference", on one device, or '
            "describe it in a file of yours with model.family"
        )
    if why := REFUSED_ARCHITECTURES.get(name):
        raise ConfigError(f"{where}: asyncrl does not train {name}: {why}; it trains {supported}")
    near = difflib.get_close_matches(name, SUPPORTED_ARCHITECTURES, 1, cutoff=0.8)
    hint = f" ({near[0]} is near, but its weights have other names and shapes)" if near else ""
    raise ConfigError(
        f"{where}: asyncrl trains {supported}, this is {name}{hint}; describe it in a file of yours with model.family"
    )


def _weight_files(path: Path) -> tuple[Path, ...]:
    if (path / _INDEX).is_file():
        try:
            names = sorted(set(json.loads((path / _INDEX).read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path / _INDEX}: {type(error).__name__}: {error}") from None
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise ConfigError(f"{path}: {len(missing)} of {len(names)} weight files are missing, first {missing[0]}")
        if names != [_WEIGHTS] and (path / _WEIGHTS).is_file():  # readers differ in which they prefer
            raise ConfigError(f"{path}: has {_WEIGHTS}, and {_INDEX} names other files; remove the outdated of the two")
        return tuple(path / name for name in names)
    if (path / _WEIGHTS).is_file():
        return (path / _WEIGHTS,)
    if (path / _WEIGHTS).is_symlink():  # of the hub's cache, copied without the folder of its blobs
        raise ConfigError(f"{path / _WEIGHTS}: is a link to {(path / _WEIGHTS).readlink()}, which is not there")
    other = [p.name for pattern in ("*.bin", "*.pt", "*.gguf", "*.safetensors") for p in sorted(path.glob(pattern))]
    there = f"; {other[0]} is not read: save the model again with save_pretrained" if other else ""
    raise ConfigError(f"{path}: no weights ({_WEIGHTS} or {_INDEX}){there}")


def _read_shapes(path: Path) -> Shapes:
    """Return shapes by name from the headers of the weight files, each read once as long as it stays as it is."""
    files = []
    for file in _weight_files(path):
        try:
            stat = file.stat()
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from None
        files.append((file, stat.st_size, stat.st_mtime_ns))
    return _read_headers(tuple(files))


@functools.lru_cache(maxsize=4)  # a run's models, which `asyncrl check` asks for ten times
def _read_headers(files: tuple[tuple[Path, int, int], ...]) -> Shapes:
    """files: path, bytes and time of the last change"""
    shapes: dict[str, tuple[int, ...]] = {}
    for file, size, _ in files:
        shapes |= _safetensors_shapes(file, size)
    return MappingProxyType(shapes)


def _safetensors_shapes(file: Path, size: int) -> dict[str, tuple[int, ...]]:
    """Return shapes by name from the file's header, and check the file's size against it.

    The check catches incomplete downloads and Git LFS pointers.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size):
                raise ConfigError(
                    f"{file}: not a safetensors file ({size} bytes); a Git LFS pointer or a torn download?"
                )
            header = json.loads(stream.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file}: not a safetensors file: {type(error).__name__}: {error}") from None
    if size != 8 + length + end:
        raise ConfigError(f"{file}: has {size} bytes and should have {8 + length + end}; download or copy it again")
    return shapes


# -- sizes in config.json ----------------------------------------------------------------------------------------------

_COUNTS: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Qwen3-MoE was published with the first name; transformers 5 writes the second."""
_MAY_BE_NONE: Final = (*EXPERTS, "num_experts_per_tok", "num_nextn_predict_layers", "first_k_dense_replace")
_UNBOUNDED: Final = ("vocab_size", "max_position_embeddings")
_LARGEST: Final = 2**20
"""No model has more of the others. What follows counts layers and experts one by one."""
_LAYER: Final = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")
_PREFIXES: Final = ("model.", "model.language_model.")
"""What the names of a decoder's tensors begin with."""

_MATRICES: Final = (
    *((f"{prefix}embed_tokens.weight", ("vocab_size", "hidden_size")) for prefix in _PREFIXES),
    ("lm_head.weight", ("vocab_size", "hidden_size")),
    *((f"{prefix}layers.0.mlp.down_proj.weight", ("hidden_size", "intermediate_size")) for prefix in _PREFIXES),
)
"""Matrices, and the keys of config.json that say their sizes."""

_OF_HIDDEN_SIZE: Final = re.compile(
    r"model\.(?:language_model\.)?(?:norm|layers\.\d+\.(?:\w+_)?layernorm"
    r"|layers\.\d+\.self_attn\.(?:[qkv]_proj|(?P<out>o_proj)))\.weight"
)
"""Norms [hidden_size], q_proj, k_proj and v_proj [*, hidden_size], and o_proj [hidden_size, *] of every layer."""

Shapes = Mapping[str, tuple[int, ...]]


def find_size_problem(config: Mapping[str, Any], shapes: Shapes) -> str:
    """Return the first inconsistency; "" if there is none.

    Missing keys other than hidden_size are not checked; transformers has defaults for them.

    shapes  shapes of the weights by their Hugging Face names; any of them may be missing
    """
    for name in (*_COUNTS, *_MAY_BE_NONE):
        value, least = config.get(name), int(name in _COUNTS)
        if value is not None and (type(value) is not int or value < least):
            return f"{name} must be a whole number >= {least}, got {value!r}"
        if value is not None and value > _LARGEST and name not in _UNBOUNDED:
            return f"{name} is {value:,}, and no model has more than {_LARGEST:,}"
    return (
        _end_problem(config)
        or next(filter(None, (_matrix_problem(config, shapes, weight, keys) for weight, keys in _MATRICES)), "")
        or _layers_problem(config, {int(found[1]) for name in shapes if (found := _LAYER.match(name))})
        or _hidden_size_problem(config, shapes)
    )


def _hidden_size_problem(config: Mapping[str, Any], shapes: Shapes) -> str:
    """Check that hidden_size is there and is that of every norm and attention matrix.

    Architectures that are not known here may give it another name, and quantized matrices have other shapes.
    """
    name, size = str((config.get("architectures") or [""])[0]), config.get("hidden_size")
    if name not in (*SUPPORTED_ARCHITECTURES, *OF_REFERENCE_ALONE) or config.get("quantization_config"):
        return ""
    for weight, shape in shapes.items():
        if not (found := _OF_HIDDEN_SIZE.fullmatch(weight)):
            continue
        if size is None:
            return f"has no hidden_size, and {weight} has the shape {list(shape)}"
        if not shape or shape[0 if found["out"] else -1] != size:
            return f"hidden_size is {size}, and {weight} has the shape {list(shape)}"
    return ""


def _end_problem(config: Mapping[str, Any]) -> str:
    """Check eos_token_id: a token that the model cannot sample would never end an answer."""
    ends, size = config.get("eos_token_id"), config.get("vocab_size")
    for end in ends if isinstance(ends, list) else [ends]:
        if end is not None and (type(end) is not int or not 0 <= end < (size or math.inf)):
            return f"eos_token_id {end!r} is none of the {size} tokens of vocab_size"
    return ""


def _matrix_problem(config: Mapping[str, Any], shapes: Shapes, weight: str, keys: tuple[str, ...]) -> str:
    for key, length in zip(keys, shapes.get(weight, ()), strict=False):
        if config.get(key) and config[key] != length:
            return f"{key} is {config[key]}, and {weight} has the shape {list(shapes[weight])}"
    return ""


def _layers_problem(config: Mapping[str, Any], there: Collection[int]) -> str:
    """Check the number of layers. DeepSeek-V3 and GLM-4.5 have extra layers at the end that predict further tokens."""
    num_layers, further = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers") or 0
    if not num_layers or not there:
        return ""
    missing = next((layer for layer in range(num_layers) if layer not in there), None)
    if missing is not None:
        return f"num_hidden_layers is {num_layers}, and the weights have no layer {missing}"
    if max(there) >= num_layers + further:
        return f"num_hidden_layers is {num_layers}, and the weights have {max(there) + 1} layers"
    return ""


# -- new folders -------------------------------------------------------------------------------------------------------

_WEIGHT_PATTERNS: Final = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


@contextlib.contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """Yield a temporary folder, which becomes ``destination`` if the block ends without an error.

    Raises ConfigError if ``destination`` already exists and is not an empty folder.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"{destination}: already exists; remove it or choose another folder")
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        temporary.replace(destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_all_but_weights(source: Path, destination: Path) -> None:
    """Copy config.json, the tokenizer and all other files except weights from the model folder ``source``."""
    destination.mkdir(exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHT_PATTERNS):
            shutil.copyfile(path, destination / path.name)
