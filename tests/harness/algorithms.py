"""A run file as a user writes it, to test which algorithm it resolves to."""

from __future__ import annotations

from pathlib import Path

from asyncrl import config


def run(path: Path, *overrides: str, text: str = "") -> config.RunConfig:
    """Return an asynchronous run file as a user writes it, with ``text`` at its end."""
    file = path / "run.toml"
    file.write_text(f'[run]\nname = "x"\n[model]\npath = "{path}"\n[data]\npath = "{path}/prompts.jsonl"\n{text}')
    return config.load(file, ["learner.backend=reference", "reward.kind=exact", *overrides])
