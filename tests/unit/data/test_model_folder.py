"""A model folder is accepted; for any other folder, the error names it and its problem before anything loads it."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from asyncrl import config
from asyncrl.data import demo_task
from asyncrl.data.model_folder import REFUSED_ARCHITECTURES, check_model, require_supported
from asyncrl.data.prompts import PromptDataset
from asyncrl.data.tiny_model import CHARACTERS, make_tiny_model
from asyncrl.data.tokenizer import is_generic, load_tokenizer
from asyncrl.errors import ConfigError
from tests import ROOT
from tests.harness.families import ARCHITECTURES, make_tiny_family


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", characters="0123")


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("qwen3", "Qwen3ForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("llama", "LlamaForCausalLM")],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_tiny_model_of_each_architecture_loads_and_speaks(
    tmp_path: Path, architecture: Any, name: str, tied: bool
) -> None:
    folder = make_tiny_model(tmp_path, architecture=architecture, tie_word_embeddings=tied)
    checked = check_model(folder)
    assert (checked.architecture, checked.vocab_size) == (name, 4 + len(CHARACTERS))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    tokenizer = load_tokenizer(folder)
    text = "12+7 = ?\nab  cd"
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(tokens[0]) == text and tokens.shape[1] == len(text)
    probabilities = model(tokens).logits.softmax(-1)
    assert probabilities.max() < 4 / checked.vocab_size  # the initial policy is nearly uniform
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_sizes_of_every_architecture_go_with_its_weights(tmp_path: Path, architecture: str) -> None:
    folder = make_tiny_family(tmp_path, architecture=architecture)
    checked = check_model(folder)
    assert (checked.architecture, checked.vocab_size) == (
        json.loads((folder / "config.json").read_text())["architectures"][0],
        4 + len(CHARACTERS),
    )


def _rewrite(folder: Path, **changes: Any) -> None:
    table = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(table))


def _reshape(folder: Path, name: str, *shape: int) -> None:
    tensors = load_file(folder / "model.safetensors") | {name: torch.zeros(shape)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])


def _broken_link(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/1")


def _missing_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}'
    )


def _second_copy(folder: Path) -> None:
    (folder / "one.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    _missing_shard(folder)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("GPT2LMHeadModel", "trains Qwen2ForCausalLM.*this is GPT2LMHeadModel; describe it .* with model.family"),
        ("Gemma2ForCausalLM", "does not train Gemma2ForCausalLM: .*soft caps"),
        ("Qwen3VLForCausalLM", "Qwen3ForCausalLM is near"),
    ],
)
def test_an_architecture_of_no_family_is_refused_in_one_line(folder: Path, architecture: str, message: str) -> None:
    require_supported("model.path", folder)
    _rewrite(folder, architectures=[architecture])
    check_model(folder)  # whoever brings a family or a backend may train it
    with pytest.raises(ConfigError, match=f"^model.path: .*{message}") as caught:
        require_supported("model.path", folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json.*there is .*model.safetensors"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: Expecting"),
        (lambda f: _rewrite(f, architectures=None), "names no architecture"),
        (lambda f: _rewrite(f, vocab_size="many"), "vocab_size must be a whole number"),
        (lambda f: _rewrite(f, quantization_config="fp8"), "config.json: quantization_config must be a JSON object"),
        (lambda f: _rewrite(f, text_config={"rope_scaling": "yarn"}), "config.json: rope_scaling must be a JSON"),
        (lambda f: _rewrite(f, vocab_size=9), "vocab_size is 9, and model.embed_tokens.weight has the shape .8, 64."),
        (
            lambda f: _rewrite(f, hidden_size=None),
            "has no hidden_size, and model.layers.0.input_layernorm.weight has the shape .64.",
        ),
        (
            lambda f: _reshape(f, "model.layers.1.post_attention_layernorm.weight", 63),
            "hidden_size is 64, and model.layers.1.post_attention_layernorm.weight has the shape .63.",
        ),
        (
            lambda f: _reshape(f, "model.layers.0.self_attn.o_proj.weight", 63, 64),
            "hidden_size is 64, and model.layers.0.self_attn.o_proj.weight has the shape .63, 64.",
        ),
        (lambda f: _rewrite(f, num_attention_heads=0), "num_attention_heads must be a whole number >= 1, got 0"),
        (lambda f: _rewrite(f, num_hidden_layers=3), "num_hidden_layers is 3, and the weights have no layer 2"),
        (lambda f: _rewrite(f, num_hidden_layers=2**20), "and the weights have no layer 2"),
        (lambda f: _rewrite(f, num_hidden_layers=10**9), "num_hidden_layers is 1,000,000,000, and no model has more"),
        (lambda f: _rewrite(f, num_local_experts=10**9), "num_local_experts is 1,000,000,000, and no model has more"),
        (lambda f: _rewrite(f, eos_token_id=[1, 8]), "eos_token_id 8 is none of the 8 tokens of vocab_size"),
        (lambda f: (f / "generation_config.json").write_text("{"), "generation_config.json: Expecting"),
        (lambda f: (f / "tokenizer_config.json").write_text("[]"), "tokenizer_config.json: must be a JSON object"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "no weights.*pytorch_model.bin is not read",
        ),
        (_broken_link, "model.safetensors: is a link to ../blobs/1, which is not there"),
        (_truncate, r"has \d+ bytes and should have \d+"),
        (
            lambda f: (f / "model.safetensors").write_text("version https://git-lfs"),
            "a Git LFS pointer or a torn download",
        ),
        (_missing_shard, "1 of 1 weight files are missing, first one.safetensors"),
        (_second_copy, "has model.safetensors, and model.safetensors.index.json names other files; remove"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer .*copy the model's own files there"),
    ],
)
def test_a_damaged_model_folder_is_refused_in_one_line(
    folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    check_model(folder)
    damage(folder)
    with pytest.raises(ConfigError, match=message) as caught:
        check_model(folder)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_does_not_load_is_one_line(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ConfigError, match="the tokenizer cannot be loaded") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


TEXT = "12+3=15? yes <eos>"
CHAT = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]


def write(folder: Path, architecture: str, **said: object) -> Path:
    """A tiny model with additional entries in its tokenizer_config.json."""
    make_tiny_model(folder, architecture=architecture)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    return folder


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_it_is_of_the_class_and_says_the_words_that_transformers_finds(
    tmp_path: Path, architecture: str, kind: str
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


def test_the_demo_makes_what_its_run_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``python -m asyncrl.data.demo_task``, as the pages say."""
    monkeypatch.setattr(sys, "argv", ["demo_task", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(demo_task.__file__, run_name="__main__")
    assert ended.value.code == 0
    run = config.load(
        ROOT / "examples" / "demo.toml",
        [f"model.path={tmp_path / 'model'}", f"data.path={tmp_path / 'prompts.jsonl'}"],
    )
    check_model(Path(run.model.path))
    dataset = PromptDataset.open(run.data, tokenizer=load_tokenizer(Path(run.model.path)), seed=run.run.seed)
    rows = [row for position in range(dataset.num_rows) if (row := dataset.at(position))]
    assert {(row.prompt, row.label) for row in rows} >= {("7", "0123"), ("67", "0123"), ("4567", "0123")}
    assert all(len(row.tokens) == len(row.prompt) for row in rows)


@pytest.mark.parametrize("architecture", sorted(REFUSED_ARCHITECTURES))
def test_a_known_architecture_that_is_not_trained_is_refused_with_the_reason(folder: Path, architecture: str) -> None:
    _rewrite(folder, architectures=[architecture])
    reason = f"asyncrl does not train {architecture}: {REFUSED_ARCHITECTURES[architecture]}; it trains"
    with pytest.raises(ConfigError, match=re.escape(reason)):
        require_supported("model.path", folder)
