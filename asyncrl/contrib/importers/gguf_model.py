"""Make a Hugging Face model folder from a GGUF file, for `asyncrl import-model SOURCE FOLDER`."""

from __future__ import annotations

import importlib.metadata
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asyncrl.data.model_folder import check_model, new_folder
from asyncrl.errors import ConfigError

logger = logging.getLogger(__name__)

PROBE = "The capital of France is"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedModel:
    """The new model folder, and the result of a test.

    continuation  greedy continuation of PROBE
    loss          loss of PROBE and continuation, nats per token
    """

    folder: Path
    architecture: str
    num_parameters: int
    continuation: str
    loss: float
    is_sensible: bool
    """Whether the loss is below half that of a uniform model."""


def find_source(source: Path | str) -> Path:
    """Return the GGUF file that ``source`` names: a path, or "package:NAME" for a file in an installed Python package.

    Does not import the package. Raises ConfigError.
    """
    text = str(source)
    if not text.startswith("package:"):
        path = Path(source)
        if path.is_file():
            return path
        raise ConfigError(f"{path}: no such GGUF file")
    name = text.removeprefix("package:")
    if not name:
        raise ConfigError(f"{text}: names no package; write package:NAME")
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{text}: the package is not installed; pip install {name}") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise ConfigError(f"{text}: has {len(found)} .gguf files, import-model needs one; give its path")
    return found[0]


def import_model(
    source: Path | str, destination: Path, *, dtype: Literal["float32", "bfloat16"] = "float32"
) -> ImportedModel:
    """Write config, weights, tokenizer and generation config to ``destination``, completely or not at all.

    The weights are dequantised. They take more space, but the model stays as good as the quantised one, not as the
    original. Raises ConfigError if asyncrl does not train such a model, or if the destination already exists.
    """
    path = find_source(source)
    with new_folder(destination) as folder:
        logger.info("reading %s", path)
        num_parameters = _write(path, folder, dtype)
        result = _probe(folder, destination, num_parameters)
    logger.info("%s: %s ... %s", destination, PROBE, result.continuation.strip())
    if not result.is_sensible:
        logger.warning("%s: loss %.1f on %r: the import may be wrong", destination, result.loss, PROBE)
    return result


def _write(path: Path, folder: Path, dtype: str) -> int:
    """Write the model folder, and return the number of parameters."""
    try:
        from asyncrl.contrib.importers.gguf_file import GGUFFile
    except ImportError as error:
        if error.name != "gguf":
            raise
        raise ConfigError("import-model needs the gguf package: pip install 'asyncrl[gguf]'") from None
    import safetensors.torch
    import torch
    import transformers
    from tqdm import tqdm

    file = GGUFFile(path)
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    file.config(dtype=kind).save_pretrained(folder)
    transformers.GenerationConfig(**file.token_ids()).save_pretrained(folder)
    file.tokenizer().save_pretrained(folder)
    progress = tqdm(file.tensors(), total=file.num_tensors, desc="weights", unit="tensor", disable=None)
    weights = {name: torch.tensor(values, dtype=kind) for name, values in progress}
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in weights.values())


def _probe(folder: Path, destination: Path, num_parameters: int) -> ImportedModel:
    """Load the new model, and test it on PROBE."""
    import torch
    import transformers

    checked = check_model(folder)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokens = tokenizer(PROBE, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        whole = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=16, do_sample=False, use_cache=True
        )
        loss = float(model(whole, labels=whole).loss)
    return ImportedModel(
        folder=destination,
        architecture=checked.architecture,
        num_parameters=num_parameters,
        continuation=tokenizer.decode(whole[0, tokens.shape[1] :], skip_special_tokens=True),
        loss=loss,
        is_sensible=loss < 0.5 * math.log(checked.vocab_size),
    )
