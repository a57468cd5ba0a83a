"""Scores in a file: the flat arrays of `MatrixScores` or `LabelScores` in safetensors, of any number of reads.

The arrays have the names and the layout they have in memory, so whatever reads safetensors reads them; what else there
is lies beside them:

    ids             int32, flat: the token of each row, in the order of `rows` (of each label, in that of `values`)
    error_reads     int64 [F], rising: the reads that failed, and have no scores
    error_texts     uint8, flat: the error of each as JSON, UTF-8
    error_offsets   int64 [F + 1] into error_texts

The header's metadata holds `form`, `schema_version`, `metas` (a list: where the scores come from) and `about` (what the
writer says), each as JSON. A file is written in one go, or joined from others with memory for one of them at a time,
and stands under its name only once it is whole.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from scoring import wire
from scoring.batches import SCHEMA_VERSION, LabelBatch, MatrixBatch, end_to_end
from scoring.errors import ScoringError
from scoring.scores import LabelScores, MatrixScores, ReadMeta

_MAX_HEADER = 64 << 20  # of names and metas; it does not grow with the reads
_FORMS: dict[str, wire.Kind] = {f"{kind}-score-file": kind for kind in wire.SCORES}
_NAMES = {"uint8": "U8", "int32": "I32", "int64": "I64", "float32": "F32"}


@dataclass(frozen=True, eq=False)
class ScoreFile:
    """What a file holds.

    Attributes:
        scores: by read, as a client returns them with `return_exceptions=True`.
        ids: int32, flat: the token of each row (`scores.row_offsets` tell the reads apart); of label reads the label of
            each score (`scores.offsets`).
        about: what the writer says of it.
    """

    scores: MatrixScores | LabelScores
    ids: np.ndarray
    about: Mapping[str, Any]


def ids_of(batch: MatrixBatch | LabelBatch, scores: MatrixScores | LabelScores) -> np.ndarray:
    """int32, flat: the `ids` of a `ScoreFile`, from the reads and their answers. A failed read has none."""
    if isinstance(batch, MatrixBatch):
        starts = batch.offsets[:-1] + batch.prompt_lens  # int64 [N]: where each response begins
        return batch.ids[np.repeat(starts, np.diff(scores.row_offsets)) + scores.rows]
    answered = scores.meta_index >= 0  # bool [N]
    return batch.label_ids[np.repeat(answered, np.diff(batch.label_offsets))]


def load(path: str | Path) -> ScoreFile:
    """The content of a file. Its arrays are mapped, not read: what is looked at is fetched.

    Raises:
        ScoringError: it is no such file, or not all of one.
    """
    arrays, metas, about = _open(path)
    kind = _kind_of(arrays)
    texts, bounds = arrays["error_texts"], arrays["error_offsets"]
    errors = {}
    for read, begin, end in zip(arrays["error_reads"].tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        errors[read] = wire.error_from_json(json.loads(texts[begin:end].tobytes())).at(read)
    of_scores = {name: arrays[name] for name in wire.array_names(wire.SCORES[kind])}
    return ScoreFile(wire.SCORES[kind](**of_scores, metas=metas, errors=errors), arrays["ids"], about)


def about(path: str | Path) -> dict[str, Any]:
    """What the writer of a file said of it.

    Raises:
        ScoringError: as `load`.
    """
    return _open(path)[2]


def save(path: str | Path, content: ScoreFile) -> None:
    """Write a file, or replace it: at no time is there half of one."""
    scores = content.scores
    arrays = {name: getattr(scores, name) for name in wire.array_names(type(scores))}
    reads = sorted(scores.errors)
    texts = [json.dumps(wire.error_to_json(scores.errors[read].at(None))).encode() for read in reads]
    arrays["ids"], arrays["error_reads"] = content.ids, np.array(reads, np.int64)
    arrays["error_texts"], arrays["error_offsets"] = end_to_end(
        [np.frombuffer(text, np.uint8) for text in texts], np.uint8
    )
    _write(path, lambda: iter([(arrays, scores.metas)]), content.about)


def join(path: str | Path, pieces: Callable[[], Iterable[Path]], about: Mapping[str, Any]) -> None:
    """Write one file of the reads of others, in their order. Takes memory for one of them at a time.

    Args:
        pieces: gives the files of one kind, at least one; called twice.
    """
    _write(path, lambda: ((arrays, metas) for arrays, metas, _ in map(_open, pieces())), about)


_Part = tuple[Mapping[str, np.ndarray], tuple[ReadMeta, ...]]


def _kind_of(names: Iterable[str]) -> wire.Kind:
    return "matrix" if "rows" in names else "label"


def _open(path: str | Path) -> tuple[dict[str, np.ndarray], tuple[ReadMeta, ...], dict[str, Any]]:
    try:
        with safe_open(path, framework="np") as file:
            form = (file.metadata() or {}).get("form", "")
        if form not in _FORMS:
            raise ScoringError(f"holds {form!r}; a file of scores holds one of {', '.join(_FORMS)}")
        with open(path, "rb") as stream:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        due = tuple(_dtypes(_FORMS[form]))
        arrays, metadata = wire.load_arrays(data, form, due, ("metas", "about"), _MAX_HEADER, ScoringError)
        return arrays, wire.metas_from_json(metadata["metas"]), metadata["about"]
    except (ScoringError, SafetensorError) as error:
        raise ScoringError(f"{path}: {error}") from error


def _offsets(kind: wire.Kind) -> dict[str, str]:
    """Per array of offsets the flat array it cuts."""
    return {offsets: flat for flat, (_, offsets) in wire.SCORES[kind].flat.items()} | {"error_offsets": "error_texts"}


def _dtypes(kind: wire.Kind) -> dict[str, np.dtype]:
    """Every array of a file. The wider come first, so that all are aligned."""
    cls = wire.SCORES[kind]
    dtypes = (
        cls.per_read | {name: dtype for name, (dtype, _) in cls.flat.items()} | dict.fromkeys(_offsets(kind), np.int64)
    )
    dtypes |= {"meta_index": np.int32, "ids": np.int32, "error_reads": np.int64, "error_texts": np.uint8}
    return {
        name: np.dtype(dtype) for name, dtype in sorted(dtypes.items(), key=lambda item: -np.dtype(item[1]).itemsize)
    }


def _write(path: str | Path, parts: Callable[[], Iterator[_Part]], about: Mapping[str, Any]) -> None:
    sizes: dict[str, int] = {}
    metas: dict[ReadMeta, int] = {}
    for arrays, of_part in parts():
        for name, array in arrays.items():
            sizes[name] = sizes.get(name, 0) + len(array)
        for meta in of_part:
            metas.setdefault(meta, len(metas))
    kind = _kind_of(sizes)
    offsets = _offsets(kind)
    for name, flat in offsets.items():
        sizes[name] = sizes["meta_index" if flat != "error_texts" else "error_reads"] + 1
    header = _header(kind, sizes, tuple(metas), about)
    partial = Path(f"{path}.partial")
    with partial.open("wb") as stream:
        stream.write(header)
        at, ends, end = {}, {}, len(header)  # where each array's next entry goes, and where it ends
        for name, dtype in _dtypes(kind).items():
            at[name], ends[name] = end, (end := end + sizes[name] * dtype.itemsize)

        def put(name: str, array: np.ndarray) -> None:
            stream.seek(at[name])
            stream.write(np.ascontiguousarray(array).data)
            at[name] = stream.tell()

        written = dict.fromkeys(sizes, 0)
        for arrays, of_part in parts():
            places = np.array([*(metas[meta] for meta in of_part), -1], np.int32)  # a failed read's -1 finds the last
            for name, array in arrays.items():
                if name in offsets:
                    put(name, array[:-1] + written[offsets[name]])
                elif name == "meta_index":
                    put(name, places[array])
                elif name == "error_reads":
                    put(name, array + written["meta_index"])
                else:
                    put(name, array)
            for name, array in arrays.items():
                written[name] += len(array)
        for name, flat in offsets.items():
            put(name, np.array([written[flat]], np.int64))
        if at != ends:
            raise ScoringError(f"{path}: what it is joined from has changed meanwhile")
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


def _header(kind: wire.Kind, sizes: Mapping[str, int], metas: tuple[ReadMeta, ...], about: Mapping[str, Any]) -> bytes:
    """The beginning of a safetensors file: 8 bytes of length, then what lies where, as JSON."""
    entries: dict[str, Any] = {
        "__metadata__": {
            "form": next(form for form, its in _FORMS.items() if its == kind),
            "schema_version": str(SCHEMA_VERSION),
            "metas": json.dumps([meta.to_dict() for meta in metas]),
            "about": json.dumps(about),
        }
    }
    end = 0
    for name, dtype in _dtypes(kind).items():
        begin, end = end, end + sizes[name] * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype.name], "shape": [sizes[name]], "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
