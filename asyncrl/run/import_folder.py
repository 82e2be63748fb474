"""A model folder that asyncrl trains from one in 8 bits, or one that needs the model's own code: what
`asyncrl import-model FOLDER NEW_FOLDER` does. The destination is there whole or not at all."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Final

from tqdm import tqdm

from asyncrl.backends import dequantize
from asyncrl.backends.huggingface import read_shape
from asyncrl.data.model_folder import check_model
from asyncrl.errors import ConfigError

logger = logging.getLogger(__name__)

_WEIGHTS: Final = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf")


def import_folder(source: Path, destination: Path) -> int:
    """Write the model in ``source`` to ``destination`` in bfloat16; returns the number of parameters.

    Raises ConfigError for weights quantized in another way, a model that is not supported or that can be trained as it
    is, and a destination that is there already.
    """
    if not dequantize.is_needed(_config(source)):
        raise ConfigError(
            f"{source}: its weights are not quantized, so there is nothing to import; name it as model.path"
        )
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"{destination}: already exists; remove it or choose another folder")
    check_model(source)
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        for path in sorted(source.iterdir()):
            if path.is_file() and not path.name.endswith(_WEIGHTS) and path.suffix != ".py":
                shutil.copyfile(path, temporary / path.name)
        with tqdm(desc="weights", unit="file", disable=None) as progress:
            num_parameters = dequantize.to_bfloat16(source, temporary, note=lambda name: _advance(progress, name))
        check_model(temporary)
        read_shape(temporary, where=str(destination))
        temporary.chmod(0o755)
        temporary.replace(destination)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    logger.info("%s: %s parameters in bfloat16", destination, f"{num_parameters:,}")
    return num_parameters


def _advance(progress: tqdm[None], name: str) -> None:
    progress.set_postfix_str(name, refresh=False)
    progress.update()


def _config(source: Path) -> dict[str, object]:
    """Raises ConfigError."""
    try:
        config = json.loads((source / "config.json").read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{source}: has no config.json; import-model reads a .gguf file or a Hugging Face folder"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source / 'config.json'}: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{source / 'config.json'}: must be a JSON object, is {type(config).__name__}")
    return config
