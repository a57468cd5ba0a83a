"""Adapters that the engine could not apply exactly are refused before it sees them."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from scoring.adapters import check_adapter
from scoring.errors import InvalidAdapter


@pytest.fixture
def adapter(tmp_path):
    names = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.fc1")
    save_file(
        {
            f"base_model.model.{name}.lora_{side}.weight": np.zeros((2, 2), np.float32)
            for name in names
            for side in "AB"
        },
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
    return tmp_path


@pytest.mark.parametrize("modules", [None, ["q_proj", "fc1", "v_proj"], ["q_proj", "model.layers.0.mlp.fc1"]])
def test_an_adapter_of_modules_that_take_adapters_is_taken(adapter, modules):
    check_adapter(adapter, 8, modules)


def test_an_adapter_of_a_module_that_would_be_left_out_is_refused(adapter):
    """vLLM loads it without a word, and answers as if those matrices were not there."""
    with pytest.raises(InvalidAdapter, match=r"changes fc1, .* allowed are q_proj, v_proj .*lora_target_modules"):
        check_adapter(adapter, 8, ["q_proj", "v_proj"])
