"""What a shadow's folder holds, and from which of its states a shadow goes on."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.actors.learner.history import HISTORY_FILE, History
from asyncrl.audit import shadow as shadows
from asyncrl.audit.branch import Trunk, first_own_step, holding, require_own_states, starting_point
from asyncrl.audit.replay import plan_of
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.audit.shadow import Shadow, claim, compare, promote, settings_of
from asyncrl.board.command import shadows_of
from asyncrl.board.watched_run import WatchedRun
from asyncrl.cli import learner
from asyncrl.errors import ConfigError
from asyncrl.launch.processes.swap import ready_file
from asyncrl.policies.audit.entries import present, promotions
from asyncrl.policies.groups.saved import LearnerState, PromptState
from tests.harness.checkpoints import write_checkpoint


def test_a_shadow_goes_on_from_no_state_that_the_run_has_rolled_back(tmp_path: Path) -> None:
    """The run has fallen back behind step 2 and trained it again while the shadow was away."""
    first = History(tmp_path / HISTORY_FILE, incarnation=0)
    first.begin(step=0, kept=0, max_staleness=1, settings={})
    first.record_trained([1], step=1, max_staleness=0)
    kept = first.position
    first.record_trained([2], step=2, max_staleness=0)
    first.close()
    states = tmp_path / "shadows" / "one" / "states"
    for step in (1, 2):
        (states / f"step-{step:08d}").mkdir(parents=True)
    shadow = Shadow(RecordedRun(tmp_path), states.parent, overrides=[], most_lag=0)
    assert shadow._starting_point()[1:] == (2, states / "step-00000002")
    second = History(tmp_path / HISTORY_FILE, incarnation=1)
    second.begin(step=1, kept=kept, max_staleness=1, settings={})
    second.record_trained([2], step=2, max_staleness=0)
    second.close()
    assert shadow._starting_point()[1:] == (1, states / "step-00000001")
    assert [one.name for one in states.iterdir()] == ["step-00000001"]


def test_a_shadows_folder_belongs_to_one_process_and_one_choice_of_settings(tmp_path: Path) -> None:
    folder = tmp_path / "shadows" / "one"
    with claim(folder, ["learner.ranks=2"]):
        Shadow(RecordedRun(tmp_path), folder, overrides=["learner.ranks=2"], most_lag=0)
        with pytest.raises(ConfigError, match="a shadow of this name is up"), claim(folder, ["learner.ranks=2"]):
            pass
    with pytest.raises(ConfigError, match="was made with --set learner.ranks=2"), claim(folder, []):
        pass
    with claim(folder, ["learner.ranks=2"]):
        pass


def test_a_promotion_of_an_earlier_start_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "promote").write_text("3")
    assert Shadow(RecordedRun(tmp_path), tmp_path, overrides=[], most_lag=0)._last_step is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": "1", "overrides": []}', '{"pid": 1, "overrides": 5}'])
def test_a_damaged_folder_of_a_shadow_gets_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(ConfigError, match="no shadow"):
        settings_of(tmp_path)


def test_steps_before_a_promotion_do_not_lead_to_those_behind_it(tmp_path: Path) -> None:
    for incarnation, (step, trained) in enumerate([(0, [1, 2]), (1, []), (2, [3])]):
        history = History(tmp_path / HISTORY_FILE, incarnation=incarnation)
        history.begin(step=step, kept=history.position, max_staleness=1, settings={})
        for number in trained:
            history.record_trained([number], step=number, max_staleness=0)
        history.close()
    recorded = RecordedRun(tmp_path)
    found = present(recorded.history())
    assert promotions(found) == [2]
    save_state(tmp_path, 1, history=found[2].position)
    save_state(tmp_path, 3, history=history.position)  # that of step 2 is removed by now
    assert recorded.checkpoint_before(3, found)[0] == 1
    trunk = trunk_at(recorded, step=3)
    first = first_own_step(trunk, tmp_path / "branch")
    require_own_states(trunk, 4, first=first)
    with pytest.raises(ConfigError, match="step 3 goes on from the state of a shadow .* step > 3"):
        require_own_states(trunk, 3, first=first)
    with pytest.raises(ConfigError, match="step 3 went on from the state of a shadow .* --from-step 3"):
        plan_of(recorded, found, from_step=1, overrides=[])


def test_a_learner_gets_ready_for_no_shadow_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the present learner would leave for it."""
    (tmp_path / "settings.json").write_text('{"overrides": [], "pid": 4194304}')
    monkeypatch.setattr(learner, "check_learner", lambda run: None)
    run: Any = SimpleNamespace(run_directory=tmp_path)
    with pytest.raises(ConfigError, match="this shadow is not up"):
        learner.run_learner(run, resume=False, token="", standby="learner-swap1", shadow=tmp_path)
    assert not ready_file(tmp_path, "learner-swap1").exists()


def save_state(run: Path, step: int, *, history: int) -> None:
    """Write a checkpoint.  history: bytes of it that it has seen"""
    empty: dict[str, Any] = {"watermark": 0, "beyond": []}
    state = LearnerState(
        incarnation=0,
        step=step,
        policy_version=step,
        groups=empty,
        consumed=empty,
        prompts=PromptState(),
        history=history,
    )
    write_checkpoint(
        run / "checkpoints", state, save_backend=lambda folder: shutil.copy(__file__, folder / "state"), keep=9
    )


def trunk_at(recorded: RecordedRun, *, step: int) -> Trunk:
    history = present(recorded.history())
    return Trunk(
        recorded=recorded, history=history, step=step, next_group_id=9, prompts=PromptState(), groups_per_batch=1
    )


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt(), ConfigError("no")])
def test_a_branch_holds_the_checkpoints_that_its_run_removes_meanwhile(
    tmp_path: Path, ending: BaseException | None
) -> None:
    """Until it is written or refused; an interrupted command leaves them for the next."""
    run, out = tmp_path / "run", tmp_path / "branch"
    run.mkdir()
    history = History(run / HISTORY_FILE, incarnation=0)
    history.begin(step=0, kept=0, max_staleness=1, settings={})
    for step in (1, 2, 3):
        history.record_trained([step], step=step, max_staleness=0)
        save_state(run, step, history=history.position)
    history.close()
    trunk = trunk_at(RecordedRun(run), step=3)
    with contextlib.suppress(KeyboardInterrupt, ConfigError), holding(trunk, out):
        shutil.rmtree(run / "checkpoints")
        assert starting_point(trunk, out, first=3)[0] == 2
        if ending is not None:
            raise ending
    is_left = isinstance(ending, KeyboardInterrupt)
    assert starting_point(trunk, out, first=3)[0] == (2 if is_left else 0)


def test_a_shadow_is_compared_over_the_steps_that_both_have_trained(tmp_path: Path) -> None:
    shadow = tmp_path / "shadows" / "one"
    shadow.mkdir(parents=True)
    rows = [(tmp_path, step, {"loss": 2.0 * step, "entropy": 1.0 + step, "reward/mean": 0.5}) for step in (1, 2, 3)]
    rows += [(shadow, step, {"loss": 2.0 * step + 1, "entropy": 11.0 + step, "reward/mean": 0.5}) for step in (2, 3, 4)]
    for folder, step, numbers in rows:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": float(step), "learner/x": step, **numbers}) + "\n")
    # over the steps 2 and 3: entropy 10 higher (20 standard deviations), loss 1 higher (1); the reward is the same
    assert compare(RecordedRun(tmp_path), shadow) == ([2, 3], [("entropy", 3.5, 13.5), ("loss", 5.0, 6.0)])
    assert [one.name for one in shadows_of(tmp_path)] == ["one"]
    assert WatchedRun(shadow, [], token="", verb="board").name == f"{tmp_path.name}/one"


async def test_a_promotion_tells_the_shadow_to_end_even_if_its_state_is_there_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path / HISTORY_FILE, incarnation=0)
    history.begin(step=0, kept=0, max_staleness=1, settings={})
    history.record_trained([1], step=1, max_staleness=0)
    history.close()
    folder, recorded = tmp_path / "shadows" / "one", RecordedRun(tmp_path)
    shadow = Shadow(recorded, folder, overrides=[], most_lag=0)
    (folder / "states" / "step-00000001").mkdir(parents=True)
    newest: Any = SimpleNamespace(step=1), tmp_path / "checkpoints" / "step-00000001" / "backend"
    monkeypatch.setattr(recorded, "checkpoint", lambda: newest)
    monkeypatch.setattr(shadows, "_write_checkpoint", lambda *args, **named: None)
    assert await promote(recorded, folder, keep=1, say=lambda line: None) == 1
    assert shadow._last_step == 1
