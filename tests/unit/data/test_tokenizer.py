"""The tokenizer of a model folder is the same that transformers would choose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from asyncrl.data.tiny_model import Architecture, make_tiny_model
from asyncrl.data.tokenizer import is_generic, load_tokenizer

TEXT = "12+3=15? yes <eos>"
CHAT = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]


def write(folder: Path, architecture: Architecture, **said: object) -> Path:
    """A tiny model with additional entries in its tokenizer_config.json."""
    make_tiny_model(folder, architecture=architecture)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    return folder


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_it_is_of_the_class_and_says_the_words_that_transformers_finds(
    tmp_path: Path, architecture: Architecture, kind: str
) -> None:
    folder = write(tmp_path, architecture, tokenizer_class=kind)
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert type(ours) is type(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids
    assert ours.decode(ours(TEXT).input_ids) == theirs.decode(theirs(TEXT).input_ids)
    assert ours.apply_chat_template(CHAT, tokenize=False) == theirs.apply_chat_template(CHAT, tokenize=False)


def test_only_one_that_its_file_describes_is_loaded_without_looking_for_its_class(tmp_path: Path) -> None:
    assert is_generic(write(tmp_path / "llama", "llama", tokenizer_class="PreTrainedTokenizerFast"))
    assert not is_generic(write(tmp_path / "qwen2", "qwen2"))  # transformers has a class for Qwen2's tokenizer
    assert not is_generic(write(tmp_path / "own", "llama", auto_map={"AutoTokenizer": ["own.Tokenizer", None]}))
    assert not is_generic(write(tmp_path / "other", "llama", tokenizer_class="LlamaTokenizer"))
    (tmp_path / "llama" / "tokenizer.json").unlink()
    assert not is_generic(tmp_path / "llama")
