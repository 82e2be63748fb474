"""Load the tokenizer of a model folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.data.model_folder import find_tokenizer, read_if_valid
from asyncrl.errors import ConfigError

_GENERIC: Final = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Tokenizer classes that need only tokenizer.json."""
_SPECIAL: Final = ("qwen2",)
"""Model types for which transformers always uses its own tokenizer class."""
_IMPORTING: Final = threading.Lock()
"""transformers imports its modules when they are first used, and fails in a thread that meets another one at it."""


def load_tokenizer(path: Path, *, trusts_code: bool = False) -> Any:
    """Load the Hugging Face tokenizer in ``path``, without downloads. Raises ConfigError.

    trusts_code: whether Python code in the folder may run (model.trust_remote_code)
    """
    find_tokenizer(path, trusts_code=trusts_code)
    with _IMPORTING:
        import transformers  # takes seconds, so only after the folder is known to exist

        # AutoTokenizer also imports model code, which adds two seconds to the start of every process.
        kind = transformers.PreTrainedTokenizerFast if is_generic(path) else transformers.AutoTokenizer
        try:
            return kind.from_pretrained(path, local_files_only=True, trust_remote_code=trusts_code)
        except (OSError, ValueError, KeyError, ImportError) as error:
            if not trusts_code and "trust_remote_code" in str(error):
                raise ConfigError(
                    f"{path}: the tokenizer is Python code of the model's folder; set model.trust_remote_code = true "
                    "if you trust it"
                ) from None
            raise ConfigError(f"{path}: the tokenizer cannot be loaded: {_first_line(error)}") from None


def load_decode(path: str | Path) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes tokens exactly: with special tokens, and spaces as the model wrote them.

    Raises ConfigError if the tokenizer is not on this machine.
    """
    if not path:
        raise ConfigError("model.path: not known here; say where the tokenizer is with --set model.path=...")
    tokenizer = load_tokenizer(Path(path))
    exactly = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return lambda tokens: str(tokenizer.decode(list(tokens), **exactly))


def is_generic(path: Path) -> bool:
    """Whether AutoTokenizer would choose the generic class that needs only tokenizer.json, as in Llama 3 folders."""
    if not (path / "tokenizer.json").is_file():
        return False
    said, model = (read_if_valid(path / name) for name in ("tokenizer_config.json", "config.json"))
    return (
        said.get("tokenizer_class") in _GENERIC and "auto_map" not in said and model.get("model_type") not in _SPECIAL
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
