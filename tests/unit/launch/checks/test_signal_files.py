"""What the settings name is recorded by its content: the user's code, and files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.launch.checks import signal_files
from asyncrl.launch.checks.shared_settings import settings_checksum
from asyncrl.launch.checks.signal_files import digest_code, digest_files
from tests import ROOT


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def test_code_is_recorded_with_what_it_imports_beside_it_and_not_run(place: Path) -> None:
    (place / "graders").mkdir()
    for name, text in (
        ("my_reward.py", "import json, torch\nimport graders.text as t\n\ndef f(s):\n    from late import g\n"),
        ("graders/__init__.py", ""),
        ("graders/text.py", "from . import deep\nfrom .deep import x\n"),
        ("graders/deep.py", "import my_reward"),
        ("late.py", "raise SystemExit"),
        ("other.py", ""),
    ):
        (place / name).write_text(text)
    before = digest_code("my_reward:f")
    assert list(before) == ["graders/__init__.py", "graders/deep.py", "graders/text.py", "late.py", "my_reward.py"]
    assert "my_reward" not in sys.modules and "late" not in sys.modules
    (place / "late.py").write_text("def g(): pass")
    changed = digest_code("my_reward:f")
    assert [name for name in changed if changed[name] != before[name]] == ["late.py"]


def test_what_code_names_as_text_is_recorded_a_module_or_a_prompt_of_a_judge(place: Path) -> None:
    (place / "my_reward.py").write_text(
        "import importlib as i\nlate = i.import_module('late')\nPROMPT = open('judge.txt').read()\nLOG = 'my.jsonl'\n"
    )
    for name in ("late.py", "judge.txt", "my.jsonl", "other.txt"):
        (place / name).write_text(name)
    assert list(digest_code("my_reward:f")) == ["judge.txt", "late.py", "my_reward.py"]


def test_in_a_clone_asyncrls_own_files_are_not_followed_as_its_version_is_recorded() -> None:
    assert list(digest_code("tests.harness.tiny.reward:TinyReward")) == ["tests/harness/tiny/reward.py"]


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("python agent.py", ["agent.py", "tools.py"]),
        ("python sub/agent.py", ["sub/agent.py", "sub/tools.py"]),
        ("python -m agent --fast", ["agent.py", "tools.py"]),
        ("python -m sub", ["sub/__main__.py", "sub/tools.py"]),
    ],
)
def test_a_program_is_recorded_with_what_it_imports(place: Path, command: str, names: list[str]) -> None:
    (place / "sub").mkdir()
    for name in ("agent.py", "sub/agent.py"):
        (place / name).write_text("import tools")
    for name in ("tools.py", "sub/tools.py"):
        (place / name).write_text("")
    (place / "sub" / "__main__.py").write_text("from . import tools")
    run = config.load(ROOT / "examples" / "demo.toml", [f'rollout.options.harness="{command}"'])
    assert sorted(digest_files(run)["rollout.options.harness"]) == names


@pytest.mark.parametrize("text", ["exact", "asyncrl.rewards.math:MathReward", "no_such:f", "a:b:c", "http://host:1/x"])
def test_what_is_not_the_users_code_has_no_digest(text: str) -> None:
    assert digest_code(text) == {}


def test_workers_with_other_code_of_the_reward_are_told_apart(place: Path) -> None:
    (place / "my_reward.py").write_text("def f(sample): return 1.0")
    run = config.load(ROOT / "examples" / "demo.toml", ["reward.kind=my_reward:f"])
    before = settings_checksum(run)
    assert settings_checksum(run) == before
    (place / "my_reward.py").write_text("def f(sample): return 0.0")
    assert settings_checksum(run) != before


def test_workers_whose_learning_rate_allows_another_staleness_are_told_apart() -> None:
    def checksum(*overrides: str) -> Mapping[str, float]:
        return settings_checksum(config.load(ROOT / "examples" / "gpu.toml", overrides))

    rates = [f"learner.learning_rate={rate}" for rate in ("2e-6", "5e-6")]
    assert checksum(rates[0]) != checksum(rates[1])
    assert checksum(rates[1]) == checksum("staleness.max_staleness=4")


def test_files_that_options_name_are_recorded_alone_or_in_a_command(place: Path) -> None:
    for name in ("judge.txt", "agent.py", "held.jsonl", "prompt"):
        (place / name).write_text(name)
    run = config.load(
        ROOT / "examples" / "demo.toml",
        [
            "reward.options.template=judge.txt",
            'rollout.options.harness="python agent.py --fast"',
            'evaluation.datasets=[{name = "held", path = "held.jsonl[0:2]"}]',
        ],
    )
    found = {key: sorted(Path(name).name for name in files) for key, files in digest_files(run).items()}
    assert "asyncrl" in found.pop("packages")
    found.pop("revision", None)  # in a clone
    assert found == {
        "evaluation.datasets.held.path": ["held.jsonl"],
        "reward.options.template": ["judge.txt"],
        "rollout.options.harness": ["agent.py"],
    }


def test_a_changed_block_of_a_large_file_is_seen(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_files, "_WHOLE_BYTES", 64)
    monkeypatch.setattr(signal_files, "_BLOCK_BYTES", 8)
    monkeypatch.setattr(signal_files, "_BLOCKS", 8)
    (place / "m").mkdir()
    run = config.load(ROOT / "examples" / "demo.toml", ["model.path=m"])
    found = set()
    for changed in (b"", b"first", b"mid", b"last"):
        content = bytearray(1000)
        start = {b"first": 0, b"last": 995}.get(changed, 142)
        content[start : start + len(changed)] = changed
        (place / "m" / "model.safetensors").write_bytes(content)
        found.add(digest_files(run)["model.path"]["model.safetensors"])
    assert len(found) == 4
