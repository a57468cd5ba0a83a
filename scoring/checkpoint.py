"""What a checkpoint says of itself: its dtype, short hashes that name it and its tokenizer, and what must be the same
of another one before an engine can take its weights in the place of these.

The hashes name a checkpoint in answers and caches. They are no proof: of weight files above 64 MiB only the header and
samples are read, so that naming 500 GB takes seconds. Of a safetensors file every tensor is sampled, since training
changes a tensor nearly everywhere or not at all; a change of a few numbers between the samples goes unseen.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from scoring.errors import InvalidCheckpoint

_WHOLE = 64 << 20  # files up to this size are read whole, bytes
_SAMPLES, _SAMPLE = 64, 1 << 20  # of larger ones: this many pieces of this many bytes,
_OF_A_TENSOR, _TENSOR_SAMPLE = 16 << 20, 1 << 12  # and a piece of every so many bytes of each tensor, or part of them
_LONGEST_HEADER = 100 << 20  # that safetensors reads, bytes
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_INDEX = "model.safetensors.index.json"
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
DIGITS = 16
_NAMED = 5  # of the differences of one kind, in a sentence

# Fields of a configuration that do not change what a forward pass computes; and dtype, which the tensors tell.
_WITHOUT_EFFECT = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "gradient_checkpointing",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "problem_type",
    "id2label",
    "label2id",
    "_attn_implementation_autoset",
}


def checkpoint_dtype(path: str | Path) -> str:
    """The dtype that the checkpoint's config.json names; "auto" (vLLM's choice) when it names none.

    vLLM's own "auto" would run a float32 checkpoint in 16 bits.
    """
    config = Path(path) / "config.json"
    fields = json.loads(config.read_text()) if config.exists() else {}
    return fields.get("dtype") or fields.get("torch_dtype") or "auto"


def checkpoint_hash(path: str | Path) -> str:
    """16 hex digits that name the weights and the configuration in folder `path`.

    Raises:
        FileNotFoundError: the folder holds no weight file.
    """
    return _hash(_files(path))


def checkpoint_stamp(path: str | Path) -> tuple[tuple[str, int, int], ...]:
    """What changes on this machine when the weights or the configuration in folder `path` are written anew: name, bytes
    and time (ns) of each file.

    Raises:
        FileNotFoundError: as `checkpoint_hash`.
    """
    found = [(file.name, file.stat()) for file in _files(path) if file.exists()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def tokenizer_hash(path: str | Path) -> str | None:
    """16 hex digits that name the tokenizer in folder `path`, or None when it has none."""
    files = [Path(path) / name for name in _TOKENIZER]
    return _hash(files) if any(f.exists() for f in files) else None


@dataclass(frozen=True)
class Layout:
    """What two checkpoints must have in common for an engine to take the weights of one in the place of the other's.

    Attributes:
        tensors: by name, the dtype (as safetensors writes it) and the shape of each tensor.
        config: the fields of its configuration.
        tokenizer: the hash of its tokenizer; None where it has none.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    config: Mapping[str, Any]
    tokenizer: str | None


def checkpoint_layout(path: str | Path) -> Layout:
    """The layout of the checkpoint in folder `path`. Reads headers, and no weights.

    Raises:
        InvalidCheckpoint: it is no checkpoint in safetensors, or not whole.
    """
    folder = Path(path)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    try:
        config = _config(folder)
        for file in _safetensors(folder):
            with safe_open(file, framework="np") as weights:
                for name in weights.keys():  # noqa: SIM118 (it is no dict)
                    if name in tensors:
                        raise InvalidCheckpoint(f"{folder} holds tensor {name} twice; a file too many is {file.name}")
                    tensor = weights.get_slice(name)
                    tensors[name] = tensor.get_dtype(), tuple(tensor.get_shape())
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, InvalidCheckpoint):
            raise
        raise InvalidCheckpoint(
            f"{folder} is no whole checkpoint (config.json and safetensors): {type(error).__name__}: {error}"
        ) from error
    if not tensors:
        raise InvalidCheckpoint(f"{folder} holds no weights in safetensors, the one form that can replace others")
    return Layout(tensors, config, tokenizer_hash(folder))


def differences(old: Layout, new: Layout) -> list[str]:
    """What speaks against taking the weights of `new` in the place of `old`'s, as sentences; empty where nothing does.

    Where one of them has no tokenizer, there is nothing to compare.
    """
    kinds = {
        "missing": sorted(old.tensors.keys() - new.tensors.keys()),
        "unexpected": sorted(new.tensors.keys() - old.tensors.keys()),
        "of another shape or dtype": [
            f"{name} ({_form(new.tensors[name])} where {_form(tensor)} is loaded)"
            for name, tensor in sorted(old.tensors.items())
            if name in new.tensors and new.tensors[name] != tensor
        ],
    }
    found = [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]
    fields = [
        f"{name} is {new.config.get(name)!r} where {old.config.get(name)!r} is loaded"
        for name in sorted(old.config.keys() | new.config.keys())
        if not _without_effect(name) and new.config.get(name) != old.config.get(name)
    ]
    if fields:
        found.append(f"config.json: {_some(fields)}")
    if None not in (new.tokenizer, old.tokenizer) and new.tokenizer != old.tokenizer:
        found.append(
            f"tokenizer: its hash is {new.tokenizer} where {old.tokenizer} is loaded (where it is the same one, saved "
            "anew, leave its files out)"
        )
    return found


def _form(tensor: tuple[str, tuple[int, ...]]) -> str:
    return f"{tensor[0]} {list(tensor[1])}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _without_effect(field: str) -> bool:
    return field in _WITHOUT_EFFECT or field.endswith(("dropout", "_pdrop", "_dropout_prob"))


def _config(folder: Path) -> dict[str, Any]:
    """The fields of a checkpoint's configuration, with the defaults of those that it leaves out, where Transformers
    knows the model: its versions write different ones."""
    written = json.loads((folder / "config.json").read_text())
    from transformers import AutoConfig

    try:
        return json.loads(AutoConfig.from_pretrained(folder, local_files_only=True).to_json_string(use_diff=False))
    except Exception:
        return written


def _files(path: str | Path) -> list[Path]:
    """The files that make a checkpoint: its configuration and its weights."""
    folder = Path(path)
    weights = sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern))
    if not weights:
        raise FileNotFoundError(f"{folder} holds no weights: none of {', '.join(_WEIGHTS)}")
    return [folder / "config.json", *weights]


def _safetensors(folder: Path) -> Iterable[Path]:
    """The files that vLLM would load: those of the index, where there is one."""
    index = folder / _INDEX
    if index.exists():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))


def _hash(files: list[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        if not file.exists():
            continue
        size = file.stat().st_size
        total.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            if size <= _WHOLE:
                total.update(hashlib.file_digest(stream, "sha256").digest())
                continue
            for start, length in [*_even_samples(size), *_tensor_samples(file)]:
                stream.seek(start)
                total.update(stream.read(length))
    return total.hexdigest()[:DIGITS]


def _even_samples(size: int) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of samples over a whole file, the first of which holds its header."""
    return ((i * (size - _SAMPLE) // (_SAMPLES - 1), _SAMPLE) for i in range(_SAMPLES))


def _tensor_samples(file: Path) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of samples of every tensor of a safetensors file, in their order; of other files none."""
    if file.suffix != ".safetensors":
        return
    with file.open("rb") as stream:
        head = stream.read(8)
        (length,) = struct.unpack("<Q", head) if len(head) == 8 else (0,)
        try:
            header = json.loads(stream.read(min(length, _LONGEST_HEADER)))
            ranges = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError):
            return  # not safetensors inside: whoever loads it says so
    for begin, end in ranges:
        count = max(1, (end - begin) // _OF_A_TENSOR)
        for i in range(count):
            start = begin + (end - begin) * i // count
            middle = start + ((end - begin) // count - _TENSOR_SAMPLE) // 2
            yield 8 + length + max(middle, begin), min(_TENSOR_SAMPLE, end - begin)
