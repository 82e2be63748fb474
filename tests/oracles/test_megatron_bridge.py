"""Our map of weights agrees with NVIDIA's: megatron-bridge loads a folder into our model and exports it again.

Optional: it runs where megatron-bridge can be imported, which needs Transformer Engine and Python 3.12. DeepSeek-V3's
attention has other modules than Megatron's. The other families that are missing below have folders that megatron-bridge
0.6.2 does not know (Mixtral, GLM-4), or it expects other modules (Gemma 3, gpt-oss).
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.backends import started, tiny_model

FAMILIES = ("qwen2", "qwen2-tied", "qwen3", "llama", "mistral", "qwen3_moe", "glm4_moe")
KINDS = {
    "NormedLinear": "column",
    "ColumnLinear": "column",
    "GatedLinear": "row",
    "RowLinear": "row",
    "Norm": "replicated",
    "Router": "replicated",
    "FirstOfExperts": "column",
    "LastOfExperts": "row",
}
"""How our modules are cut, by their names."""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None,
    reason="megatron-bridge is not installed",
)


class FirstOfExperts(torch.nn.Module):
    """Views of fused experts [E, out, in], under the names of Transformer Engine's grouped linear layers."""

    def __init__(self, fused: torch.Tensor) -> None:
        super().__init__()
        for number, weights in enumerate(fused.detach()):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(weights, requires_grad=False))


class LastOfExperts(FirstOfExperts):
    pass


def with_separate_experts(stage: Any) -> Any:
    for layer in stage.decoder.layers:
        if fused := getattr(layer.mlp, "experts", None):
            separate = torch.nn.Module()
            separate.linear_fc1, separate.linear_fc2 = FirstOfExperts(fused.gate_up), LastOfExperts(fused.down)
            layer.mlp.experts = separate
    return stage


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_that_megatron_bridge_loads_and_exports_is_the_same_as_ours(tmp_path: Path, family: str) -> None:
    architecture, _, tied = family.partition("-")
    folder = tiny_model(tmp_path / "model", architecture=architecture, tied=bool(tied))
    with started("megatron-1", folder) as backend:
        try:  # after megatron.core, which the backend imports in its own way on a CPU
            bridge = importlib.import_module("megatron.bridge")
            mapping = importlib.import_module("megatron.bridge.models.conversion.param_mapping").AutoMapping
        except ImportError as error:
            pytest.skip(f"megatron-bridge cannot be imported: {error}")
        for name, kind in KINDS.items():
            mapping.register_module_type(name, kind)
        running: Any = backend
        (stage,) = running._rank._loaded["policy"]._stages
        with_separate_experts(stage)
        ours = {name: parameter.detach().clone() for name, parameter in stage.named_parameters()}
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.zero_()
        folders = bridge.AutoBridge.from_hf_pretrained(folder, dtype=torch.float32)
        folders.load_hf_weights([stage])
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.detach(), ours[name], rtol=0, atol=0, msg=name)
        written = load_file(folder / "model.safetensors")
        exported = {
            name: one.clone() for name, one in folders.export_hf_weights([stage], cpu=True, show_progress=False)
        }
        assert exported.keys() == written.keys()
        for name, one in written.items():
            torch.testing.assert_close(exported[name], one, rtol=0, atol=0, msg=name)
