"""Adapters in an SGLang server, seen in its requests: a request keeps its version; unused adapters are unloaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.learner import LoraSection
from asyncrl.engines.sglang.adapters import Adapters, buffer_bytes, server_arguments
from asyncrl.engines.sglang.reply import Reply
from asyncrl.engines.sglang.versions import Stamps
from asyncrl.errors import EngineError, WeightsError
from tests.unit.engines.sglang.test_reply import LENGTH, body, finished

BASE = (0, 0)


class Server:
    """Holds adapters by name."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.problem = self.lost = ""

    async def post(self, path: str, asked: Mapping[str, Any]) -> Any:
        if self.problem:
            raise EngineError(self.problem)
        if path == "/load_lora_adapter":
            assert asked["lora_name"] not in self.held
            self.held.append(asked["lora_name"])
            if self.lost:
                raise EngineError(self.lost)
        else:
            assert path == "/unload_lora_adapter"
            self.held.remove(asked["lora_name"])
        return {"success": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    return tmp_path


async def test_a_request_ends_with_the_version_that_it_began_with(folder: Path) -> None:
    server = Server()
    adapters = Adapters(server.post, first_version=BASE)
    with adapters.in_use() as (version, names):
        assert (version, names) == (BASE, {})  # the base model, before any version
    assert (await adapters.load((0, 1), folder)).pause_seconds == 0.0
    with adapters.in_use() as (version, old):
        assert version == (0, 1)
        await adapters.load((0, 2), folder)
        assert len(server.held) == 2  # a request still uses the old adapter
        with adapters.in_use() as (version, new):
            assert version == adapters.version == (0, 2)
            assert old != new
    await adapters.load((0, 3), folder)
    (held,) = server.held  # no request uses the other adapters
    assert held.startswith("v0-3-")


async def test_an_older_version_is_used_again_and_its_name_never(folder: Path) -> None:
    server = Server()
    adapters = Adapters(server.post, first_version=BASE)
    await adapters.load((0, 1), folder)
    with adapters.in_use():
        await adapters.load((0, 2), folder)
        await adapters.load((0, 1), folder)  # requested by an evaluation, and still loaded
        assert adapters.version == (0, 1)
        assert len(server.held) == 1
    await adapters.load(BASE, folder)
    with adapters.in_use() as (version, names):
        assert (version, names) == (BASE, {})


async def test_adapters_whose_answer_was_lost_are_unloaded_and_loaded_again(folder: Path) -> None:
    server = Server()
    adapters = Adapters(server.post, first_version=BASE)
    server.lost = "no response within 60 s"
    for _ in range(2):
        with pytest.raises(WeightsError, match="no response"):
            await adapters.load((0, 1), folder)
        assert server.held == []
    server.lost = ""
    await adapters.load((0, 1), folder)
    assert adapters.version == (0, 1)


def test_tokens_of_an_adapter_are_of_its_version_whatever_the_server_says_of_its_model() -> None:
    reply = Reply(sent_version=(0, 7), stamps=Stamps(first_version=BASE), keeps_version=True)
    spans = [{"version": "0:0", "start": 0, "end": 3}]
    reply.take_whole(body([5, 6, 7], weight_versions=spans, finish_reason=LENGTH), late_tokens=1)
    assert finished(reply.generation()) == ([5, 6, 7], [(0, 7)])


ATTENTION = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]
EXPERTS = [f"model.layers.0.mlp.experts.{number}.{name}_proj.weight" for number in (0, 1) for name in ("gate", "up")]
OF_MIXTRAL = [f"model.layers.0.block_sparse_moe.experts.0.{name}.weight" for name in ("w1", "w2", "w3")]


@pytest.mark.parametrize(
    ("names", "modules", "expected"),
    [
        (ATTENTION, ("all-linear",), {"max-loras-per-batch": 8}),
        (ATTENTION + EXPERTS, ("q_proj", "k_proj", "v_proj"), {"max-loras-per-batch": 8}),
        (EXPERTS, ("all-linear",), {"max-loras-per-batch": 2, "lora-backend": "triton"}),
        (ATTENTION + OF_MIXTRAL, ("w2",), {"max-loras-per-batch": 2, "lora-backend": "triton"}),
    ],
)
def test_adapters_of_experts_get_few_places_and_the_kernels_that_have_them(
    names: list[str], modules: tuple[str, ...], expected: dict[str, Any]
) -> None:
    lora = LoraSection(rank=32, modules=modules, publish="adapter")
    given = server_arguments(lora, iter(names), device="cuda")
    assert {key: given.get(key) for key in ("max-loras-per-batch", "lora-backend") if key in given} == expected


def test_modules_of_mixtrals_experts_have_sglangs_names() -> None:
    lora = LoraSection(rank=32, modules=("all-linear",), publish="adapter")
    given = server_arguments(lora, ATTENTION[:1] + OF_MIXTRAL, device="cuda")
    assert given["lora-target-modules"] == ["down_proj", "gate_proj", "q_proj", "up_proj"]


@pytest.mark.parametrize(
    ("modules", "given", "ranks", "places", "numbers"),
    [
        (("q_proj", "o_proj"), {}, 1, 8, 2 * (2048 + 4096)),
        (("q_proj", "o_proj"), {}, 2, 8, 2 * (2048 + 4096 // 2)),  # all of A of q_proj, and of B of o_proj
        (("all-linear",), {}, 1, 2, 2 * (2048 + 4096) + 128 * 3 * (2048 + 768)),
        (("all-linear",), {"max-loras-per-batch": 4, "max-lora-rank": 64}, 1, 8, 12_288 + 128 * 3 * 2816),
    ],
)
def test_places_for_adapters_take_memory_of_the_server(
    modules: tuple[str, ...], given: dict[str, Any], ranks: int, places: int, numbers: int
) -> None:
    """A layer of Qwen3-30B-A3B, without k and v: 48 of them at rank 32 take 3.3 GB for experts in each place."""
    shapes = {"model.layers.0.self_attn.q_proj.weight": (4096, 2048), "model.layers.0.mlp.gate.weight": (128, 2048)}
    shapes |= {"model.layers.0.self_attn.o_proj.weight": (2048, 4096), "model.embed_tokens.weight": (151_936, 2048)}
    for expert in (f"model.layers.0.mlp.experts.{number}" for number in range(128)):
        shapes |= {f"{expert}.{name}_proj.weight": (768, 2048) for name in ("gate", "up")}
        shapes[f"{expert}.down_proj.weight"] = (2048, 768)
    lora = LoraSection(rank=32, modules=modules, publish="adapter")
    assert buffer_bytes(lora, shapes, given=given, ranks=ranks, width=2) == 2 * 32 * places * numbers
    assert buffer_bytes(None, shapes, given=given, ranks=ranks, width=2) == 0
