"""What a checkpoint says of itself: its dtype, and short hashes that name it and its tokenizer.

The hashes name a checkpoint in answers and caches. They are no proof: of weight files above 64 MiB only the header and
evenly spread samples are read, so that naming 500 GB takes seconds, and a change of one small tensor between the
samples goes unseen.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_WHOLE = 64 << 20  # files up to this size are read whole, bytes
_SAMPLES, _SAMPLE = 64, 1 << 20  # of larger ones: this many pieces of this many bytes
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
DIGITS = 16


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
    folder = Path(path)
    weights = sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern))
    if not weights:
        raise FileNotFoundError(f"{folder} holds no weights: none of {', '.join(_WEIGHTS)}")
    return _hash([folder / "config.json", *weights])


def tokenizer_hash(path: str | Path) -> str | None:
    """16 hex digits that name the tokenizer in folder `path`, or None when it has none."""
    files = [Path(path) / name for name in _TOKENIZER]
    return _hash(files) if any(f.exists() for f in files) else None


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
            else:
                for i in range(_SAMPLES):  # the first holds the header, with every tensor's name and shape
                    stream.seek(i * (size - _SAMPLE) // (_SAMPLES - 1))
                    total.update(stream.read(_SAMPLE))
    return total.hexdigest()[:DIGITS]
