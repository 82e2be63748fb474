"""docs/guides/data_and_rewards.md and rollouts.md: the modules and run files that they show work as the pages say."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.data.prompts import PromptDataset
from asyncrl.data.tiny_model import make_tokenizer
from asyncrl.launch.checks.run_file import check
from asyncrl.rewards.load import load_reward
from asyncrl.rewards.port import Reward, Sample
from tests import ROOT
from tests.harness.rollouts import load, on_demo, prompt_of, sample_of, saying

PAGES = [ROOT / "docs" / "guides" / name for name in ("data_and_rewards.md", "environments.md")]
SHOWN = "\n".join(page.read_text() for page in PAGES)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The pages' modules, importable by the names in their first lines, and the module that they import."""
    names = ["my_verl_rewards"]
    for name, code in re.findall(r"```python\n# (\w+)\.py[^\n]*\n(.*?)```", SHOWN, re.DOTALL):
        (tmp_path / f"{name}.py").write_text(code)
        names.append(name)
    verls = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    verls += "    assert data_source == 'openai/gsm8k' and extra_info['split'] == 'train'\n"
    verls += "    return float(solution_str == ground_truth)\n"
    (tmp_path / "my_verl_rewards.py").write_text(verls)
    monkeypatch.syspath_prepend(tmp_path)
    yield names
    for name in names:
        sys.modules.pop(name, None)


async def rewards(kind: str, samples: Sequence[Sample], **options: Any) -> list[Reward]:
    reward = load_reward(config.RewardSection(kind=kind, options=options))
    try:
        return list(await reward(samples))
    finally:
        await reward.close()


def test_every_module_of_the_page_has_a_name_and_every_run_file_says_what_there_is(
    modules: list[str], demo: Path, tmp_path: Path
) -> None:
    assert len(re.findall(r"```python\n", SHOWN)) == len(modules) - 1
    every = re.findall(r"```toml\n(.*?)```", SHOWN, re.DOTALL)  # those without a data file, program, or package
    blocks = [one for one in every if one.startswith("[reward]") or "my_tools" in one or "stop_token_ids" in one]
    assert len(blocks) == 7
    for block in blocks:
        path = tmp_path / "run.toml"
        path.write_text(block)
        smaller = ["engine.kind=inprocess", "learner.backend=reference", "rollout.max_new_tokens=8"]
        bare = ["reward.options.sandbox=none"] if "sandbox" in block else []  # bubblewrap may not be installed
        check(config.load(path, on_demo(demo) + smaller + bare))


async def test_the_rewards_of_the_page_judge_as_it_says(modules: list[str]) -> None:
    right, wrong = sample_of("7, please", label=7), sample_of("8", label=7, length=4)
    assert [r.value for r in await rewards("my_rewards:contains", [right, wrong])] == [1, 0]
    assert [r.value for r in await rewards("my_rewards:shortest", [right, wrong])] == [1, 0.25]
    assert await rewards("my_rewards:in_parts", [right]) == [Reward(value=1.1, parts={"right": 1, "polite": 0.1})]
    assert await rewards("my_rewards:watched", [right]) == [Reward(value=1, parts={"characters": 9})]


async def test_a_file_in_verls_layout_and_verls_reward_work_with_the_settings_of_the_page(
    modules: list[str], tmp_path: Path
) -> None:
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    row: dict[str, Any] = {  # as verl's examples/data_preprocess/gsm8k.py writes it
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "7+1"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "8"},
        "extra_info": {"split": "train", "index": 0, "answer": "#### 8", "question": "7+1"},
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    (found,) = re.findall(r"## Files of verl.*?```toml\n(.*?)```", SHOWN, re.DOTALL)
    (tmp_path / "run.toml").write_text(found)
    run = config.load(tmp_path / "run.toml", ["model.path=any", f"data.path={tmp_path / 'train.parquet'}"])
    made = PromptDataset.open(run.data, tokenizer=make_tokenizer(), seed=0).at(0)
    assert made is not None and made.metadata == {"data_source": "openai/gsm8k", **row["extra_info"]}
    samples = [replace(sample_of(answer), label=made.label, metadata=made.metadata) for answer in ("8", "9")]
    assert [r.value for r in await rewards("from_verl:score", samples)] == [1, 0]


async def test_the_two_turns_of_the_page_share_their_budget(modules: list[str]) -> None:
    tokenizer = make_tokenizer("abcdefgh?")
    two_turns = load("my_turns:think_then_answer")
    prompt = prompt_of("a", tokenizer, label=None, max_new_tokens=8)
    made = await two_turns(prompt, saying("abcdefgh", "abcdefgh", tokenizer=tokenizer), index=0)
    assert made.response_mask.tolist() == [True] * 4 + [False] * 2 + [True] * 2


async def test_the_compaction_of_the_page_gives_two_parts(modules: list[str]) -> None:
    tokenizer = make_tokenizer("abcdefgh?")
    compacts = load("my_compaction:compacts")
    prompt = prompt_of("a", tokenizer, label=None, max_new_tokens=8)
    notes, work = await compacts(prompt, saying("abcdefgh", "abcdefgh", tokenizer=tokenizer), index=0)
    assert (len(notes.tokens), len(work.tokens)) == (4, 4)
    assert work.prompt_tokens.tolist() == [prompt.prompt_tokens[0], *notes.tokens]


TOOL_USES = {
    "asks once": (["ab?", "3"], {}, "ab?33", 1.0, 1, "stop"),
    "asks as often as it may": (["a?", "a?"], {"calls": 1}, "a?2a?", 0.0, 1, "stop"),
    "has no room for an answer": (["abcdefg?", ""], {}, "abcdefg?", 0.0, None, "length"),
}


@pytest.mark.parametrize(("said", "options", "text", "reward", "calls", "ended"), TOOL_USES.values(), ids=TOOL_USES)
async def test_the_tool_of_the_page_answers_questions_within_the_budget(
    modules: list[str], said: list[str], options: dict[str, Any], text: str, reward: float, calls: int, ended: str
) -> None:
    tokenizer = make_tokenizer("abcdefgh?0123456789")
    use = load("my_tools:Tools", tokenizer=tokenizer, **options)
    prompt = prompt_of("a", tokenizer, label="3", max_new_tokens=8)
    made = await use(prompt, saying(*said, tokenizer=tokenizer), index=0)
    assert (tokenizer.decode(made.tokens), made.reward, made.finish_reason) == (text, reward, ended)
    assert made.reward_parts == ({} if calls is None else {"calls": calls})
