"""The promises of the data: positions that never change their meaning, and mistakes found early, with file and line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl import config
from asyncrl.data.prompts import PromptDataset, PromptRow
from asyncrl.data.row_check import RowLimits
from asyncrl.data.sources import shuffle
from asyncrl.data.tiny_model import CHARACTERS, make_tokenizer
from asyncrl.errors import ConfigError

Open = Callable[..., PromptDataset]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def open_rows(tmp_path: Path, tokenizer: Any) -> Open:
    """Return ``open_rows(rows, name=..., seed=..., **data)``, which opens the dataset of a file with these rows."""

    def write(
        rows: Any, *, name: str = "data.jsonl", seed: int = 0, limits: RowLimits | None = None, **data: Any
    ) -> PromptDataset:
        path = tmp_path / name
        if name.endswith(".parquet"):
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path)
        elif isinstance(rows, bytes):
            path.write_bytes(rows)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        section = config.DataSection(path=str(path), **data)
        return PromptDataset.open(section, tokenizer=tokenizer, seed=seed, limits=limits)

    return write


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"n{i}", "label": i} for i in range(count)]


def at(dataset: PromptDataset, position: int) -> PromptRow:
    row = dataset.at(position)
    assert row is not None
    return row


def labels(dataset: PromptDataset, positions: range) -> list[Any]:
    return [at(dataset, position).label for position in positions]


# -- positions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_a_resumed_run_continues_exactly(open_rows: Open, name: str) -> None:
    first = open_rows(numbered(7), name=name)
    whole = labels(first, range(30))
    resumed = open_rows(numbered(7), name=name)
    assert labels(resumed, range(17, 30)) == whole[17:]
    assert labels(first, range(3, 9)) == whole[3:9]  # back into an earlier epoch


def test_every_epoch_has_every_row_once_in_its_own_order(open_rows: Open) -> None:
    dataset = open_rows(numbered(20))
    first, second = labels(dataset, range(20)), labels(dataset, range(20, 40))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert labels(open_rows(numbered(20), seed=1), range(20)) != first
    assert [at(dataset, position).epoch for position in (0, 19, 20, 40)] == [0, 0, 1, 2]


def test_the_order_never_changes() -> None:
    # A run resumed with a newer numpy must keep its order, so the expected values are written down, not computed.
    assert shuffle(8, seed=0, epoch=0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert shuffle(8, seed=7, epoch=3).tolist() == [2, 4, 7, 3, 5, 1, 0, 6]
    assert sorted(shuffle(5, seed=-1, epoch=0).tolist()) == [0, 1, 2, 3, 4]


def test_the_epochs_end(open_rows: Open) -> None:
    dataset = open_rows(numbered(3), epochs=2)
    assert dataset.at(5) is not None
    assert dataset.at(6) is None and dataset.at(100) is None


def test_all_prompts_too_long_is_an_error_not_an_endless_search(open_rows: Open) -> None:
    dataset = open_rows([{"prompt": "12345"}, {"prompt": "123456"}], max_prompt_tokens=4)
    dataset.at(0)
    with pytest.raises(ConfigError, match="all 2 prompts have more than data.max_prompt_tokens = 4 tokens"):
        dataset.at(1)


# -- rows --------------------------------------------------------------------------------------------------------------


def test_a_row_carries_text_tokens_label_and_metadata(open_rows: Open) -> None:
    dataset = open_rows(
        [{"q": "7+1", "a": [8], "m": {"level": 2}, "x": 0}], prompt_key="q", label_key="a", metadata_key="m"
    )
    row = at(dataset, 0)
    assert (row.prompt, row.label, row.metadata) == ("7+1", [8], {"level": 2})
    assert row.tokens.dtype == np.int32
    assert row.tokens.tolist() == [4 + CHARACTERS.index(c) for c in "7+1"]


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_label_and_metadata_may_be_keys_in_the_table_of_a_column_and_further_columns(
    open_rows: Open, name: str
) -> None:
    rows = [{"prompt": "a", "model": {"truth": "8", "of": {"level": 2, "x": 0}}, "x": "y"}]
    row = at(open_rows(rows, name=name, label_key="model.truth", metadata_key="model.of", metadata_columns=("x",)), 0)
    assert (row.label, row.metadata) == ("8", {"level": 2, "x": "y"})


def test_the_chat_template_wraps_text_and_takes_messages(open_rows: Open) -> None:
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    dataset = open_rows([{"prompt": "hi"}, {"prompt": messages}], chat_template=True, shuffle=False)
    assert at(dataset, 0).prompt == "<user>hi<assistant>"
    assert at(dataset, 0).tokens.tolist()[0] == 2 and at(dataset, 0).tokens.tolist()[-1] == 3
    assert at(dataset, 1).prompt == "<user>1<assistant>2<eos><user>3<assistant>"


def test_a_response_is_its_tokens_and_eos(open_rows: Open, tokenizer: Any) -> None:
    rows = [{"prompt": "1", "answer": "23"}]
    assert len(at(open_rows(rows), 0).response) == 0
    for chat_template in (False, True):  # the template ends with the generation prompt; the answer continues it
        row = at(open_rows(rows, response_key="answer", chat_template=chat_template), 0)
        assert row.response.dtype == np.int32
        assert row.response.tolist() == [4 + CHARACTERS.index(c) for c in "23"] + [tokenizer.eos_token_id]


def test_a_tokenizer_without_eos_is_refused_when_it_is_to_end_answers(open_rows: Open, tmp_path: Path) -> None:
    open_rows([{"prompt": "1", "answer": "2"}])
    plain = make_tokenizer()
    plain.eos_token = None
    data = config.DataSection(path=str(tmp_path / "data.jsonl"), response_key="answer")
    with pytest.raises(ConfigError, match="the model's tokenizer has no eos token"):
        PromptDataset.open(data, tokenizer=plain, seed=0)


def test_blank_lines_and_other_alphabets_are_fine(open_rows: Open) -> None:
    text = '{"prompt": "1"}\n\n   \r\n{"prompt": "\\u00e9 2", "label": "日本"}'
    dataset = open_rows(text.encode(), shuffle=False)
    assert dataset.num_rows == 2
    assert at(dataset, 1).label == "日本"


def test_parquet_rows_are_like_jsonl_rows(open_rows: Open) -> None:
    messages = [{"role": "user", "content": "5"}]
    rows = [{"prompt": messages, "label": "x", "metadata": {"k": [1, 2]}}]
    row = at(open_rows(rows, name="data.parquet", chat_template=True), 0)
    assert (row.prompt, row.label, row.metadata) == ("<user>5<assistant>", "x", {"k": [1, 2]})


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (
            b'{"prompt": "a"}\n{"prompt": "b"\n',
            {},
            r"data.jsonl:2: malformed JSON: .* at column 15: {\"prompt\": \"b\"",
        ),
        (b'{"prompt": "a"}\n["b"]\n', {}, r'data.jsonl:2: every line must be a JSON object, this one is \["b"\]'),
        (b'[\n{"prompt": "a"}\n]\n', {}, "data.jsonl:1: begins a JSON array, .* one JSON object a line: `jq -c"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', {}, "data.jsonl:2: not UTF-8 text"),
        (
            b'\n{"promt": "a", "id": 1}\n',
            {},
            r"data.jsonl:2: no column 'prompt' .*mean 'promt'; there is 'promt', 'id'",
        ),
        (
            b'{"prompt": "a"}\n{"prompt": 7}\n',
            {},
            "data.jsonl:2: 'prompt' must be text or a list of chat messages, got 7",
        ),
        (b'{"prompt": ""}\n', {}, "data.jsonl:1: 'prompt' is empty"),
        (b'{"prompt": [{"role": "user", "content": "a"}]}\n', {}, "data.jsonl:1: .*set data.chat_template = true"),
        (b'{"prompt": [{"role": "user"}]}\n', {"chat_template": True}, "text role and content, got {'role': 'user'}"),
        (b'{"prompt": []}\n', {"chat_template": True}, "empty list of messages"),
        (b'{"prompt": "a", "metadata": 3}\n', {}, "data.jsonl:1: 'metadata' must be an object, got 3"),
        (
            b'{"prompt": "a", "answer": 1}\n',
            {"label_key": "anser"},
            "no column 'anser' .data.label_key.; did you mean 'answer'",
        ),
        (
            b'{"prompt": "a", "model": {"truth": 1}}\n',
            {"label_key": "model.thruth"},
            "no column 'model.thruth' .data.label_key.; did you mean 'model.truth'",
        ),
        (
            b'{"prompt": "a", "source": 1}\n',
            {"metadata_columns": ("sorce",)},
            "no column 'sorce' .data.metadata_columns.; did you mean 'source'",
        ),
        (b'{"prompt": "a", "m": "\\ud800"}\n', {"metadata_columns": ("m",)}, "data.jsonl:1: .* surrogates not allowed"),
        (
            b'{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n',
            {"response_key": "answer"},
            "data.jsonl:2: no column 'answer' .data.response_key.; there is 'prompt'",
        ),
        (b'{"prompt": "a", "answer": ""}\n', {"response_key": "answer"}, "data.jsonl:1: 'answer' is empty"),
        (b'{"prompt": "a", "label": NaN}\n', {}, "data.jsonl:1: 'label' is nan"),
        (b'{"prompt": "a", "label": -Infinity}\n', {}, "data.jsonl:1: 'label' is -inf"),
        (b'{"prompt": "a", "label": 1000000000000000000000}\n', {}, "data.jsonl:1: 'label': cannot send this"),
        (b'{"prompt": "a", "metadata": {"k": "\\ud800"}}\n', {}, "data.jsonl:1: .* surrogates not allowed"),
        (b'{"prompt": "\\ud800"}\n', {}, "data.jsonl:1: .* surrogates not allowed"),
        (b'{"prompt": "a", "label": ' + b"1" * 5000 + b"}\n", {}, "data.jsonl:1: a whole number has more than 64 bits"),
        (b'{"prompt": "a", "label": ' + b"[" * 9000 + b"]" * 9000 + b"}\n", {}, "data.jsonl:1: lists .* too deep"),
        (b"", {}, "data.jsonl: has no rows"),
    ],
)
def test_bad_file_is_refused_in_one_line_with_file_and_row(
    open_rows: Open, content: bytes, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_rows(content, **options)
    assert "\n" not in str(caught.value)


def test_a_row_without_the_label_that_its_reward_compares_with_is_refused(open_rows: Open) -> None:
    rows = [{"prompt": "1", "label": 0}, {"prompt": "2", "label": None}]
    with pytest.raises(
        ConfigError, match="data.jsonl:2: no label .data.label_key = .label.., and reward.kind = .exact"
    ):
        open_rows(rows, limits=RowLimits(labelled_for="exact"))


def test_prompts_that_leave_no_room_for_an_answer_are_dropped(open_rows: Open) -> None:
    dataset = open_rows([{"prompt": "1" * 5}, {"prompt": "1" * 9}], limits=RowLimits(prompt_tokens=8), shuffle=False)
    assert (dataset.check_first_rows().num_rows, dataset.dropped, dataset.most_tokens) == (2, 1, 8)
    with pytest.raises(
        ConfigError, match="all 1 prompts have more than 8 tokens, which is what rollout.max_new_tokens"
    ):
        open_rows([{"prompt": "1" * 9}], limits=RowLimits(prompt_tokens=8)).check_first_rows()


def test_a_missing_or_unknown_file_is_refused(open_rows: Open, tmp_path: Path, tokenizer: Any) -> None:
    def open_path(path: Path) -> None:
        PromptDataset.open(config.DataSection(path=str(path)), tokenizer=tokenizer, seed=0)

    with pytest.raises(ConfigError, match="none.jsonl: no such data file"):
        open_path(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="is a folder"):
        open_path(tmp_path)
    with pytest.raises(ConfigError, match=r"data.csv: data must be .jsonl .* or .parquet, not '.csv'"):
        open_rows(b"a,b\n", name="data.csv")
    (tmp_path / "no.parquet").write_bytes(b"hello, this is no parquet file")
    pytest.importorskip("pyarrow")
    with pytest.raises(ConfigError, match="no.parquet: not a Parquet file"):
        open_path(tmp_path / "no.parquet")


def test_parquet_without_pyarrow_says_what_to_install(
    open_rows: Open, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[parquet\]'"):
        PromptDataset.open(config.DataSection(path=str(tmp_path / "data.parquet")), tokenizer=tokenizer, seed=0)


def test_a_tokenizer_without_chat_template_is_refused_when_one_is_asked_for(open_rows: Open, tmp_path: Path) -> None:
    open_rows(numbered(1))
    plain = make_tokenizer()
    plain.chat_template = None
    data = config.DataSection(path=str(tmp_path / "data.jsonl"), chat_template=True)
    with pytest.raises(ConfigError, match="has no chat template"):
        PromptDataset.open(data, tokenizer=plain, seed=0)


def test_messages_the_template_refuses_are_named(open_rows: Open, tmp_path: Path) -> None:
    open_rows(numbered(1))
    strict = make_tokenizer()
    strict.chat_template = "{{ raise_exception('no system messages') }}"
    dataset = PromptDataset.open(
        config.DataSection(path=str(tmp_path / "data.jsonl"), chat_template=True), tokenizer=strict, seed=0
    )
    with pytest.raises(ConfigError, match="data.jsonl:1: the chat template refuses .*no system messages"):
        dataset.at(0)
