"""Adapters that the engine could not apply exactly are refused before it sees them, and what it remembers of others."""

import asyncio
import shutil
from collections import OrderedDict

import numpy as np
import pytest
from safetensors.numpy import save_file

from scoring import LabelRead, engine
from scoring.adapters import Adapter, check_adapter, weights_stamp
from scoring.checkpoint import checkpoint_hash
from scoring.engine import TeacherEngine
from scoring.errors import InvalidAdapter
from scoring.weights import Weights
from tests.lora import make_adapter


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


def test_an_adapter_of_the_output_head_is_refused(tiny_model, tmp_path):
    """Rows of a matrix would be scored without it, or with that of another request."""
    path = make_adapter(tmp_path / "head", tiny_model, ("lm_head",), rank=1)
    for modules in (None, ["lm_head"]):
        with pytest.raises(InvalidAdapter, match="changes lm_head; in scores vLLM would leave that out"):
            check_adapter(path, 8, modules)


class Engine(TeacherEngine):
    """What an engine remembers of adapters, without the engine. `loads` has what vLLM was told to load."""

    def __init__(self):
        self._adapters, self.weights, self.loads = OrderedDict(), Weights(0, "folder", "base"), []

    async def _load(self, adapter):
        self.loads.append(adapter)
        await asyncio.sleep(0.001)
        return checkpoint_hash(adapter.path), weights_stamp(adapter.path)

    async def ask(self, adapter, count=1):
        """The adapter as `count` reads of one call go to vLLM with it."""
        read, seen = LabelRead([1], [2], teacher="tone"), {}
        return await asyncio.gather(*(self._adapter(read, {"tone": adapter}, seen) for _ in range(count)))


async def test_a_serial_that_is_known_under_another_path_is_refused(adapter, tmp_path):
    other = shutil.copytree(adapter, tmp_path / "other")
    asked = Engine()
    await asked.ask(Adapter(str(adapter), 1))
    with pytest.raises(InvalidAdapter, match=r"other has the serial 1, under which this engine knows .*add it anew"):
        await asked.ask(Adapter(str(other), 1))
    (request,) = await asked.ask(Adapter(str(other), 2))
    assert (request.lora_int_id, request.lora_path) == (2, str(other))
    assert asked.loads == [Adapter(str(adapter), 1), Adapter(str(other), 2)]


async def test_the_weights_of_an_adapter_are_looked_at_once_a_call(adapter, monkeypatch):
    looks = []
    monkeypatch.setattr(engine, "weights_stamp", lambda path: looks.append(path) or weights_stamp(path))
    asked = Engine()
    for calls in (1, 2):
        requests = await asked.ask(Adapter(str(adapter), 1), count=50)
        assert {request.lora_int_id for request in requests} == {1} and len(looks) == calls
    assert len(asked.loads) == 1
    (adapter / "adapter_model.safetensors").write_bytes(b"another")
    with pytest.raises(InvalidAdapter, match="has changed since it was loaded"):
        await asked.ask(Adapter(str(adapter), 1))


async def test_the_adapters_used_longest_ago_are_forgotten(adapter, monkeypatch):
    monkeypatch.setattr(engine, "_MOST_ADAPTERS", 2)
    asked, path = Engine(), str(adapter)
    for serial in (1, 2, 1, 3):
        await asked.ask(Adapter(path, serial))
    assert list(asked._adapters) == [1, 3]


async def test_the_checkpoint_of_an_adapter_is_that_of_its_answers_and_loads_nothing(adapter, tmp_path):
    asked, one = Engine(), Adapter(str(adapter), 1)
    name = await asked.adapter_checkpoint(one)
    assert not asked.loads and name.startswith("base+") and len(name) == len("base+") + 16
    await asked.ask(one)
    (adapter / "adapter_model.safetensors").write_bytes(b"another")
    assert await asked.adapter_checkpoint(one) == name  # what is loaded is still the old one
    with pytest.raises(InvalidAdapter, match="cannot be read"):
        await asked.adapter_checkpoint(Adapter(str(tmp_path / "none"), 2))
