"""The command as a user meets it: immediate help, one line for each mistake, and no torch before it is needed."""

from __future__ import annotations

import errno
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl import __version__, config
from asyncrl.audit import run_folder
from asyncrl.cli import main as cli
from asyncrl.cli.tap import plain
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.errors import ConfigError, EngineDied, HopelessError, NoAnswer
from asyncrl.launch import colocated
from asyncrl.messages.control import ServerAddress
from asyncrl.tensors.device import GpuMemory
from tests import ROOT
from tests.harness.command import asyncrl


def test_help_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from asyncrl.cli import main as cli\n"
        "cli.main(['--help'])\n"
        "sys.exit(str({'torch', 'numpy', 'transformers', 'nats', 'aiohttp'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"
    assert "rollout-worker" in done.stdout


def test_help_of_every_verb_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from asyncrl.cli import main as cli\n"
        "for verb in cli.VERBS:\n"
        "    assert cli.main([verb, '--help']) == 0\n"
        "    assert not {'torch', 'transformers'} & sys.modules.keys(), verb\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("own", "used"), [("", "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_that_wait_leave_their_core_unless_the_user_says_otherwise(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own: str, used: str
) -> None:
    """Processes of a run share the cores, so a thread that spins takes one from an engine (benchmarks.laptop)."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if own:
        monkeypatch.setenv("OMP_WAIT_POLICY", own)
    assert asyncrl("check", "nowhere.toml", capsys=capsys)[0] == 2
    assert os.environ["OMP_WAIT_POLICY"] == used


@pytest.mark.parametrize("words", [("top", "run"), ("tap", "run", "events"), ("samples", "run", "--follow")])
def test_ctrl_c_ends_what_looks_at_a_run_without_a_traceback(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_folder, "run_at", interrupted)
    assert asyncrl(*words, capsys=capsys) == (130, "", "")


def test_every_verb_has_a_file_and_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for name, summary in cli.VERBS.items():
        code, out, err = asyncrl(name, "--help", capsys=capsys)
        assert (code, err) == (0, "")
        assert summary in " ".join(out.split())
        assert f"usage: asyncrl {name}" in out


def test_a_command_line_that_is_wrong_gives_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for given, meant in {"chekc": "check", "train": "run", "evl": "evaluate", "my.toml": "run my.toml"}.items():
        code, _, err = asyncrl(given, capsys=capsys)
        assert (code, err.count("\n"), f"did you mean `asyncrl {meant}`" in err) == (2, 1, True), err
    assert asyncrl("xyzzy", capsys=capsys)[::2] == (2, "asyncrl: there is no 'xyzzy'; `asyncrl --help` says more\n")
    code, _, err = asyncrl(capsys=capsys)
    assert (code, "the following arguments are required: VERB" in err) == (2, True)
    for name in cli.VERBS:
        code, _, err = asyncrl(name, "--hel", capsys=capsys)
        assert (code, err.count("\n")) == (2, 1), name  # the abbreviation of --help is not guessed
    assert asyncrl("run", "a.toml", "--resum", capsys=capsys)[::2] == (
        2,
        "asyncrl run: unknown argument --resum, did you mean --resume; `asyncrl run --help` says more\n",
    )
    assert asyncrl("--version", capsys=capsys)[:2] == (0, f"asyncrl {__version__}\n")


@pytest.mark.slow
async def test_a_command_works_where_an_event_loop_runs_already(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As in a notebook."""
    nobody = ["--set", "bus.url=nats://127.0.0.1:9", "--set", "bus.connect_seconds=0.3", "--set", "run.name=x"]
    code, _, err = asyncrl("scale", *nobody, "--rollout-workers", 1, capsys=capsys)
    assert (code, "nats://127.0.0.1:9" in err) == (1, True)


def test_check_says_what_follows_from_the_run_file(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = asyncrl("check", run_file, "--set", "staleness.max_staleness=3", capsys=capsys)
    assert code == 0
    assert "staleness bound   3 versions (async)" in out.splitlines()
    assert "window            16 groups = (max_staleness 3 + 1) x groups_per_batch 4" in out
    assert "largest group" in out
    assert "max_staleness = 3" in out


def test_a_share_of_a_gpu_that_breaks_products_is_named(
    run_file: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is 60: with some limits cuBLAS returns wrong products; unset it"
    for limit, is_named in (("60", True), ("100", False)):
        monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", limit)
        caplog.clear()
        code, _, _ = asyncrl("check", run_file, "--set", "learner.backend=megatron", capsys=capsys)
        assert (code, said in caplog.text) == (0, is_named)


def test_check_counts_the_memory_of_gpus_that_are_elsewhere(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    run = (run_file, "--set", "learner.backend=megatron")
    code, out, _ = asyncrl("check", *run, "--gpu-gib", "79.6", capsys=capsys)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""  # and not by this machine's
    assert code == 0
    assert re.search(r"^memory of a rank  load \d+\.\d, step .* GiB on its GPU", out, re.MULTILINE)
    assert "beside a learner" not in out  # an engine in the worker's process takes memory as it needs it
    engine = ("--set", "engine.kind=sglang", "--set", "engine.device=auto", "--set", "model.dtype=bfloat16")
    for gib, said in (("79.6", r"an engine has \d+\.\d GiB there"), ("14", r"no: rollout\.gpus: of 14\.0 GiB")):
        _, out, _ = asyncrl("check", *run, *engine, "--gpu-gib", gib, capsys=capsys)
        assert re.search(f"^beside a learner  {said}", out, re.MULTILINE)
    code, out, err = asyncrl("check", *run, "--gpu-gib", "1e-6", capsys=capsys)
    assert (code, out) == (2, "")
    assert re.search(r"learner: a rank needs 0 GiB .*, and its GPU has 0 GiB; use ", err)
    code, _, err = asyncrl("check", *run, "--gpu-gib", "-1", capsys=capsys)
    assert (code, "--gpu-gib -1: must be the memory of a GPU in GiB" in err) == (2, True)


def test_check_asks_of_gpus_that_are_elsewhere_what_gpus_can_do(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang's CPU server has no attention with sinks, and this machine has no GPU."""
    model = make_tiny_model(tmp_path / "gpt_oss", architecture="gpt_oss")
    sglang = ("engine.kind=sglang", "engine.device=auto", "model.dtype=bfloat16", f"model.path={model}")
    settings = (*sglang, "rollout.workers=1", "rollout.gpus=[1]")
    run = (run_file, "--gpu-gib", "79.6", *(part for one in settings for part in ("--set", one)))
    code, out, err = asyncrl("check", *run, capsys=capsys)
    assert (code, err) == (0, "")
    assert re.search(r"^GPUs +of another machine$", out, re.MULTILINE)
    code, _, err = asyncrl("check", *run, "--set", "engine.options={tensor_parallel=3}", capsys=capsys)
    assert (code, "tensor_parallel: 3 does not divide the model's num_attention_heads" in err) == (2, True)


def test_check_says_what_an_engine_has_beside_the_learner_on_the_only_gpu(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(colocated, "read_gpu_memory", lambda: GpuMemory(total=80 * 2**30, free=0))
    engine = ("engine.kind=sglang", "engine.device=auto", "learner.device=auto", "model.dtype=bfloat16")
    shares = []
    for workers in (1, 2):
        words = [word for key in (*engine, f"rollout.workers={workers}") for word in ("--set", key)]
        _, out, _ = asyncrl("check", run_file, *words, "--set", "learner.backend=megatron", capsys=capsys)
        (share,) = re.findall(r"^beside a learner  an engine has (\S+) GiB there, and needs", out, re.MULTILINE)
        shares.append(float(share))
    assert shares[0] == pytest.approx(2 * shares[1], abs=0.2)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (
            ["learner.learning_rate=2e-5", "staleness.max_staleness=4"],
            "2e-05 x 4 versions is 8e-05, over 2e-05: with tis_token a 135M model lost held-out reward, up to 0.06",
        ),
        (["learner.learning_rate=5e-6", "staleness.max_staleness=4"], ""),
        (["learner.learning_rate=2e-5", "run.mode=sync", "staleness.max_staleness=0"], ""),
        (
            ["learner.learning_rate=2e-5", "learner.lora={rank = 4}", "learner.backend=megatron"],
            "adapters were compared with synchronous training twice",
        ),
        (["learner.learning_rate=3e-3", "staleness.max_staleness=4"], ""),  # the demo's
        (
            ["learner.learning_rate=1e-2", "staleness.max_staleness=4"],
            "is 0.04, over 0.012: some runs there learned less",
        ),
        (
            [
                *("learner.learning_rate=4e-5", "staleness.max_staleness=4"),
                *("algorithm.loss=topr", "algorithm.correction=none"),
            ],
            "with topr a 135M model lost held-out reward, up to 0.07 at 0.00016; lower",
        ),
    ],
)
def test_check_says_when_a_learning_rate_was_shown_to_lose_with_tokens_this_old(
    run_file: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], wanted: str
) -> None:
    sets = [word for one in overrides for word in ("--set", one)]
    code, out, err = asyncrl("check", run_file, *sets, capsys=capsys)
    assert code == 0, err
    said = [line for line in out.splitlines() if line.startswith("old tokens  ")]
    assert len(said) == bool(wanted)
    assert not said or wanted in said[0]


def test_check_prints_what_was_changed_and_every_key_on_request(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = asyncrl("check", run_file, "--set", "staleness.max_staleness=3", capsys=capsys)
    keys = [line.partition(" = ")[0] for line in out.partition("# all other keys")[0].splitlines() if " = " in line]
    assert "max_staleness" in keys and "path" in keys
    assert not {"eviction", "top_p", "restarts"} & set(keys)
    _, out, _ = asyncrl("check", run_file, "--all", capsys=capsys)
    assert 'eviction = ""' in out and "restarts = 3" in out and "# all other keys" not in out


def test_check_shows_the_first_prompt_and_what_is_odd(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.jsonl").write_text('{"prompt": "2 ", "label": "5"}\n')
    code, out, _ = asyncrl("check", run_file, "--set", f"data.path={tmp_path / 'odd.jsonl'}", capsys=capsys)
    assert code == 0
    assert 'first prompt      "2' in out and "its label         '5'\n" in out
    assert out.splitlines()[-1].startswith(f"odd               {tmp_path / 'odd.jsonl'}:1: ends with a space")


def test_check_does_not_print_the_token(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = asyncrl("check", run_file, "--set", "bus.token=hunter2", capsys=capsys)
    assert "hunter2" not in out


def test_check_says_which_gpus_each_process_gets(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "GPUs              none, all on the CPU" in asyncrl("check", run_file, capsys=capsys)[1]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    two = ["--set", "rollout.workers=2"]
    assert "GPUs              learner 0; w0 1; w1 2" in asyncrl("check", run_file, *two, capsys=capsys)[1]
    cpu = ["--set", "learner.device=cpu"]
    assert "GPUs              w0 0; w1 1" in asyncrl("check", run_file, *two, *cpu, capsys=capsys)[1]
    ranks = ["--set", "learner.backend=megatron", "--set", "learner.ranks=8"]
    code, _, err = asyncrl("check", run_file, *ranks, capsys=capsys)
    assert (code, "8 ranks need 8 GPUs, this machine has 4" in err) == (2, True)


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


FULL = OSError(errno.ENOSPC, "No space left on device")
DIED = EngineDied("gone")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FULL, 1),
        (RuntimeError("boom"), 1),
        (NoAnswer("bus.url: nobody answers"), 1),
        (caused(DIED, ExceptionGroup("the group it was the only one of", [DIED])), 1),
        (HopelessError("the last 64 groups were all failed"), 2),
        (caused(EngineDied("gone"), ConfigError("engine.options: wrong")), 2),
        (ExceptionGroup("two", [FULL, HopelessError("no groups")]), 2),
        (ExceptionGroup("two", [RuntimeError("boom"), ExceptionGroup("one", [ConfigError("learner.ranks: 8")])]), 2),
    ],
)
def test_exit_code_is_2_if_and_only_if_a_restart_would_repeat_the_error(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, run_file: Path
) -> None:
    def fail(options: Any) -> int:
        raise error

    monkeypatch.setattr(cli.load("check"), "run", fail)
    assert cli.main(["check", str(run_file)]) == code


def test_several_errors_at_once_are_each_said(
    monkeypatch: pytest.MonkeyPatch, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: Any) -> int:
        raise ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("a"), ExceptionGroup("b", [KeyError(1)])])

    monkeypatch.setattr(cli.load("check"), "run", fail)
    assert cli.main(["check", str(run_file)]) == 1
    assert "asyncrl check: ValueError: a; KeyError: 1\n" in capsys.readouterr().err


MISTAKES = {
    "misspelt key": ("learner.stesp=1", "learner: unknown key 'stesp'"),
    "near key": ("rollout.group_sise=4", "did you mean 'group_size'?"),
    "unknown section": ("lerner.ranks=1", "unknown key 'lerner'; did you mean 'learner'?"),
    "key of TRL": ("learner.lr=1e-6", "unknown key 'lr'; did you mean 'learning_rate'?"),
    "key of verl": ("rollout.n=8", "unknown key 'n'; did you mean 'group_size'?"),
    "capitals": ("algorithm.name=GRPO", "algorithm.name: 'GRPO' is unknown; did you mean 'grpo'?"),
    "file for a module": ("reward.kind=./a/b.py:f", "names a file; write its module: 'a.b:f'"),
    "file elsewhere": ("reward.kind=../a/b.py:f", "names a file; write its module: 'b:f'"),
    "wrong type": ("run.steps=many", "run: steps must be a whole number, got 'many'"),
    "wrong range": (
        "staleness.max_staleness=-1",
        """max_staleness must be "auto" or >= 0 (0 trains on-policy), got -1""",
    ),
    "text for a token": ('rollout.stop_token_ids=["a"]', "stop_token_ids must be a whole number, got 'a'"),
    "no list of tokens": ("rollout.stop_token_ids=a", "stop_token_ids must be a list, got 'a'"),
    "no room in a message": ("bus.max_message_bytes=100", "bytes without its label, and 100 leave no room for it"),
    "home of the shell": ("run.directory=~/runs", "run.directory: ~ is not expanded in a run file; write the whole"),
    "model at home": ("model.path=~/m", "model.path: ~/m: no such model folder; ~ is not expanded here"),
    "bool for a number": ("run.steps=true", "steps must be a whole number"),
    "unknown choice": ("run.mode=asink", "mode must be one of 'sync', 'one_step_off', 'async', got 'asink'"),
    "not an override": ("steps", "write section.key=value"),
    "data missing": ("data.path=nowhere.jsonl", "nowhere.jsonl"),
    "model missing": ("model.path=nowhere", "model.path: nowhere: no such model folder"),
    "unknown engine": ("engine.kind=sglnag", "engine.kind: 'sglnag' is unknown; did you mean 'sglang'?"),
    "unknown engine option": ("engine.options={speed=1}", "engine.options: unknown key 'speed'"),
    "unknown backend": ("learner.backend=megatorn", "did you mean 'megatron'?"),
    "reward with a dot": ("reward.kind=my_judge.score", "is unknown; did you mean 'my_judge:score'?"),
    "name of the hub's": (
        "model.path=Qwen/Qwen3-0.6B",
        "hf download Qwen/Qwen3-0.6B --local-dir Qwen/Qwen3-0.6B",
    ),
    "not downloaded": (
        "model.path=models/Qwen3-0.6B",
        "hf download ORGANISATION/Qwen3-0.6B --local-dir models/Qwen3-0.6B",
    ),
    "no room for a prompt": ("rollout.max_new_tokens=64", "64 new tokens leave no room for a prompt"),
    "reward module": ("reward.kind=my_judge:score", "cannot import 'my_judge'"),
    "reward function": ("reward.kind=asyncrl.data.demo_task:rewardd", "reward"),
    "group size": ("bus.max_group_bytes=1000", "over bus.max_group_bytes (1,000)"),
    "log too small": ("bus.max_log_bytes=100000", "a full log would stop the run"),
    "no correction": ("algorithm.correction=none", "allow_uncorrected = true if you mean it"),
    "no baseline": ("rollout.group_size=1", "gives the advantage grpo no baseline"),
    "nothing to choose": ("rollout.top_k=1", "top_k must be 0 (off) or 2 to 1,024"),
    "a penalty in training": (
        "rollout.repetition_penalty=1.1",
        "so every behavior logprob would be wrong",
    ),
    "a context without answers": ("rollout.max_context_tokens=8", "no token to answer with"),
    "a context beyond the model": ("rollout.max_context_tokens=99999", "takes; use fewer"),
    "no gpu": ("learner.device=cuda", "no GPU that torch sees"),
    "bad url": ("bus.url=localhost", "url must start with nats://"),
    "bad port": ("bus.url=nats://me:secret@host:99999", "url nats://host:99999: the port must be in 1..65535"),
    "more than the disk": (f"bus.max_log_bytes={2**62}", "three quarters of what is free at"),
    "message beyond nats-server's": ("bus.max_message_bytes=2000000000", "must be >= 1 and <= 1,073,741,824"),
    "years of waiting": ("bus.ack_seconds=1e300", "ack_seconds must be "),
    "always redelivered": ("bus.ack_seconds=1e-9", "ack_seconds must be >= 0.1"),
    "always stalled": ("run.stall_seconds=1e-9", "stall_seconds must be >= 1"),
    "centuries": ("bus.connect_seconds=1e10", "connect_seconds must be at most 1e9"),
    "logits beyond float32": ("rollout.temperature=1e-30", "temperature must be >= 0.001 and <= 1000 "),
    "beyond float32": ("learner.learning_rate=1e300", "learning_rate must be within float32"),
    "profiled after the end": ("learner.profile_steps=[101]", "step [101] is behind the last, run.steps = 100"),
    "no host": ("bus.url=nats://", "url nats://: names no host"),
    "NUL in a path": (r'run.directory="a\u0000b"', "directory must be text without NUL characters"),
    "path of two lines": (r'model.path="no\nwhere"', "model.path: no where: no such model folder"),
    "too deep": (f"run.steps={'[' * 5000}", "too deep to be read"),
    "long name": (f"run.name={'x' * 129}", "name must have at most 128 characters, got 129"),
    "over 64 bits": ("run.steps=99999999999999999999", "steps must be a whole number of 64 bits"),
    "odd ranks": ("learner.tensor_parallel=2", "ranks must be a multiple of tensor_parallel (2), got 1"),
    "ranks of one process": ("learner.ranks=2", 'backend = "reference" runs in one process'),
    "gpu that is not there": ("learner.gpus=[0]", "there is no GPU 0; this machine has none that torch sees"),
    "rollout that is no function": ("rollout.function=os:sep", "'os:sep' is a str, not a function or class"),
    "engine that is no class": ("engine.kind=os:sep", "engine.kind: 'os:sep' is a str"),
    "algorithm that is none": ("algorithm.name=os:path", "'os:path' is a module, not an AlgorithmSpec"),
    "negative clip": ("algorithm.options={clip_low=-0.2}", "clip_low of ppo_clip must be >= 0, got -0.2"),
    "alarm over all": ("metrics.drop_alarm=5", "drop_alarm must be >= 0 and <= 1 (0 is off), got 5"),
    "reward beyond float32": ("reward.largest=1e30", "largest must be > 0 and <= 1e+12, got 1e+30"),
    "negative alarm": ("metrics.mismatch_alarm=-1", "mismatch_alarm must be >= 0 (0 is off), got -1"),
}


@pytest.mark.parametrize(("override", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_gets_one_line_and_exit_code_2(
    override: str, message: str, run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = asyncrl("check", run_file, "--set", override, capsys=capsys)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err


def test_a_run_file_that_is_not_there_or_not_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = asyncrl("check", tmp_path / "none.toml", capsys=capsys)
    assert (code, "no such run file" in err) == (2, True)
    for text, problem in {
        "[run\nname = 3": ":1: Expected ']' at the end of a table declaration in: [run",
        "[run]\nname = demo\n": ":2: Invalid value in: name = demo",
        "a = 1\na = 2\n\n": ":2: Cannot overwrite a value in: a = 2",
        "[bus]\ntoken = geheim": ":2: Invalid value in: token = ...",
        "[bus]\nurl = nats://me:geheim@host": ":2: Invalid value in: url = nats://host",
    }.items():
        (tmp_path / "bad.toml").write_text(text)
        assert asyncrl("check", tmp_path / "bad.toml", capsys=capsys) == (
            2,
            "",
            f"asyncrl: {tmp_path}/bad.toml{problem}\n",
        )
    code, _, err = asyncrl("check", tmp_path, capsys=capsys)
    assert (code, "is a folder; name the run file" in err) == (2, True)


@pytest.mark.parametrize("command", [["-m", "asyncrl"], ["-P", "-m", "asyncrl"]])
def test_a_users_file_replaces_no_module_of_python_or_of_a_package(tmp_path: Path, command: list[str]) -> None:
    for name in ("http", "json", "logging", "queue", "random", "select", "tokenizers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "mine.toml").write_text('[model]\npath = "a"\n[data]\npath = "http.py"\n')
    words = [sys.executable, *command, "check", "mine.toml", "--set", "bus.url=nats://localhost"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "asyncrl: model.path: a: no such model folder\n")


@pytest.mark.parametrize("locale", [{"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "POSIX"}])
def test_names_may_have_letters_that_the_locale_has_not(tmp_path: Path, locale: dict[str, str]) -> None:
    (tmp_path / "läufe.toml").write_text('[model]\npath = "mödell"\n[data]\npath = "läufe.toml"\n', encoding="utf-8")
    words = [sys.executable, "-m", "asyncrl", "check", "läufe.toml"]
    environment = os.environ | {"PYTHONUTF8": "0"} | locale
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (2, "asyncrl: model.path: m\\xf6dell: no such model folder\n")


def test_a_users_module_that_an_installed_one_hides_is_named(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    (tmp_path / "random.py").write_text("def reward(sample): return 1.0")
    (tmp_path / "http").mkdir()
    (tmp_path / "http" / "agent.py").touch()
    for name, mine in {"random:reward": "random.py", "http.agent:reward": "http"}.items():
        code, _, err = asyncrl("check", run_file, "--set", f"reward.kind={name}", capsys=capsys)
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith(f"asyncrl: reward.kind: {mine} is hidden by ") and "give yours another name" in err


@pytest.mark.parametrize("text", ["raise SystemExit('mine')", "import no_such_module", "x = 1"])
def test_a_users_file_that_a_package_takes_for_another_package_is_named(
    text: str, run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As httpx does with h2, which may not be installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "optional_package.py").write_text(text)

    def import_vendor(name: str) -> Any:
        if not name.startswith("asyncrl.data.demo_task"):
            return importlib.import_module(name)
        return importlib.import_module("optional_package").missing

    monkeypatch.setattr("asyncrl.config.plugins.importlib", SimpleNamespace(import_module=import_vendor))
    code, _, err = asyncrl("check", run_file, "--set", "reward.kind=asyncrl.data.demo_task:reward", capsys=capsys)
    sys.modules.pop("optional_package", None)
    assert (code, err.count("\n")) == (2, 1)
    assert (
        "reward.kind: a package imports optional_package.py of this folder as if it were another package; give" in err
    )


def test_no_correction_is_fine_when_nothing_is_stale_or_the_user_insists(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = ["--set", "algorithm.correction=none"]
    assert asyncrl("check", run_file, *none, "--set", "run.mode=sync", capsys=capsys)[0] == 0
    assert asyncrl("check", run_file, *none, "--set", "algorithm.allow_uncorrected=true", capsys=capsys)[0] == 0


def test_the_demo_run_file_names_every_section() -> None:
    made = config.load(ROOT / "examples" / "demo.toml")
    assert made.run.mode == "async"


def test_tap_shows_where_a_server_is_and_not_its_key() -> None:
    shown = plain(ServerAddress(name="judge", url="http://h:1/v1", key="hush"))
    assert shown == {"name": "judge", "url": "http://h:1/v1", "model": "", "key": "***"}
