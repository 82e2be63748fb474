"""Creates a trainable model folder (`asyncrl import-model FOLDER NEW_FOLDER`).

The source is quantized or needs the model's own code. The destination is created completely or not at all.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from tqdm import tqdm

from asyncrl.backends import dequantize
from asyncrl.backends.huggingface import read_shape
from asyncrl.data.model_folder import check_model
from asyncrl.data.new_folder import copy_all_but_weights, new_folder
from asyncrl.errors import ConfigError

logger = logging.getLogger(__name__)


def import_folder(source: Path, destination: Path) -> int:
    """Write the model in ``source`` to ``destination`` in bfloat16 and return its number of parameters.

    Raises ConfigError for weights quantized in another way, a model that is not supported or needs no import, and a
    destination that exists.
    """
    check_model(source)
    if not dequantize.is_needed(json.loads((source / "config.json").read_text())):
        raise ConfigError(
            f"{source}: its weights are not quantized, so there is nothing to import; name it as model.path"
        )
    with new_folder(destination) as folder, tqdm(desc="weights", unit="file", disable=None) as progress:
        copy_all_but_weights(source, folder)
        num_parameters = dequantize.to_bfloat16(source, folder, note=lambda name: _advance(progress, name))
        check_model(folder)
        read_shape(folder, where=str(destination))
    logger.info("%s: %s parameters in bfloat16", destination, f"{num_parameters:,}")
    return num_parameters


def _advance(progress: tqdm[None], name: str) -> None:
    progress.set_postfix_str(name, refresh=False)
    progress.update()
