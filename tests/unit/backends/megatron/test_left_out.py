"""Every field of Megatron's optimizer and of its gradient buffers has an answer: a key of the run file, or why not."""

from __future__ import annotations

import dataclasses

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from asyncrl.backends.megatron.left_out import LEFT_OUT
from asyncrl.backends.megatron.transformer_config import KEYS


@pytest.mark.parametrize("config", [OptimizerConfig, DistributedDataParallelConfig])
def test_every_field_is_a_key_of_the_run_file_or_has_a_reason(config: type) -> None:
    fields = {field.name for field in dataclasses.fields(config)}
    assert fields - KEYS.keys() - LEFT_OUT.keys() == set()


def test_no_flag_has_two_answers() -> None:
    assert KEYS.keys() & LEFT_OUT.keys() == set()
