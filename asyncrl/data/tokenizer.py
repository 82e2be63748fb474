"""The tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.data.model_folder import find_tokenizer
from asyncrl.errors import ConfigError


def load_tokenizer(path: Path) -> Any:
    """The Hugging Face tokenizer in ``path``; nothing is downloaded. Raises ConfigError."""
    find_tokenizer(path)
    import transformers  # two seconds: not before the folder is known to be there

    try:
        return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"{path}: the tokenizer cannot be loaded: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
