"""An SGLang server as a process: its command line, its environment, and that nothing of it outlives its owner."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import select
import signal
import sys
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.engines.sglang import engine as sglang
from asyncrl.engines.sglang import server as sglang_server
from asyncrl.engines.sglang.options import Options
from asyncrl.engines.sglang.routed_experts import OPTION
from asyncrl.errors import ConfigError, EngineDied
from asyncrl.messages import SamplingParams
from tests import ROOT
from tests.harness.engines import PROMPT, TOLERANCE, Check, Model

SHORT = SamplingParams(max_new_tokens=4, ignore_eos=True)
TWENTY = SamplingParams(max_new_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"), seed=0)


def make_engine(model: Model, log_path: Path, **options: Any) -> sglang.SGLangEngine:
    return sglang.SGLangEngine(
        model.folder,
        device="cpu",
        dtype="float32",
        version=(0, 3),
        options=sglang.Options(**options),
        log_path=log_path,
    )


# -- the command -------------------------------------------------------------------------------------------------------


def command(device: str = "cpu", **server_arguments: Any) -> list[str]:
    return sglang_server.server_command(
        Path("/model"),
        device=device,
        dtype="bfloat16",
        port=1234,
        weight_version="0:3",
        tensor_parallel=2,
        stream_interval=16,
        server_arguments=server_arguments,
    )


def value_of(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_every_option_of_sglang_can_be_reached() -> None:
    words = command(
        mem_fraction_static=0.85,
        **{"attention-backend": "triton", "enable-metrics": True, "skip-server-warmup": False},
        cuda_graph_bs=[1, 2],
        json_model_override_args={"a": 1},
    )
    assert value_of(words, "--mem-fraction-static") == "0.85"
    assert value_of(words, "--attention-backend") == "triton"  # ours for a CPU is overridden
    assert "--enable-metrics" in words
    assert "--skip-server-warmup" not in words
    assert words[words.index("--cuda-graph-bs") :][:3] == ["--cuda-graph-bs", "1", "2"]
    assert value_of(words, "--json-model-override-args") == '{"a": 1}'


def test_a_gpu_server_keeps_its_own_defaults() -> None:
    words = command("cuda")
    assert value_of(words, "--dtype") == "bfloat16"
    assert value_of(words, "--tensor-parallel-size") == "2"
    assert not {"--attention-backend", "--mem-fraction-static", "--sleep-on-idle"} & set(words)


def test_no_server_warms_up_with_a_sentence() -> None:
    """Of the demo's tokenizer nothing is left of it, and on a GPU SGLang 0.5.16 dies of an empty prompt."""
    assert "--skip-server-warmup" in command("cuda")


@pytest.mark.parametrize(
    ("said", "ranks"),
    [
        ({}, 1),
        ({"tp_size": 2}, 2),
        ({"tp_size": 4}, 0),
        ({"dp_size": 2}, 0),
        ({"nnodes": 2}, 0),
        ({"quantization": "fp8"}, 0),
        ({"speculative_algorithm": "EAGLE"}, 0),
        ({"custom_weight_loader": ["mine.load"]}, 0),
        ({"custom_weight_loader": None}, 0),
    ],
)
def test_our_loader_reads_files_in_plain_servers_and_sglang_in_all_others(said: dict[str, Any], ranks: int) -> None:
    info = {"tp_size": 1, "dp_size": 1, "nnodes": 1, "custom_weight_loader": [sglang_server.LOADER]}
    assert sglang_server.ranks_with_loader(info | said) == ranks


def test_the_loader_that_servers_are_told_of_is_there() -> None:
    module, _, name = sglang_server.LOADER.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))
    assert value_of(command("cuda"), "--custom-weight-loader") == sglang_server.LOADER


def test_sglang_finds_its_plugin_for_a_cpu_where_a_cpu_server_imports_from() -> None:
    """The group of entry points is SGLang's, the module is beside the folder that names it."""
    folder = Path(sglang_server.__file__).parent / "cpu_plugin"
    (found,) = (one for of in metadata.distributions(path=[str(folder)]) for one in of.entry_points)
    assert (found.group, found.attr) == ("sglang.srt.plugins", "register")
    assert (folder / f"{found.module}.py").is_file()


def test_a_server_is_told_to_keep_experts_only_where_they_are_wanted() -> None:
    words = {
        wanted: sglang_server.server_command(
            Path("/model"),
            device="cuda",
            dtype="bfloat16",
            port=1234,
            weight_version="0:3",
            tensor_parallel=1,
            stream_interval=16,
            server_arguments={},
            tells_experts=wanted,
        )
        for wanted in (True, False)
    }
    assert [f"--{OPTION}" in words[wanted] for wanted in (True, False)] == [True, False]


def test_ranks_on_a_cpu_get_their_shares_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else SGLang refuses more ranks than NUMA nodes. What the user says himself stays."""

    def shares(ranks: int, **base: str) -> str | None:
        environment = sglang_server.server_environment(base, device="cpu", tensor_parallel=ranks)
        return environment.get("SGLANG_CPU_OMP_THREADS_BIND")

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 2, 3, 4})
    assert shares(1) is None
    assert shares(2) == "2,3|4,5"
    assert shares(8) == "2|3|4|5|2|3|4|5"
    assert shares(2, SGLANG_CPU_OMP_THREADS_BIND="0|1") == "0|1"


def test_stand_ins_are_seen_by_cpu_servers_only() -> None:
    here, base = Path(sglang_server.__file__).parent, {"PYTHONPATH": "/mine"}
    paths = sglang_server.server_environment(base, device="cpu")["PYTHONPATH"].split(os.pathsep)
    assert paths == [str(here / "cpu_stubs"), str(here / "cpu_plugin"), "/mine"]
    assert sglang_server.server_environment(base, device="cuda")["PYTHONPATH"] == "/mine"
    assert base == {"PYTHONPATH": "/mine"}


async def test_a_missing_sglang_says_how_to_install_it(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install"):
        await make_engine(model, tmp_path / "log").start()


# -- the process tree --------------------------------------------------------------------------------------------------

TREE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(600)
"""

OWNER = """
import asyncio, os, sys
from pathlib import Path
from asyncrl.engines.sglang.server import ServerProcess

async def main():
    server = ServerProcess([sys.executable, "-c", sys.argv[1]], environment=os.environ, log_path=Path(sys.argv[2]))
    await server.start()
    print("started", flush=True)
    await server.wait()

asyncio.run(main())
"""

SGLANG_OWNER = """
import asyncio, sys
from pathlib import Path
from asyncrl.engines.sglang.engine import Options, SGLangEngine
from tests.harness.engines import announce

async def main():
    old, new, log_path = map(Path, sys.argv[1:])
    engine = SGLangEngine(old, device="cpu", dtype="float32", version=(0, 3),
                          options=Options(server_arguments={"max-total-tokens": 20_000}), log_path=log_path)
    await engine.start()
    print(engine.url, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await engine.load(announce(new, 4))
    print("loaded", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def all_gone(pidfds: list[int], *, seconds: float = 30.0) -> bool:
    """Wait until the processes ended (a pidfd is readable then)."""
    for fd in pidfds:
        ended = select.poll()  # select() takes no descriptor above 1,023
        ended.register(fd, select.POLLIN)
        if not ended.poll(1000 * seconds):
            return False
        os.close(fd)
    return True


async def end_of(owner: asyncio.subprocess.Process) -> None:
    """wait() alone returns at once after the process, with its pipe still open for whom it shared that with."""
    await owner.communicate()


def descendants(pid: int, *, but: Collection[int] = ()) -> list[int]:
    children = psutil.Process(pid).children(recursive=True)
    return [os.pidfd_open(process.pid) for process in children if process.pid not in but]


async def test_closing_ends_the_whole_tree(tmp_path: Path) -> None:
    server = sglang_server.ServerProcess(
        [sys.executable, "-c", TREE], environment=os.environ, log_path=tmp_path / "log"
    )
    others = {process.pid for process in psutil.Process().children(recursive=True)}  # of other tests' fixtures
    await server.start()
    await asyncio.to_thread(wait_for_text, tmp_path / "log", "child")
    tree = descendants(os.getpid(), but=others)
    assert len(tree) >= 3  # warden, command, child in a session of its own
    assert server.is_alive
    await server.close()
    assert not server.is_alive
    assert await asyncio.to_thread(all_gone, tree)


def wait_for_text(path: Path, text: str) -> None:
    """Blocks until a log holds ``text``, woken by nothing: only for files, which nobody announces."""
    poll = select.poll()
    while text not in path.read_text():
        poll.poll(20)


async def test_the_server_goes_with_its_owner(tmp_path: Path) -> None:
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, TREE, str(tmp_path / "log"), stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"started\n"
    await asyncio.to_thread(wait_for_text, tmp_path / "log", "child")
    tree = descendants(owner.pid)
    assert len(tree) == 3
    owner.send_signal(signal.SIGKILL)
    await end_of(owner)
    assert await asyncio.to_thread(all_gone, tree)


async def test_the_server_goes_with_its_owner_though_a_fork_of_that_lives_on(tmp_path: Path) -> None:
    """A reward function's ProcessPoolExecutor has all that its worker had open, and does not end with it."""
    forking = OWNER.replace(
        "    await server.wait()",
        "    if not (fork := os.fork()):\n        import time; time.sleep(600)\n"
        "    print(fork, flush=True)\n    await server.wait()",
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", forking, TREE, str(tmp_path / "log"), stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"started\n"
    fork = int(await owner.stdout.readline())
    await asyncio.to_thread(wait_for_text, tmp_path / "log", "child")
    tree = descendants(owner.pid, but=[fork])
    assert len(tree) == 3
    owner.kill()
    try:
        assert await asyncio.to_thread(all_gone, tree, seconds=60.0)
    finally:
        os.kill(fork, signal.SIGKILL)
    await end_of(owner)


async def test_ctrl_c_in_a_terminal_is_for_the_worker_alone(tmp_path: Path) -> None:
    """It finishes what it holds, for which it needs its server: the terminal signals all of its foreground group."""
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{OWNER}",
        TREE,
        str(tmp_path / "log"),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"started\n"
    await asyncio.to_thread(wait_for_text, tmp_path / "log", "child")
    tree = descendants(owner.pid)
    os.killpg(owner.pid, signal.SIGINT)
    is_over = await asyncio.to_thread(all_gone, tree[:1], seconds=1.0)
    owner.kill()
    await end_of(owner)
    assert not is_over
    assert await asyncio.to_thread(all_gone, tree)


@pytest.mark.parametrize("milliseconds", [0, 0.5, 1, 2, 4, 8])
async def test_a_warden_that_is_signalled_twice_leaves_nothing_behind(tmp_path: Path, milliseconds: float) -> None:
    server = sglang_server.ServerProcess(
        [sys.executable, "-c", TREE], environment=os.environ, log_path=tmp_path / "log"
    )
    others = {process.pid for process in psutil.Process().children(recursive=True)}
    await server.start()
    await asyncio.to_thread(wait_for_text, tmp_path / "log", "child")
    tree = descendants(os.getpid(), but=others)
    warden = next(process for process in psutil.Process().children() if process.pid not in others)
    warden.send_signal(signal.SIGTERM)
    await asyncio.sleep(milliseconds / 1000)
    with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended meanwhile
        warden.send_signal(signal.SIGINT)
    await server.wait()
    assert await asyncio.to_thread(all_gone, tree, seconds=60.0)


async def test_a_server_that_dies_while_starting_is_noticed(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "server_command", lambda *_, **__: [sys.executable, "-c", "exit('no GPU found')"])
    with pytest.raises(EngineDied, match="no GPU found"):
        await make_engine(model, tmp_path / "log").start()


def test_of_a_long_log_the_end_alone_is_read(tmp_path: Path) -> None:
    """Hundreds of answers that a server's death ends say why, all at once; after a day its log has gigabytes."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(2**40)
        file.seek(0, os.SEEK_END)
        file.write(b"CUDA error")
    server = sglang_server.ServerProcess(["true"], environment={}, log_path=log)
    assert server.log_tail().endswith("CUDA error")
    log.write_text("short")
    assert server.log_tail().endswith("log:\nshort")


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_real_server_of_a_mixture_samples_from_what_it_is_given_and_goes_with_its_owner(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It says what transformers says, before and after a load; and who is attached to it hears of its end."""
    old, new = (Model(tmp_path / str(seed), seed=seed, architecture="glm4_moe") for seed in (0, 1))
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SGLANG_OWNER,
        *(str(path) for path in (old.folder, new.folder, tmp_path / "log")),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    request.addfinalizer(lambda: owner.returncode is None and owner.kill())  # it is up where the test fails early
    assert owner.stdin is not None and owner.stdout is not None
    url = (await owner.stdout.readline()).decode().strip()
    engine = make_engine(old, tmp_path / "unused", url=url)
    await engine.start()
    for model, prompt in ((old, PROMPT), (new, PROMPT[::-1])):  # who loads has a new prefix cache, who is attached not
        if model is new:
            owner.stdin.write(b"\n")
            assert await owner.stdout.readline() == b"loaded\n"
        generations = await asyncio.gather(*(engine.generate(prompt, TWENTY, seed=seed) for seed in range(4)))
        assert max(Check(model)(generation, prompt) for generation in generations) < TOLERANCE

    tree = descendants(owner.pid)
    assert len(tree) >= 4  # warden, server, scheduler, detokenizer
    forever = SamplingParams(max_new_tokens=4000, ignore_eos=True)
    running = asyncio.ensure_future(engine.generate(PROMPT, forever, seed=0))
    await engine.generate(PROMPT, SHORT, seed=0)
    owner.send_signal(signal.SIGKILL)
    with pytest.raises(EngineDied):
        await running
    await end_of(owner)
    assert await asyncio.to_thread(all_gone, tree)
    await engine.close()


def test_float32_is_refused_on_gpus_before_the_server_starts_and_dies() -> None:
    with pytest.raises(ConfigError, match=r'model.dtype: SGLang has no float32.*"bfloat16"'):
        sglang_server.check_dtype("float32", device="cuda", server_arguments={"device": "cuda"})
    for dtype, device, arguments in (
        ("bfloat16", "cuda", {}),
        ("float32", "cpu", {}),
        ("float32", "cuda", {"--dtype": "bfloat16"}),
        ("float32", "cuda", {"device": "cpu"}),
    ):
        sglang_server.check_dtype(dtype, device=device, server_arguments=arguments)


def test_a_model_that_the_cpu_server_gets_wrong_is_refused_on_a_cpu_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Gemma3ForCausalLM"]}')
    sglang_server.check_architecture(tmp_path, device="cuda")
    with pytest.raises(ConfigError, match=r"with a Gemma3ForCausalLM SGLang's CPU server samples .* use a GPU or"):
        sglang_server.check_architecture(tmp_path, device="cpu")
    sglang_server.check_architecture(tmp_path / "none", device="cpu")


def test_attention_heads_that_gpus_cannot_share_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 8, "num_key_value_heads": 2}')
    for tensor_parallel in (1, 2, 4, 8):  # of two key-value heads 4 and 8 have copies
        sglang_server.check_architecture(tmp_path, device="cuda", tensor_parallel=tensor_parallel)
    for tensor_parallel in (3, 16):
        with pytest.raises(ConfigError, match=f"{tensor_parallel} does not divide the model's num_attention_heads, 8"):
            sglang_server.check_architecture(tmp_path, device="cuda", tensor_parallel=tensor_parallel)
    sglang_server.check_architecture(tmp_path, device="cpu", tensor_parallel=3)
    apart = Options(tensor_parallel=3, server_arguments={"enable_dp_attention": True})
    sglang_server.check_architecture(tmp_path, device="cuda", tensor_parallel=apart.attention_parallel)
