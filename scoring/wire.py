"""The bytes of a batch and of its answer, outside this process.

Two forms carry the same content. safetensors: the arrays of the dataclass by their field names, read in place
without a copy, small things as JSON strings in the header's metadata. JSON: one object a read, for callers with
nothing better; it costs a hundred times the time. Both carry `SCHEMA_VERSION`, and neither is ever guessed at:
an unknown or missing part, another dtype or another version is an error with a sentence.

What is wrong with a request raises `InvalidRead`; what is wrong with an answer raises `WrongEngineAnswer`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from reprlib import repr as short
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save

from scoring.batches import OMITTED, ROWS, SCHEMA_VERSION, UNKNOWN_TO_MINUS_INF, LabelBatch, MatrixBatch, end_to_end
from scoring.columns import ENTROPY, TAIL, widths
from scoring.errors import InvalidRead, ScoringError, WrongEngineAnswer, from_dict
from scoring.ids import PAD
from scoring.reads import LabelRead, MatrixRead, read_from_fields
from scoring.scores import META_COLUMNS, NO_TOKEN, LabelScores, MatrixScores, ReadMeta

SAFETENSORS = "application/vnd.safetensors"
"""Media type of the binary form."""

DEFAULT_TIMEOUT_S = 600.0
MAX_TIMEOUT_S = 3600.0

# Longest safetensors header that is parsed. A batch's holds a dozen names and the teachers; an answer's may hold
# one error a read.
MAX_BATCH_HEADER = 1 << 20
MAX_SCORES_HEADER = 64 << 20

Kind = Literal["matrix", "label"]
BATCH = {"matrix": MatrixBatch, "label": LabelBatch}
SCORES = {"matrix": MatrixScores, "label": LabelScores}
_READ = {"matrix": MatrixRead, "label": LabelRead}
_OPTIONS = ("timeout_s", "return_exceptions")


@dataclass(frozen=True)
class ReadOptions:
    """What a request says beside its reads.

    Attributes:
        timeout_s: seconds from the request's arrival to its answer; None is given as `DEFAULT_TIMEOUT_S`.
        return_exceptions: put a failed read's error in its place instead of failing the request.

    Raises:
        InvalidRead: another type, or a `timeout_s` outside (0, `MAX_TIMEOUT_S`].
    """

    timeout_s: float | None = None
    return_exceptions: bool = False

    def __post_init__(self) -> None:
        timeout = DEFAULT_TIMEOUT_S if self.timeout_s is None else self.timeout_s
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= MAX_TIMEOUT_S:
            raise InvalidRead(
                f"is {short(timeout)}; allowed are seconds above 0, up to {MAX_TIMEOUT_S:g}", field="timeout_s"
            )
        if not isinstance(self.return_exceptions, bool):
            raise InvalidRead(
                f"is {short(self.return_exceptions)}; allowed are true and false", field="return_exceptions"
            )
        object.__setattr__(self, "timeout_s", float(timeout))


# ---------------------------------------------------------------- safetensors


def encode_batch(
    batch: MatrixBatch | LabelBatch, *, timeout_s: float | None = None, return_exceptions: bool = False
) -> bytes:
    """The safetensors form of a request. `timeout_s` None leaves the deadline to the server."""
    options = {"timeout_s": timeout_s, "return_exceptions": return_exceptions}
    return _save(batch, f"{kind_of(batch)}-reads", teachers=batch.teachers, options=options)


def decode_batch(kind: Kind, data: bytes) -> tuple[MatrixBatch | LabelBatch, ReadOptions]:
    """The inverse of `encode_batch`; the batch's arrays are read-only views of `data`.

    Reads are not checked one by one here: `batch[i]` does that, and fails for read i alone.

    Raises:
        InvalidRead: `data` is not a whole, well-formed request of this kind and schema version.
    """
    tensors, metadata = _load(
        data, f"{kind}-reads", BATCH[kind], ("teachers", "options"), MAX_BATCH_HEADER, InvalidRead
    )
    options, teachers = metadata["options"], metadata["teachers"]
    if not isinstance(options, dict) or not set(options) <= set(_OPTIONS):
        raise InvalidRead(f"is {short(options)}; its names are {', '.join(_OPTIONS)}", field="options")
    if not isinstance(teachers, list):
        raise InvalidRead(f"is {short(teachers)}; it is a list of names", field="teachers")
    batch = BATCH[kind](**tensors, teachers=tuple(teachers))
    if isinstance(batch, MatrixBatch):
        _refuse_stray_modes(batch)
    return batch, ReadOptions(**options)


def encode_scores(scores: MatrixScores | LabelScores) -> bytes:
    """The safetensors form of an answer.

    Raises:
        WrongEngineAnswer: a score is NaN or +inf.
    """
    refuse_not_a_score(scores)
    return _save(
        scores,
        f"{kind_of(scores)}-scores",
        metas=[meta.to_dict() for meta in scores.metas],
        errors={str(i): error_to_json(error) for i, error in scores.errors.items()},
    )


def decode_scores(kind: Kind, data: bytes) -> MatrixScores | LabelScores:
    """The inverse of `encode_scores`; the arrays are read-only views of `data`.

    Raises:
        WrongEngineAnswer: `data` is not a whole, consistent answer of this kind and schema version, or holds a NaN.
    """
    tensors, metadata = _load(
        data, f"{kind}-scores", SCORES[kind], ("metas", "errors"), MAX_SCORES_HEADER, WrongEngineAnswer
    )
    metas, errors = metadata["metas"], metadata["errors"]
    if not isinstance(metas, list) or not isinstance(errors, dict):
        raise WrongEngineAnswer("metas is a list and errors an object; the answer has something else")
    try:
        by_read = {int(i): error_from_json(error) for i, error in errors.items()}
    except ValueError:
        raise WrongEngineAnswer("errors are named by the index of their read", field="errors") from None
    scores = SCORES[kind](**tensors, metas=tuple(_meta(m) for m in metas), errors=by_read)
    _check_scores(scores)
    return scores


# ---------------------------------------------------------------- JSON


def loads(data: bytes, error: type[ScoringError] = InvalidRead) -> Any:
    """Strict JSON: UTF-8, no NaN or Infinity, no name twice in one object.

    Raises:
        error: `data` is anything else. `details["position"]` is the character where reading stopped, when known.
    """
    try:
        return json.loads(str(data, "utf-8"), object_pairs_hook=_unique_names, parse_constant=_refuse_constant)
    except json.JSONDecodeError as wrong:
        raise error(f"the body is not JSON: {wrong.msg} at character {wrong.pos}", position=wrong.pos) from None
    except RecursionError:
        raise error("the body is JSON nested too deeply") from None
    except ValueError as wrong:  # not UTF-8, an integer of thousands of digits, or one of the two refusals below
        raise error(f"the body is not JSON as it is read here: {wrong}") from None


def reads_from_json(
    kind: Kind, body: Any
) -> tuple[list[MatrixRead | InvalidRead] | list[LabelRead | InvalidRead], ReadOptions]:
    """The reads of a request, in order; a read that is wrong by itself is its `InvalidRead`, in its place.

    Raises:
        InvalidRead: the request around them is wrong: not an object, an unknown field, no list of reads.
    """
    if not isinstance(body, dict):
        raise InvalidRead(f'the body is {short(body)}; a request is an object with "reads"')
    known = ("reads", *_OPTIONS)
    for name in body:
        if name not in known:
            raise InvalidRead(f"is not a field of a request; its fields are {', '.join(known)}", field=name)
    if not isinstance(body.get("reads"), list):
        given = short(body["reads"]) if "reads" in body else "missing"
        raise InvalidRead(f"is {given}; a request has a list of reads", field="reads")
    options = ReadOptions(**{name: body[name] for name in _OPTIONS if name in body})
    return [_read_or_error(kind, i, read) for i, read in enumerate(body["reads"])], options


def batch_to_json(
    batch: MatrixBatch | LabelBatch, *, timeout_s: float | None = None, return_exceptions: bool = False
) -> dict[str, Any]:
    """The JSON form of a request, of lists and numbers."""
    reads = [{name: _plain(getattr(read, name)) for name in _field_names(type(read))} for read in batch]
    for read, fields_ in zip(batch, reads, strict=True):
        if isinstance(read, MatrixRead) and read.candidate_ids is not None and not len(read.response_ids):
            fields_["candidate_ids"] = [PAD] * read.width  # no row is there to show K, so K unused columns do
    return {"reads": reads, "timeout_s": timeout_s, "return_exceptions": return_exceptions}


def scores_to_json(scores: MatrixScores | LabelScores) -> dict[str, Any]:
    """The JSON form of an answer: `{"results": [...], "schema_version"}`, one result a read, in order.

    A matrix result has `logprobs` (n lists of K), `response_logprobs` (n), `rows` (n), `shape` ([n, K], since n = 0
    leaves no K to see) and `meta`; a label result `logprobs` (L) and `meta`. **A score of -inf is null**, which JSON
    has instead. A failed read is `{"error": {...}}`.

    Raises:
        WrongEngineAnswer: a score is NaN or +inf.
    """
    refuse_not_a_score(scores)
    return {"results": [_result(score) for score in scores], "schema_version": SCHEMA_VERSION}


def scores_from_json(kind: Kind, body: Any) -> MatrixScores | LabelScores:
    """The inverse of `scores_to_json`: every float32 comes back bit for bit.

    Raises:
        WrongEngineAnswer: `body` is not a whole, consistent answer of this kind and schema version.
    """
    if not isinstance(body, dict) or set(body) != {"results", "schema_version"}:
        raise WrongEngineAnswer('an answer has exactly "results" and "schema_version"')
    _check_version(body["schema_version"], WrongEngineAnswer)
    if not isinstance(body["results"], list):
        raise WrongEngineAnswer("results is a list")
    pieces: list[np.ndarray] = []  # float32, flat
    rows: list[np.ndarray] = []  # int64
    ks: list[int] = []
    metas: list[ReadMeta] = []
    errors: dict[int, ScoringError] = {}
    for i, result in enumerate(body["results"]):
        if isinstance(result, dict) and set(result) == {"error"}:
            errors[i] = error_from_json(result["error"])
            result = _NOTHING[kind]
        elif not isinstance(result, dict) or set(result) != set(_NOTHING[kind]):
            raise WrongEngineAnswer(f"a result has exactly {', '.join(_NOTHING[kind])}", read=i)
        if kind == "matrix":
            block, answered = _block(result, i)
            rows.append(answered)
            ks.append(block.shape[1] - 1)
            pieces.append(block.reshape(-1))
        else:
            pieces.append(_floats(result["logprobs"], i))
        if i not in errors:
            metas.append(_meta(result["meta"]))
    answered = np.array([i not in errors for i in range(len(pieces))], dtype=bool)
    columns = {name: np.zeros(len(pieces), np.int32) for name in META_COLUMNS}
    for name, column in columns.items():
        column[answered] = [getattr(meta, name) for meta in metas]
    values, offsets = end_to_end(pieces, np.float32)
    if kind == "matrix":
        columns["widths"] = np.array(ks, dtype=np.int64)
        columns["top_k"] = columns["extras"] = np.zeros(len(pieces), np.int32)
        columns["rows"], columns["row_offsets"] = end_to_end(rows, np.int64)
    meta_index = np.full(len(pieces), -1, np.int32)
    meta_index[answered] = np.arange(len(metas))
    scores = SCORES[kind](
        values=values, offsets=offsets, meta_index=meta_index, metas=tuple(metas), errors=errors, **columns
    )
    _check_scores(scores)
    return scores


def error_to_json(error: ScoringError) -> dict[str, Any]:
    """The body's `error` object: `ScoringError.to_dict` and the HTTP status as `code`."""
    return {**error.to_dict(), "code": error.status}


def error_from_json(error: Any) -> ScoringError:
    """The inverse of `error_to_json`. An unknown type becomes a plain `ScoringError`.

    Raises:
        WrongEngineAnswer: `error` is no such object.
    """
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        raise WrongEngineAnswer(f"an error is an object with a message, not {short(error)}")
    try:
        return from_dict(error)
    except TypeError:
        raise WrongEngineAnswer(f"an error's details are an object of names, not {short(error)}") from None


def kind_of(value: MatrixBatch | LabelBatch | MatrixScores | LabelScores) -> Kind:
    return "matrix" if isinstance(value, MatrixBatch | MatrixScores) else "label"


def refuse_not_a_score(scores: MatrixScores | LabelScores) -> None:
    """Raise `WrongEngineAnswer` when a score is NaN or +inf, which no log-probability is."""
    wrong = np.isnan(scores.values) | np.isposinf(scores.values)  # bool, flat
    if not wrong.any():
        return
    at = int(np.flatnonzero(wrong)[0])
    read = int(np.searchsorted(scores.offsets, at, side="right")) - 1
    place = at - int(scores.offsets[read])
    if isinstance(scores, MatrixScores):
        row, column = divmod(place, 1 + int(scores.widths[read]))
        where = f"row {row} " + (f"col {column - 1}" if column else "of response_logprobs")
    else:
        where = f"label {place}"
    raise WrongEngineAnswer(f"the score at {where} is {scores.values[at]}", read=read)


# ---------------------------------------------------------------- parts of safetensors

_DTYPES = {"U8": "<u1", "I32": "<i4", "I64": "<i8", "F32": "<f4"}


def _save(content: Any, form: str, **metadata: Any) -> bytes:
    strings = {name: json.dumps(value, allow_nan=False) for name, value in metadata.items()}
    arrays = {name: getattr(content, name) for name in _array_names(type(content))}
    return save(arrays, {"form": form, "schema_version": str(SCHEMA_VERSION), **strings})


def _load(
    data: bytes,
    form: str,
    cls: type,
    names: tuple[str, ...],
    header_limit: int,
    error: type[ScoringError],
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of `cls` as views of `data`, and the metadata `names` as values.

    Everything the header says is held against the length of `data` before an array is made.
    """
    view = memoryview(data)
    if len(view) < 8:
        raise error(f"the body has {len(view)} bytes; safetensors starts with 8 that give its header's length")
    length = int.from_bytes(view[:8], "little")
    if length > header_limit or length > len(view) - 8:
        raise error(
            f"the safetensors header claims {length} bytes; the body has {len(view) - 8} after its first 8, and "
            f"a header has at most {header_limit}"
        )
    header, body = loads(bytes(view[8 : 8 + length]), error), view[8 + length :]
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise error("the safetensors header lacks __metadata__, an object of strings")
    if metadata.get("form") != form:
        raise error(f'the body holds "{metadata.get("form")}"; "{form}" is due here')
    _check_version(metadata.get("schema_version"), error)
    _check_names("metadata", set(metadata), {"form", "schema_version", *names}, error)
    _check_names("arrays", set(header), set(_array_names(cls)), error)
    arrays, end = {}, 0
    for name, begin, stop, dtype in sorted(_entries(header, error), key=lambda entry: entry[1:3]):
        if begin != end or stop > len(body):
            raise error(
                f"lies at bytes {begin} to {stop}; the arrays fill the {len(body)} bytes after the header without "
                "gap or overlap",
                field=name,
            )
        arrays[name], end = np.frombuffer(body[begin:stop], dtype=dtype), stop
    if end != len(body):
        raise error(f"{len(body) - end} bytes after the last array belong to none")
    return arrays, {name: loads(metadata[name].encode("utf-8", "surrogatepass"), error) for name in names}


def _entries(header: dict[str, Any], error: type[ScoringError]) -> Iterator[tuple[str, int, int, np.dtype]]:
    """(name, first byte, byte after the last, dtype) of each array the header names."""
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise error("has an entry that is not dtype, shape and data_offsets", field=name)
        shape, bounds = entry["shape"], entry["data_offsets"]
        known = isinstance(entry["dtype"], str) and entry["dtype"] in _DTYPES
        if not known or not _naturals(shape, 1) or not _naturals(bounds, 2):
            raise error(
                f"is {short(entry['dtype'])} {short(shape)} at {short(bounds)}; allowed are one dimension of "
                f"{', '.join(_DTYPES)} at [first byte, end]",
                field=name,
            )
        dtype = np.dtype(_DTYPES[entry["dtype"]])
        if bounds[1] - bounds[0] != shape[0] * dtype.itemsize:
            raise error(
                f"has {bounds[1] - bounds[0]} bytes; {shape[0]} values of {dtype} have {shape[0] * dtype.itemsize}",
                field=name,
            )
        yield name, bounds[0], bounds[1], dtype


def _naturals(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(type(x) is int and 0 <= x < 2**62 for x in value)


def _array_names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls) if f.name not in ("teachers", "metas", "errors"))


def _check_names(what: str, given: set[str], due: set[str], error: type[ScoringError]) -> None:
    for name in sorted(due - given):
        raise error(f"is missing from the {what}", field=name)
    for name in sorted(given - due):
        raise error(f"is not one of the {what} {', '.join(sorted(due))}", field=name)


def _check_version(given: Any, error: type[ScoringError]) -> None:
    if isinstance(given, bool) or str(given) != str(SCHEMA_VERSION):
        raise error(f"is {short(given)}; this version speaks schema {SCHEMA_VERSION}", field="schema_version")


def _refuse_stray_modes(batch: MatrixBatch) -> None:
    """Raise `InvalidRead` when a read carries what its mode bits say it does not have: it would be dropped."""
    candidates, rows = np.diff(batch.candidate_offsets), np.diff(batch.row_offsets)  # int64 [N]
    omitted, selected = (batch.modes & OMITTED) > 0, (batch.modes & ROWS) > 0  # bool [N]
    for field, wrong in (
        ("modes", batch.modes >= UNKNOWN_TO_MINUS_INF << 1),
        ("widths", (batch.widths >= 2**31) | (omitted & (batch.widths > 0))),
        ("candidate_ids", omitted & (candidates > 0)),
        ("rows", ~selected & (rows > 0)),
    ):
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            raise InvalidRead(
                f"do not agree with the read's mode bits ({int(batch.modes[i])}), width {int(batch.widths[i])}, "
                f"{int(candidates[i])} candidates and {int(rows[i])} rows",
                read=i,
                field=field,
            )


# ---------------------------------------------------------------- parts of JSON

# What a result holds; of a failed read, nothing.
_NOTHING = {
    "matrix": {"logprobs": [], "response_logprobs": [], "rows": [], "shape": [0, 0], "meta": None},
    "label": {"logprobs": [], "meta": None},
}


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the name {short(twice)} stands twice in one object")
    return names


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _read_or_error(kind: Kind, i: int, read: Any) -> MatrixRead | LabelRead | InvalidRead:
    try:
        return read_from_fields(_READ[kind], read)
    except InvalidRead as error:
        return error.at(i)


def _field_names(cls: type) -> list[str]:
    return [name for name in cls.__dataclass_fields__ if name != "_"]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _result(score: Any) -> dict[str, Any]:
    if isinstance(score, ScoringError):
        return {"error": error_to_json(score)}
    scores = {"logprobs": _numbers(score.logprobs)}
    if score.logprobs.ndim == 2:
        scores["response_logprobs"] = _numbers(score.response_logprobs)
        scores["rows"] = score.rows.tolist()
        scores["shape"] = list(score.logprobs.shape)
    return {**scores, "meta": score.meta.to_dict()}


def _numbers(values: np.ndarray) -> list:
    """`values` as lists of numbers, None for -inf."""
    lists = values.tolist()
    if not np.isneginf(values).any():
        return lists
    if values.ndim == 1:
        return [None if x == -math.inf else x for x in lists]
    return [[None if x == -math.inf else x for x in row] for row in lists]


def _floats(values: Any, read: int) -> np.ndarray:
    """float32 [n] of a list of numbers, -inf for None. A list of anything else is an error."""
    if not isinstance(values, list) or not set(map(type, values)) <= {float, int, type(None)}:
        raise WrongEngineAnswer("scores are a list of numbers and nulls", read=read)
    try:
        numbers = np.array([-math.inf if x is None else x for x in values], dtype=np.float64)
    except OverflowError:
        raise WrongEngineAnswer("holds an integer that no float32 can be", read=read) from None
    with np.errstate(over="ignore"):  # what overflows becomes +inf or -inf; +inf is refused
        return numbers.astype(np.float32)


def _block(result: dict[str, Any], read: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 [n, 1 + K] (the response's own token first) and int64 [n], the rows of one matrix result."""
    if not _naturals(result["shape"], 2) or result["shape"][1] >= 2**31:
        raise WrongEngineAnswer(f"shape is {short(result['shape'])}; it is [n, K]", read=read)
    n, k = result["shape"]
    logprobs, rows = result["logprobs"], result["rows"]
    if not isinstance(logprobs, list) or len(logprobs) != n or not _naturals(rows, n):
        raise WrongEngineAnswer(f"shape says {n} rows; logprobs or rows have others", read=read)
    own = _floats(result["response_logprobs"], read)
    lines = [_floats(line, read) for line in logprobs]
    if len(own) != n or any(len(line) != k for line in lines):
        raise WrongEngineAnswer(f"shape says {n} rows of {k}; the scores have others", read=read)
    block = np.empty((n, 1 + k), dtype=np.float32)
    block[:, 0] = own
    for row, line in zip(block, lines, strict=True):
        row[1:] = line
    return block, np.array(rows, dtype=np.int64)


def _meta(fields_: Any) -> ReadMeta:
    due = {f.name: f.type for f in fields(ReadMeta)}
    if not isinstance(fields_, dict) or set(fields_) != set(due):
        raise WrongEngineAnswer(f"meta has exactly {', '.join(due)}", field="meta")
    for name, kind in due.items():
        value = fields_[name]
        lowest = NO_TOKEN if name == "next_token" else 0
        if type(value).__name__ != kind or (kind == "int" and not lowest <= value < 2**31):
            raise WrongEngineAnswer(f"is {short(value)}; it is of type {kind}", field=f"meta.{name}")
    return ReadMeta(**fields_)


# ---------------------------------------------------------------- consistency of an answer


def _check_scores(scores: MatrixScores | LabelScores) -> None:
    """Raise `WrongEngineAnswer` unless the arrays of an answer from outside fit one another."""
    count = len(scores.meta_index)
    dtypes: dict[str, Any] = scores.per_read | {"meta_index": np.int32}
    lengths = dict.fromkeys(dtypes, count)
    for name, (dtype, offsets) in scores.flat.items():
        dtypes |= {name: dtype, offsets: np.int64}
        lengths[offsets] = count + 1
    for name, dtype in dtypes.items():
        if (given := getattr(scores, name).dtype) != dtype:
            raise WrongEngineAnswer(f"is {given}; {np.dtype(dtype)} is due", field=name)
    for name, due in lengths.items():
        if (given := len(getattr(scores, name))) != due:
            raise WrongEngineAnswer(f"has {given} entries; {count} reads have {due}", field=name)
    for name, (_, offsets) in scores.flat.items():
        flat, bounds = getattr(scores, name), getattr(scores, offsets)
        if bounds[0] != 0 or bounds[-1] != len(flat) or (bounds[1:] < bounds[:-1]).any():
            raise WrongEngineAnswer(f"must rise from 0 to {len(flat)}", field=offsets)
    failed = np.zeros(count, dtype=bool)  # bool [N]
    if any(not 0 <= i < count for i in scores.errors):
        raise WrongEngineAnswer(f"names a read outside [0, {count})", field="errors")
    failed[list(scores.errors)] = True
    lowest, highest = np.where(failed, -1, 0), np.where(failed, -1, len(scores.metas) - 1)
    if ((scores.meta_index < lowest) | (scores.meta_index > highest)).any():
        raise WrongEngineAnswer(f"must be -1 for a failed read, else in [0, {len(scores.metas)})", field="meta_index")
    lengths = np.diff(scores.offsets)  # int64 [N]
    wrong = failed & (lengths > 0)
    if isinstance(scores, MatrixScores):
        for name, bound in (("widths", 2**31), ("top_k", 2**31), ("extras", (TAIL | ENTROPY) + 1)):
            if ((getattr(scores, name) < 0) | (getattr(scores, name) >= bound)).any():
                raise WrongEngineAnswer(f"must lie in [0, {bound})", field=name)
        wrong |= lengths != np.diff(scores.row_offsets) * widths(scores.widths, scores.top_k, scores.extras)
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise WrongEngineAnswer(f"has {int(lengths[i])} scores, which do not fit its rows and K", read=i)
    refuse_not_a_score(scores)
