"""A tokenizer that is Python code in the model's folder, as Kimi's: refused, or run by an explicit choice."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import transformers.dynamic_module_utils

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.data.model_folder import check_model
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.engines.sglang.engine import SGLangEngine
from asyncrl.errors import ConfigError

CODE = '''
from pathlib import Path
from transformers import PreTrainedTokenizer

class OwnTokenizer(PreTrainedTokenizer):
    """One token for each character of the file."""
    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, **options):
        self._known = {letter: number for number, letter in enumerate(Path(vocab_file).read_text())}
        super().__init__(**options)

    @property
    def vocab_size(self):
        return len(self._known)

    def get_vocab(self):
        return dict(self._known)

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self._known.get(token, 0)

    def _convert_id_to_token(self, number):
        return next(letter for letter, its in self._known.items() if its == number)
'''


@pytest.fixture
def kimi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = make_tiny_model(tmp_path / "kimi", num_layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    (folder / "tiktoken.model").write_text("-abc")
    (folder / "tokenization_own.py").write_text(CODE)
    auto: dict[str, Any] = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    about = {"auto_map": auto, "tokenizer_class": "OwnTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def test_a_folders_own_tokenizer_runs_only_if_it_is_trusted(kimi: Path) -> None:
    check_model(kimi)
    with pytest.raises(
        ConfigError, match=r"only by the model's own code; set model.trust_remote_code = true"
    ) as caught:
        load_tokenizer(kimi)
    assert "\n" not in str(caught.value)
    assert load_tokenizer(kimi, trusts_code=True).encode("cab") == [3, 1, 2]


def test_code_beside_a_tokenizer_json_is_not_run_either(kimi: Path, tmp_path: Path) -> None:
    whole = make_tiny_model(tmp_path / "whole", num_layers=1)
    (kimi / "tokenizer.json").write_bytes((whole / "tokenizer.json").read_bytes())
    ran = tmp_path / "ran"
    (kimi / "tokenization_own.py").write_text(f"open({str(ran)!r}, 'w')")
    (kimi / "config.json").write_text(
        json.dumps(json.loads((kimi / "config.json").read_text()) | {"model_type": "unknown"})
    )
    with contextlib.suppress(ConfigError):
        load_tokenizer(kimi)
    assert not ran.exists()


def test_a_trusted_run_tells_sglang_too(kimi: Path, tmp_path: Path) -> None:
    made = []
    for trusts in ("false", "true"):
        file = tmp_path / "run.toml"
        file.write_text(
            f'[model]\npath = "{kimi}"\ntrust_remote_code = {trusts}\n[data]\npath = "none.jsonl"\n'
            '[reward]\nkind = "random"\n[engine]\nkind = "sglang"\ndevice = "cpu"\n'
        )
        run = config.load(file)
        engine = registry.engine(run, name="worker-0")
        assert isinstance(engine, SGLangEngine)
        made.append(dict(engine._options.server_arguments))
    assert made == [{}, {"trust-remote-code": True}]
