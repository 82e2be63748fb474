"""Create folders completely or not at all, and copy the files of a model folder except its weights."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from asyncrl.errors import ConfigError

_WEIGHTS: Final = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


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
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, destination / path.name)
