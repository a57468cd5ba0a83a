"""What a checkpoint says of itself: hashes that differ when it does and not otherwise, its dtype, and what speaks
against its weights in the place of another's."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scoring import checkpoint
from scoring.checkpoint import (
    checkpoint_dtype,
    checkpoint_hash,
    checkpoint_layout,
    checkpoint_stamp,
    differences,
    tokenizer_hash,
)
from scoring.errors import InvalidCheckpoint


@pytest.fixture
def copy(tiny_path, tmp_path):
    """The tiny teacher's folder, free to be changed."""
    return shutil.copytree(tiny_path, tmp_path / "another-name")


def flip_a_bit(file, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_the_hash_is_sixteen_hex_digits_and_does_not_depend_on_the_place(tiny_path, copy):
    assert len(checkpoint_hash(copy)) == len(tokenizer_hash(copy)) == 16
    int(checkpoint_hash(copy), 16)
    assert checkpoint_hash(copy) == checkpoint_hash(tiny_path)
    assert checkpoint_hash(str(copy)) == checkpoint_hash(copy)
    assert tokenizer_hash(copy) == tokenizer_hash(tiny_path)


@pytest.mark.parametrize("at", [0, 1000, -1])
def test_one_bit_of_the_weights_changes_the_hash(tiny_path, copy, at):
    flip_a_bit(copy / "model.safetensors", at)
    assert checkpoint_hash(copy) != checkpoint_hash(tiny_path)
    assert tokenizer_hash(copy) == tokenizer_hash(tiny_path)


def test_the_configuration_counts(tiny_path, copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert checkpoint_hash(copy) != checkpoint_hash(tiny_path)


def test_a_further_weight_file_counts_by_name_and_content(tiny_path, copy):
    (copy / "second.safetensors").write_bytes(b"weights")
    first = checkpoint_hash(copy)
    (copy / "second.safetensors").rename(copy / "third.safetensors")
    assert len({first, checkpoint_hash(copy), checkpoint_hash(tiny_path)}) == 3


def test_the_tokenizer_has_a_hash_of_its_own(tiny_path, copy):
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text().replace("w1999", "v1999"))
    assert tokenizer_hash(copy) != tokenizer_hash(tiny_path)
    assert checkpoint_hash(copy) == checkpoint_hash(tiny_path)
    (copy / "tokenizer.json").unlink()
    assert tokenizer_hash(copy) is None


def test_what_is_neither_weights_nor_configuration_does_not_count(tiny_path, copy):
    (copy / "generation_config.json").write_text("{}")
    (copy / "README.md").write_text("words")
    assert checkpoint_hash(copy) == checkpoint_hash(tiny_path)


def test_a_folder_without_weights_is_refused(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        checkpoint_hash(copy)


@pytest.mark.parametrize("at", [0, 1_234_567, 2_000_000, 2_999_999])
def test_of_a_large_file_the_header_the_end_and_samples_between_count(tmp_path, monkeypatch, at):
    monkeypatch.setattr(checkpoint, "_WHOLE", 1_000_000)
    monkeypatch.setattr(checkpoint, "_SAMPLE", 1_000)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(range(250)) * 12_000)  # 3 MB
    before = checkpoint_hash(tmp_path)
    # Samples begin evenly, 63 steps from the first byte to the last sample: change the nearest sampled byte.
    step = (3_000_000 - 1_000) / 63
    nearest = min((int(i * step) + shift for i in range(64) for shift in (0, 999)), key=lambda b: abs(b - at))
    flip_a_bit(weights, nearest)
    assert checkpoint_hash(tmp_path) != before


def test_of_a_large_file_not_every_byte_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_WHOLE", 1_000_000)
    monkeypatch.setattr(checkpoint, "_SAMPLE", 1_000)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3_000_000))
    before = checkpoint_hash(tmp_path)
    flip_a_bit(weights, 20_000)  # between the first sample and the second
    assert checkpoint_hash(tmp_path) == before
    weights.write_bytes(bytes(3_000_001))  # another size is another file
    assert checkpoint_hash(tmp_path) != before


def test_of_a_large_file_every_tensor_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_WHOLE", 1_000)
    monkeypatch.setattr(checkpoint, "_SAMPLE", 64)
    monkeypatch.setattr(checkpoint, "_TENSOR_SAMPLE", 64)
    monkeypatch.setattr(checkpoint, "_OF_A_TENSOR", 40_000)
    tensors = {f"layer.{i}.{name}": np.full(size, i, np.float32) for i in range(40) for name, size in
               (("norm", 3), ("weight", 5_000), ("embedding", 30_000))}  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    seen = {checkpoint_hash(tmp_path)}
    for name in tensors:  # as training changes a tensor: everywhere
        save_file(tensors | {name: tensors[name] + 1}, tmp_path / "model.safetensors")
        seen.add(checkpoint_hash(tmp_path))
    assert len(seen) == 1 + len(tensors)
    half = tensors["layer.20.embedding"].copy()
    half[:15_000] += 1  # a piece of every 40,000 bytes is looked at
    save_file(tensors | {"layer.20.embedding": half}, tmp_path / "model.safetensors")
    assert checkpoint_hash(tmp_path) not in seen


def test_a_stamp_changes_whenever_a_file_is_written_anew(copy):
    before = checkpoint_stamp(copy)
    assert [name for name, _, _ in before] == ["config.json", "model.safetensors"]
    assert checkpoint_stamp(copy) == before
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content)
    assert checkpoint_stamp(copy) != before


# What can take the place of what.


def test_a_checkpoint_can_take_the_place_of_one_that_differs_in_its_numbers_alone(tiny_path, other_tiny_path):
    loaded = checkpoint_layout(tiny_path)
    assert loaded.tensors["model.embed_tokens.weight"] == ("F32", (2048, 128))
    assert len(loaded.tensors) == len(load_file(tiny_path / "model.safetensors"))
    assert tokenizer_hash(other_tiny_path) is None
    other = checkpoint_layout(other_tiny_path)
    assert differences(loaded, other) == differences(other, loaded) == differences(loaded, loaded) == []


def write(folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def without_a_tensor(folder, tensors):
    write(folder, {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"})


def with_another(folder, tensors):
    write(folder, tensors | {"extra": np.zeros(2, np.float32)})


def of_another_shape(folder, tensors):
    write(folder, tensors | {"lm_head.weight": tensors["lm_head.weight"][:2000].copy()})


def of_another_dtype(folder, tensors):
    write(folder, {name: tensor.astype(np.float16) for name, tensor in tensors.items()})


def change_config(**fields):
    def change(folder, tensors):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return change


OTHER = "of another shape or dtype"


def with_another_tokenizer(folder, tensors):
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text().replace("w1999", "v1999"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_a_tensor, "missing: model.norm.weight"),
        (with_another, "unexpected: extra"),
        (of_another_shape, f"{OTHER}: lm_head.weight (F32 [2000, 128] where F32 [2048, 128] is loaded)"),
        (of_another_dtype, f"{OTHER}: lm_head.weight (F16 [2048, 128] where F32 [2048, 128] is loaded), "),
        (change_config(rms_norm_eps=1e-5), "config.json: rms_norm_eps is 1e-05 where 1e-06 is loaded"),
        # Shapes do not tell: 4 heads of 32 numbers are as large as 2 of 64.
        (change_config(num_attention_heads=2, head_dim=64), "config.json: head_dim is 64 where 32 is loaded"),
        (change_config(hidden_act="gelu"), "config.json: hidden_act is 'gelu' where 'silu' is loaded"),
        (with_another_tokenizer, "tokenizer: its hash is "),
    ],
    ids=lambda value: getattr(value, "__name__", "")[:40] or str(value)[:40],
)  # fmt: skip
def test_what_differs_is_said(tiny_path, copy, change, said):
    change(copy, load_file(tiny_path / "model.safetensors"))
    found = differences(checkpoint_layout(tiny_path), checkpoint_layout(copy))
    assert len(found) == 1 and found[0].startswith(said), found


def test_what_does_not_matter_is_not_said(tiny_path, copy):
    config = json.loads((copy / "config.json").read_text())
    fields = {"_name_or_path": "run-7", "transformers_version": "5.0", "use_cache": False, "eos_token_id": 7,
              "attention_dropout": 0.1, "dtype": "bfloat16"}  # fmt: skip
    (copy / "config.json").write_text(json.dumps(config | fields))
    (copy / "generation_config.json").write_text("{}")
    assert differences(checkpoint_layout(tiny_path), checkpoint_layout(copy)) == []


def test_a_configuration_that_spells_its_defaults_out_is_the_same(tiny_path, copy):
    """As another version of Transformers writes it."""
    config = json.loads((copy / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == 10_000.0 and config["attention_bias"] is False
    older = {
        name: value for name, value in config.items() if name not in ("rope_parameters", "attention_bias", "dtype")
    }
    (copy / "config.json").write_text(json.dumps(older | {"rope_theta": 10_000.0, "rope_scaling": None}))
    assert differences(checkpoint_layout(tiny_path), checkpoint_layout(copy)) == []
    (copy / "config.json").write_text(json.dumps(older | {"rope_theta": 500_000.0}))
    (found,) = differences(checkpoint_layout(tiny_path), checkpoint_layout(copy))
    assert "rope" in found and "500000" in found


def test_of_many_differences_some_are_named_and_all_are_counted(tiny_path, copy):
    write(copy, {"one": np.zeros(1, np.float32)})
    found = differences(checkpoint_layout(tiny_path), checkpoint_layout(copy))
    count = len(load_file(tiny_path / "model.safetensors"))
    assert found[0].startswith("missing: lm_head.weight, ") and found[0].endswith(f" and {count - 5} more")
    assert found[1] == "unexpected: one"


def test_of_several_files_those_of_the_index_count(tiny_path, copy):
    tensors = load_file(copy / "model.safetensors")
    half = len(tensors) // 2
    first, second = dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])
    save_file(first, copy / "model-00001-of-00002.safetensors")
    save_file(second, copy / "model-00002-of-00002.safetensors")
    with pytest.raises(InvalidCheckpoint, match="twice; a file too many is model"):
        checkpoint_layout(copy)  # the whole one is still there
    files = dict.fromkeys(first, "model-00001-of-00002.safetensors")
    files |= dict.fromkeys(second, "model-00002-of-00002.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert differences(checkpoint_layout(tiny_path), checkpoint_layout(copy)) == []
    (copy / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InvalidCheckpoint, match="no whole checkpoint"):
        checkpoint_layout(copy)


def cut(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut, "no whole checkpoint"),
        (lambda folder: (folder / "config.json").unlink(), "no whole checkpoint.*config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "no whole checkpoint"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"), "no weights in safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"weights"), "no whole checkpoint"),
    ],
)
def test_what_is_no_whole_checkpoint_is_refused(copy, change, said):
    change(copy)
    with pytest.raises(InvalidCheckpoint, match=said):
        checkpoint_layout(copy)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),  # what Transformers before version 5 wrote
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
        ({"vocab_size": 7}, "auto"),
        (None, "auto"),
    ],
)
def test_the_dtype_is_the_one_the_configuration_names(tmp_path, config, dtype):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert checkpoint_dtype(tmp_path) == dtype


def test_the_tiny_teacher_is_a_float32_checkpoint(tiny_path):
    assert checkpoint_dtype(str(tiny_path)) == "float32"
