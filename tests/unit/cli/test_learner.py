"""What `asyncrl learner` does in each rank before it learns or serves."""

from __future__ import annotations

import argparse
import os

import pytest

from asyncrl import config
from asyncrl.cli import arguments, learner
from tests import ROOT


def test_a_rank_that_joins_has_what_the_channel_needs_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config.load(ROOT / "examples" / "demo.toml", ["weights.channel=nccl"])

    class Backend:
        @staticmethod
        def rank_here(run: config.RunConfig) -> int:
            return 1

    found: list[str] = []

    def serve(run: config.RunConfig, *, rank: int) -> int:
        found.append(os.environ["NCCL_CUMEM_ENABLE"])
        return 0

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(arguments, "load", lambda options: run)
    monkeypatch.setattr(learner, "backend_class", lambda run: Backend)
    monkeypatch.setattr(learner, "_serve", serve)
    assert learner.run(argparse.Namespace(resume=False)) == 0
    assert found == ["0"]
