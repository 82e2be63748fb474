"""Values of SGLang's options are checked against SGLang's source, as far as the source states their types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.engines.sglang import options as sglang_options
from asyncrl.errors import ConfigError

SOURCE = """
class ServerArgs:
    model_path: str
    dtype: A[str, Arg(choices=["auto", "bfloat16"])] = "auto"
    attention_backend: A[Optional[str], Arg(choices=BACKENDS)] = None
    mem_fraction_static: A[Optional[float], "of the memory"] = None
    max_running_requests: Optional[int] = None
    disable_radix_cache: bool = False
    port: int | str = 0
    level: A[int, Arg(choices=[0, 1, 2])] = 0
    cuda_graph_bs: Optional[List[int]] = None
    tokens: A[int, Arg(help="such as 16k", type_parser=human_readable_int)] = 0
"""


@pytest.fixture(autouse=True)
def installed_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "srt" / "server_args.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(__import__("sys").modules, "sglang", raising=False)
    monkeypatch.setattr(sglang_options, "known_arguments", sglang_options.known_arguments.__wrapped__)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"dtype": "int3"}, "dtype must be one of 'auto', 'bfloat16', got 'int3'"),
        ({"mem_fraction_static": "much"}, "mem-fraction-static must be a number, got 'much'"),
        ({"max-running-requests": 1.5}, "max-running-requests must be a whole number, got 1.5"),
        ({"disable-radix-cache": "yes"}, "disable-radix-cache must be true or false, got 'yes'"),
    ],
)
def test_a_value_that_the_server_would_refuse_is_refused_before_it_starts(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        sglang_options.check_arguments(given)
    assert str(raised.value) == f"engine.options: server_arguments: {problem}"


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "bfloat16", "mem-fraction-static": 0.8, "max-running-requests": 256, "disable-radix-cache": True},
        {"mem-fraction-static": "0.8", "max-running-requests": "256"},
        {"mem-fraction-static": 1, "max-running-requests": False, "level": "2"},
        {"attention-backend": "anything", "cuda-graph-bs": [1, 2], "tokens": "16k"},
    ],
)
def test_what_the_source_does_not_say_plainly_is_left_to_the_server(given: dict[str, Any]) -> None:
    sglang_options.check_arguments(given)
    with pytest.raises(ConfigError) as raised:  # the one value that is plainly wrong
        sglang_options.check_arguments({**given, "dtype": "int3"})
    assert "dtype must be one of" in str(raised.value)
