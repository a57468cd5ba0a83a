"""What a checkpoint says of itself: hashes that differ when it does and not otherwise, and its dtype."""

import json
import shutil

import pytest

from scoring import checkpoint
from scoring.checkpoint import checkpoint_dtype, checkpoint_hash, tokenizer_hash


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
