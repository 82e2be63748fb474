"""Another learner takes over while the fleet stays up: fake processes, which are ready when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch.processes import process_manager, swap
from asyncrl.launch.processes.child_process import ChildProcess
from asyncrl.launch.processes.swap import TAKE_OVER, LearnerSwapper, SwapRequest, ready_file
from asyncrl.messages.roles import LEARNER
from asyncrl.policies.health.faults import Finding, role_missing
from tests.harness.fleet import Launcher, Stage, settings_of

NEW = "learner-swap1"


class Swapping:
    """A stage whose learner can be swapped, with requests in ``folder``."""

    def __init__(self, stage: Stage, folder: Path, *settings: str) -> None:
        self.stage, self.folder, self.taken, self.settings = stage, folder, frozenset[int](), settings
        self.problem = ""
        self._number = 0
        self.task = asyncio.create_task(LearnerSwapper(folder, stage.manager.fleet, new_learner=self._new).run())

    def _new(self, overrides: Sequence[str], taken: frozenset[int], shadow: str) -> Sequence[ChildProcess]:
        if self.problem:
            raise ConfigError(self.problem)
        self.overrides, self.taken, self._number = overrides, taken, self._number + 1
        name = f"learner-swap{self._number}"
        settings = settings_of(*self.settings)
        return self.stage.specs.new_learner(settings, overrides, name=name, taken=taken, shadow=shadow)

    def ready(self, name: str = NEW) -> None:
        file = ready_file(self.folder, name)
        file.parent.mkdir(exist_ok=True)
        file.touch()

    async def until(self, request: SwapRequest, phase: str) -> str:
        await self.stage.until(lambda: request.status is not None and request.status.phase == phase)
        assert request.status is not None
        return request.status.problem


@pytest.fixture
async def swapping(stage: Callable[..., Stage], tmp_path: Path) -> Swapping:
    it = stage(Launcher())
    await it.until_up("w0", "w1")
    made = Swapping(it, tmp_path)
    await asyncio.sleep(0)
    it.launcher.named("learner").drained_code = 130
    return made


async def test_a_learner_takes_over_when_it_is_ready_and_the_other_has_left(swapping: Swapping) -> None:
    it, old = swapping.stage, swapping.stage.launcher.named("learner")
    request = SwapRequest.make(swapping.folder, ["learner.ranks=2"])
    await swapping.until(request, "starting")
    await it.until(lambda: NEW in it.names)
    new = it.launcher.named(NEW)
    assert new.spec.arguments[-3:] == ("--resume", "--standby", NEW)
    bound = "staleness.max_staleness=4"  # of the workers, whatever the new learning rate allows
    assert new.spec.arguments[2:6] == ("--set", bound, "--set", "learner.ranks=2")
    assert not old.signals
    old.drains = False
    swapping.ready()
    await swapping.until(request, "draining")
    assert (old.signals, new.signals) == ([15], [])
    old.code.set_result(130)
    await swapping.until(request, "done")
    assert new.signals == [TAKE_OVER]
    assert set(it.names) == {NEW, "w0", "w1"}
    assert [one.name for one in it.manager.own_processes()] == ["w0", "w1", "learner"]
    new.code.set_result(0)
    assert (await it.task).exit_code == 0


async def test_the_run_goes_on_if_the_new_learner_does_not_start(swapping: Swapping) -> None:
    it = swapping.stage
    request = SwapRequest.make(swapping.folder, [])
    await it.until(lambda: NEW in it.names)
    it.launcher.named(NEW).code.set_result(2)
    assert NEW in await swapping.until(request, "failed")
    assert not it.launcher.named("learner").signals
    await it.until_up("w0", "w1")
    swapping.problem = "learner.gpus: there are none"
    assert await swapping.until(SwapRequest.make(swapping.folder, []), "failed") == swapping.problem
    assert await it.end() == 130


async def test_a_run_does_not_end_for_want_of_a_learner_while_another_takes_over(swapping: Swapping) -> None:
    it = swapping.stage
    request = SwapRequest.make(swapping.folder, [])
    await it.until(lambda: NEW in it.names)
    it.manager._cure(role_missing(LEARNER))
    swapping.ready()
    await swapping.until(request, "done")
    it.manager._cure(role_missing(LEARNER))
    assert (await it.task).exit_code == 1


async def test_a_learner_that_dies_during_a_swap_is_restarted_and_swapped_then(swapping: Swapping) -> None:
    it = swapping.stage
    request = SwapRequest.make(swapping.folder, [])
    await it.until(lambda: NEW in it.names)
    it.launcher.named("learner").code.set_result(-9)
    await it.until(lambda: "learner" in it.names)
    it.launcher.named("learner").drained_code = 130
    swapping.ready()
    await swapping.until(request, "done")
    assert it.launcher.named(NEW).signals == [TAKE_OVER]


async def test_a_new_learner_that_dies_after_it_has_taken_over_is_resumed(swapping: Swapping) -> None:
    it = swapping.stage
    request = SwapRequest.make(swapping.folder, [])
    await it.until(lambda: NEW in it.names)
    swapping.ready()
    await swapping.until(request, "done")
    it.launcher.named(NEW).code.set_result(1)
    await it.until(lambda: NEW in it.names)
    assert it.launcher.named(NEW).spec.arguments[-1] == "--resume"


async def test_the_run_is_done_if_the_last_step_was_the_old_learners(swapping: Swapping) -> None:
    it = swapping.stage
    it.launcher.named("learner").drained_code = 0
    SwapRequest.make(swapping.folder, [])
    await it.until(lambda: NEW in it.names)
    swapping.ready()
    assert (await it.task).exit_code == 0


async def test_later_swaps_keep_what_earlier_ones_changed(swapping: Swapping) -> None:
    it = swapping.stage
    for number, override in ((1, "learner.ranks=2"), (2, "learner.threads=3")):
        request = SwapRequest.make(swapping.folder, [override])
        name = f"learner-swap{number}"
        await swapping.until(request, "starting")
        await it.until(lambda: len(it.names) == 4)
        it.launcher.named(name).drained_code = 130
        swapping.ready(name)
        await swapping.until(request, "done")
    assert swapping.overrides == ("learner.ranks=2", "learner.threads=3")
    assert set(it.names) == {"learner-swap2", "w0", "w1"}


async def test_a_file_that_is_no_request_ends_neither_the_run_nor_later_swaps(swapping: Swapping) -> None:
    folder = swapping.folder / "swap"
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(
        ("[]", "{", '{"overrides": 5, "shadow": ""}', '{"overrides": [1], "shadow": ""}', "{}")
    ):
        (folder / f"{number}.request").write_text(text)
    (folder / "other.request").write_text("{}")
    (folder / "other.status").write_text('{"phase": "flying"}')
    assert "is not a request" in await swapping.until(SwapRequest(swapping.folder, "0"), "failed")
    assert "another version" in await swapping.until(SwapRequest(swapping.folder, "other"), "failed")
    await swapping.until(SwapRequest(swapping.folder, "4"), "failed")
    await swapping.until(SwapRequest.make(swapping.folder, []), "starting")


async def test_a_swap_that_nobody_waits_for_any_more_leaves_the_run_as_it_was(swapping: Swapping) -> None:
    """The new learner hangs in its start; meanwhile another swap is refused, and afterwards one is not."""
    it = swapping.stage
    request = SwapRequest.make(swapping.folder, ["learner.ranks=2"])
    await it.until(lambda: NEW in it.names)
    assert "another swap" in await swapping.until(SwapRequest.make(swapping.folder, []), "failed")
    request.remove()
    await it.until(lambda: NEW not in it.names)
    assert (it.launcher.named("learner").signals, request.status) == ([], None)
    await swapping.until(SwapRequest.make(swapping.folder, []), "starting")
    assert swapping.overrides == ()


async def test_a_shadow_that_fails_to_hand_over_leaves_the_run_a_learner_with_its_own_settings(
    swapping: Swapping,
) -> None:
    it = swapping.stage
    request = SwapRequest.make(swapping.folder, ["learner.ranks=2"], shadow=swapping.folder / "shadows" / "one")
    await it.until(lambda: NEW in it.names)
    new = it.launcher.named(NEW)
    assert "--promote" in new.spec.arguments
    swapping.ready()
    await it.until(lambda: TAKE_OVER in new.signals)
    new.code.set_result(2)
    assert "own settings" in await swapping.until(request, "failed")
    await it.until(lambda: "learner-swap2" in it.names)
    arguments = it.launcher.named("learner-swap2").spec.arguments
    assert arguments[-1] == "--resume" and "learner.ranks=2" not in arguments
    assert set(it.names) == {"learner-swap2", "w0", "w1"}


async def test_a_promoted_learner_may_die_once_it_has_the_shadows_state(swapping: Swapping) -> None:
    it = swapping.stage
    request = SwapRequest.make(swapping.folder, [], shadow=swapping.folder / "shadows" / "one")
    await it.until(lambda: NEW in it.names)
    new = it.launcher.named(NEW)
    swapping.ready()
    await it.until(lambda: TAKE_OVER in new.signals)
    assert request.status is not None and request.status.phase == "draining"
    ready_file(swapping.folder, NEW).unlink()
    await swapping.until(request, "done")
    new.code.set_result(1)
    await it.until(lambda: NEW in it.names)
    assert "--promote" not in it.launcher.named(NEW).spec.arguments


async def test_a_run_that_ends_answers_the_swap(swapping: Swapping) -> None:
    it = swapping.stage
    request = SwapRequest.make(swapping.folder, [])
    await it.until(lambda: NEW in it.names)
    swapping.task.cancel()
    await asyncio.wait({swapping.task})
    assert request.status is not None and request.status.problem == "the run ends"


async def test_a_learner_that_took_over_is_restarted_when_it_is_stuck(swapping: Swapping) -> None:
    it = swapping.stage
    request = SwapRequest.make(swapping.folder, [])
    await it.until(lambda: NEW in it.names)
    swapping.ready()
    await swapping.until(request, "done")
    it.manager._cure(Finding(fault="stuck", actor="learner", cause="it hangs", remedy="", cure="restart"))
    assert it.launcher.named(NEW).signals == [TAKE_OVER, 9]
    await it.until(lambda: NEW in it.names)


async def test_a_learner_on_several_machines_is_taken_over_by_all_parts_of_another(
    stage: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that dies meanwhile: no part joins the other learner, and none is left of the one that has left."""
    monkeypatch.setattr(process_manager, "RANK_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(swap, "LOOK_SECONDS", 0.0)
    layout = ("learner.backend=megatron", "learner.ranks=2", "learner.machines=2")
    it = stage(Launcher(), *layout)
    await it.until_up("learner-1", "w0", "w1")
    swapping, rank = Swapping(it, tmp_path, *layout), f"{NEW}-1"
    await asyncio.sleep(0)
    request = SwapRequest.make(tmp_path, [])
    await it.until_up("learner-1", "w0", "w1", NEW, rank)
    await it.until(lambda: all(child.process for child in it.manager.fleet.children))  # the manager knows what is up
    parts = [it.launcher.named(name) for name in (NEW, rank)]
    assert [one.spec.arguments[-2:] for one in parts] == [("--standby", NEW), ("--standby", rank)]
    assert [(one.spec.meets, one.spec.environment["RANK"]) for one in parts] == [(NEW, "0"), (NEW, "1")]
    of_old = it.launcher.named("learner-1")
    it.launcher.named("learner").code.set_result(1)
    await it.until(lambda: it.launcher.named("learner-1") is not of_old)
    await it.until_up("learner-1", "w0", "w1", NEW, rank)
    assert (of_old.signals, [one.signals for one in parts]) == ([9], [[], []])
    await it.until(lambda: all(child.process for child in it.manager.fleet.children))
    old = it.launcher.named("learner")
    old.drains, of_old = False, it.launcher.named("learner-1")
    swapping.ready()
    for _ in range(20):  # looks at what is ready
        await asyncio.sleep(0)
    assert not old.signals
    swapping.ready(rank)
    await swapping.until(request, "draining")
    of_old.code.set_result(0)
    old.code.set_result(130)
    await swapping.until(request, "done")
    assert [one.signals for one in parts] == [[TAKE_OVER], [TAKE_OVER]]
    assert set(it.names) == {NEW, rank, "w0", "w1"}
    parts[0].code.set_result(1)
    await it.until(lambda: it.launcher.named(rank) is not parts[1] and it.launcher.named(NEW) is not parts[0])
    assert {it.launcher.named(name).spec.arguments[-1] for name in (NEW, rank)} == {"--resume"}
