"""The bytes of a batch and of its answer, outside this process.

Two forms carry the same content. safetensors: the arrays of the dataclass by their field names, read in place
without a copy, small things as JSON strings in the header's metadata. JSON: one object a read, for callers with
nothing better; it costs a hundred times the time. Both carry `SCHEMA_VERSION`, and neither is ever guessed at:
an unknown or missing part, another dtype or another version is an error with a sentence.

What is wrong with a request raises `InvalidRead`; what is wrong with an answer raises `WrongEngineAnswer`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from reprlib import repr as short
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save

from scoring.batches import ALL_MODES, OMITTED, ROWS, SCHEMA_VERSION, LabelBatch, MatrixBatch, end_to_end
from scoring.columns import ENTROPY, LARGEST_ID, RANK, TAIL, Columns, widths_of
from scoring.errors import InvalidRead, ScoringError, WrongEngineAnswer, from_dict
from scoring.ids import PAD
from scoring.reads import LabelRead, MatrixRead, read_from_fields
from scoring.scores import META_COLUMNS, NO_TOKEN, LabelScores, MatrixScore, MatrixScores, ReadMeta

SAFETENSORS = "application/vnd.safetensors"
"""Media type of the binary form."""

DEFAULT_TIMEOUT_S = 600.0
MAX_TIMEOUT_S = 3600.0

# Longest safetensors header that is parsed. A batch's holds a dozen names and the teachers; an answer's may hold
# one error a read.
MAX_BATCH_HEADER = 1 << 20
MAX_SCORES_HEADER = 64 << 20

Kind = Literal["matrix", "label"]
READ = {"matrix": MatrixRead, "label": LabelRead}
BATCH = {"matrix": MatrixBatch, "label": LabelBatch}
SCORES = {"matrix": MatrixScores, "label": LabelScores}
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
    tensors, metadata = load_arrays(
        data, f"{kind}-reads", array_names(BATCH[kind]), ("teachers", "options"), MAX_BATCH_HEADER, InvalidRead
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
        WrongEngineAnswer: a score is NaN or +inf, or the arrays do not fit one another.
    """
    _check_scores(scores)
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
    tensors, metadata = load_arrays(
        data, f"{kind}-scores", array_names(SCORES[kind]), ("metas", "errors"), MAX_SCORES_HEADER, WrongEngineAnswer
    )
    metas, errors = metas_from_json(metadata["metas"]), metadata["errors"]
    if not isinstance(errors, dict):
        raise WrongEngineAnswer("errors is an object; the answer has something else")
    try:
        by_read = {int(i): error_from_json(error) for i, error in errors.items()}
    except ValueError:
        raise WrongEngineAnswer("errors are named by the index of their read", field="errors") from None
    scores = SCORES[kind](**tensors, metas=metas, errors=by_read)
    _check_scores(scores)
    return scores


# ---------------------------------------------------------------- JSON


def loads(data: bytes, error: type[ScoringError] = InvalidRead) -> Any:
    """Strict JSON: UTF-8, no NaN or Infinity nor a number that would become one, no name twice in one object.

    Raises:
        error: `data` is anything else. `details["position"]` is the character where reading stopped, when known.
    """
    try:
        return json.loads(
            str(data, "utf-8"),
            object_pairs_hook=_unique_names,
            parse_constant=_refuse_constant,
            parse_float=_finite if error is InvalidRead else None,  # an answer's scores are checked all at once
        )
    except json.JSONDecodeError as wrong:
        raise error(f"the body is not JSON: {wrong.msg} at character {wrong.pos}", position=wrong.pos) from None
    except RecursionError:
        raise error("the body is JSON nested too deeply") from None
    except ValueError as wrong:  # not UTF-8, an integer of thousands of digits, or one of the two refusals below
        raise error(f"the body is not JSON as it is read here: {wrong}") from None


def holds_half_a_pair(document: Any, data: bytes) -> bool:
    """Whether a text in `document`, which `data` is the JSON of, has half of a surrogate pair. JSON can escape one; no
    tokenizer reads it, and no file holds it."""
    if b"\\u" not in data:
        return False
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


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
    leaves no K to see) and `meta`; what was asked of `top_k` (the number), `top_ids`, `top_logprobs` (n lists of top_k
    each), `tail_logprob`, `entropy` and `rank` (n); a label result `logprobs` (L) and `meta`. **A score of -inf is
    null**, which JSON has instead. A failed read is `{"error": {...}}`.

    Raises:
        WrongEngineAnswer: a score is NaN or +inf, or the arrays do not fit one another.
    """
    _check_scores(scores)
    return {"results": [_result(score) for score in scores], "schema_version": SCHEMA_VERSION}


def encode_json(scores: MatrixScores | LabelScores) -> bytes:
    """The bytes of `scores_to_json`, written read by read: nothing else ever holds all of the numbers as Python's own,
    and no single call holds every other thread up."""
    _check_scores(scores)
    results = ",".join(json.dumps(_result(score), allow_nan=False) for score in scores)
    return f'{{"results":[{results}],"schema_version":{SCHEMA_VERSION}}}'.encode()


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
    count = len(body["results"])
    pieces: list[np.ndarray] = []  # float32, flat
    rows: list[np.ndarray] = []  # int64
    columns = {name: np.zeros(count, dtype) for name, dtype in SCORES[kind].per_read.items()}
    metas: dict[ReadMeta, int] = {}
    meta_index = np.full(count, -1, np.int32)
    errors: dict[int, ScoringError] = {}
    for i, result in enumerate(body["results"]):
        if isinstance(result, dict) and set(result) == {"error"}:
            errors[i] = error_from_json(result["error"])
            pieces.append(_NO_SCORES)
            rows.append(_NO_ROWS)
            continue
        _check_result(kind, i, result)
        if kind == "matrix":
            block, answered, columns_of = _block(result, i)
            pieces.append(block.reshape(-1))
            rows.append(answered)
            columns["widths"][i], columns["top_k"][i] = columns_of.candidates, columns_of.top_k
            columns["extras"][i] = columns_of.extras
        else:
            pieces.append(_floats(result["logprobs"], i))
        _check_meta(result["meta"])
        for name in META_COLUMNS:
            columns[name][i] = result["meta"][name]
        shared = ReadMeta(**result["meta"] | _UNSAID)  # what other reads have in common with this one
        meta_index[i] = metas.setdefault(shared, len(metas))
    columns["values"], columns["offsets"] = end_to_end(pieces, np.float32)
    if kind == "matrix":
        columns["rows"], columns["row_offsets"] = end_to_end(rows, np.int64)
    scores = SCORES[kind](meta_index=meta_index, metas=tuple(metas), errors=errors, **columns)
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


def check_answer(batch: MatrixBatch | LabelBatch, scores: MatrixScores | LabelScores) -> None:
    """Raise `WrongEngineAnswer` unless `scores` has what `batch` asked for: reads, rows, columns, teacher."""
    if len(scores) != len(batch):
        raise WrongEngineAnswer(f"{len(scores)} reads were answered; {len(batch)} were asked")
    answered = scores.meta_index >= 0  # bool [N]
    if isinstance(batch, MatrixBatch):
        counts = batch.row_counts()
        due = {
            "rows": (np.diff(scores.row_offsets), counts),
            "K": (scores.widths, batch.widths),
            "top_k": (scores.top_k, batch.top_k),
            "extras": (scores.extras, batch.extras()),
        }
    else:
        due = {"labels": (np.diff(scores.offsets), np.diff(batch.label_offsets))}
    for name, (given, asked) in due.items():
        if (wrong := answered & (given != asked)).any():
            i = int(np.flatnonzero(wrong)[0])
            raise WrongEngineAnswer(f"was answered with {name} {given[i]}; {asked[i]} is due", read=i)
    if isinstance(batch, MatrixBatch):
        rows = batch.answered_rows()[np.repeat(answered, counts)]
        if (wrong := rows != scores.rows).any():
            i = np.repeat(np.arange(len(batch)), np.where(answered, counts, 0))[wrong][0]
            raise WrongEngineAnswer("was answered for other rows than asked", read=int(i))
    # Teachers by number, -1 where none is named.
    numbers = {name: place for place, name in enumerate(batch.teachers) if name is not None}
    asked = np.array([numbers.get(name, -1) for name in batch.teachers], np.int64)[batch.teacher_index]
    given = np.array([*(numbers.get(meta.teacher, -1) for meta in scores.metas), -1], np.int64)[scores.meta_index]
    if (wrong := answered & (asked >= 0) & (given != asked)).any():
        i = int(np.flatnonzero(wrong)[0])
        who = scores.metas[scores.meta_index[i]].teacher
        raise WrongEngineAnswer(
            f"was answered by teacher {who!r}, not {batch.teachers[batch.teacher_index[i]]!r}", read=i
        )


def metas_from_json(metas: Any) -> tuple[ReadMeta, ...]:
    """The metas of an answer from their JSON form, a list of `ReadMeta.to_dict`.

    Raises:
        WrongEngineAnswer: it is something else.
    """
    if not isinstance(metas, list):
        raise WrongEngineAnswer("is no list", field="metas")
    for meta in metas:
        _check_meta(meta)
    return tuple(ReadMeta(**meta) for meta in metas)


def kind_of(value: MatrixBatch | LabelBatch | MatrixScores | LabelScores) -> Kind:
    return "matrix" if isinstance(value, MatrixBatch | MatrixScores) else "label"


def _refuse_not_a_score(scores: MatrixScores | LabelScores) -> None:
    """Raise `WrongEngineAnswer` when a score is NaN or +inf, which none is, or a top id no id."""
    if not scores.values.max(initial=-np.inf) < np.inf:  # of numbers with a NaN among them it is NaN
        at = int(np.flatnonzero(~(scores.values < np.inf))[0])
        read = int(np.searchsorted(scores.offsets, at, side="right")) - 1
        place = at - int(scores.offsets[read])
        where = f"label {place}"
        if isinstance(scores, MatrixScores):
            row, column = divmod(place, scores.columns(read).width)
            where = f"row {row} {scores.columns(read).name_of(column)}"
        raise WrongEngineAnswer(f"the score at {where} is {scores.values[at]}", read=read)
    if isinstance(scores, MatrixScores):
        # bool [N]: has numbers that are no log-probability
        special = (scores.top_k > 0) | ((scores.extras & (ENTROPY | RANK)) > 0)
        for i in np.flatnonzero(special & (np.diff(scores.offsets) > 0)).tolist():
            columns = scores.columns(i)
            block = scores.values[scores.offsets[i] : scores.offsets[i + 1]].reshape(-1, columns.width)
            ids = block[:, columns.top_ids_at]
            wrong = (ids < 0) | (ids > LARGEST_ID) | (ids != np.floor(ids))
            if wrong.any():
                row, k = (int(x) for x in np.argwhere(wrong)[0])
                raise WrongEngineAnswer(f"the id at row {row} of top_ids col {k} is {ids[row, k]}", read=i)
            if columns.entropy and (block[:, columns.entropy_at] < 0).any():
                raise WrongEngineAnswer("an entropy is missing or below zero", read=i)
            if columns.rank:
                ranks = block[:, columns.rank_at]
                wrong = (ranks < 1) | (ranks > LARGEST_ID) | (ranks != np.floor(ranks))
                if wrong.any():
                    row = int(np.flatnonzero(wrong)[0])
                    raise WrongEngineAnswer(f"the rank at row {row} is {ranks[row]}", read=i)


# ---------------------------------------------------------------- parts of safetensors

_DTYPES = {"U8": "<u1", "I32": "<i4", "I64": "<i8", "F32": "<f4"}


def _save(content: Any, form: str, **metadata: Any) -> bytes:
    strings = {name: json.dumps(value, allow_nan=False) for name, value in metadata.items()}
    arrays = {name: getattr(content, name) for name in array_names(type(content))}
    return save(arrays, {"form": form, "schema_version": str(SCHEMA_VERSION), **strings})


def load_arrays(
    data: Any,
    form: str,
    due: tuple[str, ...],
    names: tuple[str, ...],
    header_limit: int,
    error: type[ScoringError],
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays `due` as views of `data`, bytes or mapped, and the metadata `names` as values.

    Everything the header says is held against the length of `data` before an array is made.

    Raises:
        error: `data` is anything but safetensors with exactly these, of this form and schema version.
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
    _check_names("arrays", set(header), set(due), error)
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
    if not isinstance(value, list) or len(value) != count or not set(map(type, value)) <= {int}:
        return False
    return min(value, default=0) >= 0 and max(value, default=0) < 2**62


def array_names(cls: type) -> tuple[str, ...]:
    """The names of the arrays in which a batch, or an answer, travels."""
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
        ("modes", batch.modes > ALL_MODES),
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

# What a result holds, and what it holds beside where that was asked for.
_RESULT = {"matrix": {"logprobs", "response_logprobs", "rows", "shape", "meta"}, "label": {"logprobs", "meta"}}
_ASKED = {"matrix": ({"top_k", "top_ids", "top_logprobs"}, {"tail_logprob"}, {"entropy"}, {"rank"}), "label": ()}
_NO_SCORES, _NO_ROWS = np.zeros(0, np.float32), np.zeros(0, np.int64)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the name {short(twice)} stands twice in one object")
    return names


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not -np.inf < number < np.inf:
        raise ValueError(f"{short(text)} is beyond what a number can be")
    return number


def _read_or_error(kind: Kind, i: int, read: Any) -> MatrixRead | LabelRead | InvalidRead:
    try:
        return read_from_fields(READ[kind], read)
    except InvalidRead as error:
        return error.at(i)


def _field_names(cls: type) -> list[str]:
    return [name for name in cls.__dataclass_fields__ if name != "_"]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _result(score: Any) -> dict[str, Any]:
    if isinstance(score, ScoringError):
        return {"error": error_to_json(score)}
    result: dict[str, Any] = {"logprobs": _numbers(score.logprobs)}
    if isinstance(score, MatrixScore):
        result["response_logprobs"] = _numbers(score.response_logprobs)
        result["rows"] = score.rows.tolist()
        result["shape"] = list(score.logprobs.shape)
        if score.top_ids is not None:
            result["top_k"] = score.top_ids.shape[1]
            result["top_ids"] = score.top_ids.tolist()
            result["top_logprobs"] = _numbers(score.top_logprobs)
        for name in ("tail_logprob", "entropy"):
            if (values := getattr(score, name)) is not None:
                result[name] = _numbers(values)
        if score.rank is not None:
            result["rank"] = score.rank.tolist()
    return {**result, "meta": score.meta.to_dict()}


def _numbers(values: np.ndarray) -> list:
    """`values` as lists of numbers, None for -inf."""
    missing = np.isneginf(values)
    if not missing.any():
        return values.tolist()
    objects = values.astype(object)
    objects[missing] = None
    return objects.tolist()


def _check_result(kind: Kind, read: int, result: Any) -> None:
    """Raise `WrongEngineAnswer` unless the result of a read that was answered has the names it must have."""
    names = set(result) if isinstance(result, dict) else set()
    due = _RESULT[kind].union(*(asked for asked in _ASKED[kind] if asked & names))
    if names != due:
        raise WrongEngineAnswer(f"a result like this has exactly {', '.join(sorted(due))}", read=read)


def _floats(values: Any, read: int) -> np.ndarray:
    """float32 [n] of a list of numbers, -inf for None. A list of anything else is an error."""
    if not isinstance(values, list) or not (types := set(map(type, values))) <= {float, int, type(None)}:
        raise WrongEngineAnswer("scores are a list of numbers and nulls", read=read)
    try:
        numbers = np.array(values, dtype=np.float64)  # None becomes NaN
    except OverflowError:
        raise WrongEngineAnswer("holds an integer that no float32 can be", read=read) from None
    if type(None) in types:
        missing = np.isnan(numbers)
        if missing.sum() != values.count(None):
            raise WrongEngineAnswer("holds a NaN", read=read)
        numbers[missing] = -np.inf
    with np.errstate(over="ignore"):  # what overflows becomes +inf or -inf; +inf is refused
        return numbers.astype(np.float32)


def _flat(values: Any, n: int, k: int, read: int) -> list:
    """The n * k values of n lists of k each."""
    lists = isinstance(values, list) and set(map(type, values)) <= {list}
    if not lists or len(values) != n or not set(map(len, values)) <= {k}:
        raise WrongEngineAnswer(f"{n} rows of {k} are due; there are others", read=read)
    return list(itertools.chain.from_iterable(values))


def _ids(values: list, read: int, name: str = "top_ids") -> np.ndarray:
    """int64 [n] of ids, or of ranks, that float32 holds exactly."""
    if not set(map(type, values)) <= {int} or not 0 <= min(values, default=0) <= max(values, default=0) <= LARGEST_ID:
        raise WrongEngineAnswer(f"{name} are integers from 0 to {LARGEST_ID}", read=read)
    return np.array(values, dtype=np.int64)


def _block(result: dict[str, Any], read: int) -> tuple[np.ndarray, np.ndarray, Columns]:
    """The block float32 [n, columns.width], int64 [n] the rows, and the columns of one matrix result."""
    if not _naturals(result["shape"], 2) or result["shape"][1] >= 2**31:
        raise WrongEngineAnswer(f"shape is {short(result['shape'])}; it is [n, K]", read=read)
    (n, k), top_k = result["shape"], result.get("top_k", 0)
    if not _naturals([top_k], 1) or top_k >= 2**31:
        raise WrongEngineAnswer(f"top_k is {short(top_k)}; it is a number", read=read)
    if not _naturals(result["rows"], n):
        raise WrongEngineAnswer(f"shape says {n} rows; there are others", read=read)
    columns = Columns(k, top_k, "tail_logprob" in result, "entropy" in result, "rank" in result)
    parts = [(columns.candidates_at, _floats(_flat(result["logprobs"], n, k, read), read).reshape(n, k))]
    if "top_k" in result:
        top_ids = _ids(_flat(result["top_ids"], n, top_k, read), read)
        top_logprobs = _floats(_flat(result["top_logprobs"], n, top_k, read), read)
        parts.append((columns.top_ids_at, top_ids.reshape(n, top_k)))
        parts.append((columns.top_logprobs_at, top_logprobs.reshape(n, top_k)))
    for at, name in (
        (columns.response_at, "response_logprobs"),
        (columns.tail_at, "tail_logprob"),
        (columns.entropy_at, "entropy"),
    ):
        if at is not None:
            numbers = _floats(result[name], read)
            if len(numbers) != n:
                raise WrongEngineAnswer(f"shape says {n} rows; {name} has {len(numbers)}", read=read)
            parts.append((at, numbers))
    if columns.rank:
        parts.append((columns.rank_at, _ids(_flat([result["rank"]], 1, n, read), read, "rank")))
    block = np.empty((n, columns.width), dtype=np.float32)  # as much as is in hand: nothing was taken at its word
    for at, part in parts:
        block[:, at] = part
    return block, np.array(result["rows"], dtype=np.int64), columns


_META = {f.name: f.type for f in fields(ReadMeta)}
_UNSAID = {f.name: f.default for f in fields(ReadMeta) if f.name in META_COLUMNS}


def _check_meta(given: Any) -> None:
    if not isinstance(given, dict) or given.keys() != _META.keys():
        raise WrongEngineAnswer(f"meta has exactly {', '.join(_META)}", field="meta")
    for name, kind in _META.items():
        value = given[name]
        lowest = NO_TOKEN if name == "next_token" else 0
        if type(value).__name__ != kind or (kind == "int" and not lowest <= value < 2**31):
            raise WrongEngineAnswer(f"is {short(value)}; it is of type {kind}", field=f"meta.{name}")


# ---------------------------------------------------------------- consistency of an answer


def _check_scores(scores: MatrixScores | LabelScores) -> None:
    """Raise `WrongEngineAnswer` unless the arrays of an answer fit one another, and hold scores."""
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
        for name, bound in (("widths", 2**31), ("top_k", 2**31), ("extras", (TAIL | ENTROPY | RANK) + 1)):
            if ((getattr(scores, name) < 0) | (getattr(scores, name) >= bound)).any():
                raise WrongEngineAnswer(f"must lie in [0, {bound})", field=name)
        wrong |= lengths != np.diff(scores.row_offsets) * widths_of(scores.widths, scores.top_k, scores.extras)
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise WrongEngineAnswer(f"has {int(lengths[i])} scores, which do not fit its rows and K", read=i)
    _refuse_not_a_score(scores)
