"""From a row of a file or a dataset to a read: ids as they are, text through a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from scoring.errors import InvalidRead
from scoring.reads import LabelRead, MatrixRead


class Encoder(Protocol):
    """What is needed of `scoring.tokenizer.Tokenizer`."""

    hash: str | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class MatrixReads:
    """Rows as matrix reads: `prompt_ids` or `prompt`, `response_ids` or `response`, and where there are `candidate_ids`
    and `rows` as in `MatrixRead`.

    Prompt and response are tokenised apart, so that each response token is one of the response's own text: what stands
    across the seam is never one token. The prompt gets the special tokens that the tokenizer puts around a text.
    """

    teacher: str | None
    tokenizer: Encoder | None
    top_k: int = 0
    extras: tuple[str, ...] = ()

    columns = ("prompt_ids", "prompt", "response_ids", "response", "candidate_ids", "rows")

    def read(self, fields: Mapping[str, Any]) -> MatrixRead:
        """The read of a row.

        Raises:
            InvalidRead: the row makes none.
        """
        return MatrixRead(
            _ids(fields, "prompt", self.tokenizer, add_special_tokens=True),
            _ids(fields, "response", self.tokenizer, add_special_tokens=False),
            fields.get("candidate_ids"),
            rows=fields.get("rows"),
            top_k=self.top_k,
            extras=self.extras,
            teacher=self.teacher,
        )


@dataclass(frozen=True)
class LabelReads:
    """Rows as label reads: `prompt_ids` or `prompt`; `label_ids` or `labels`, unless all rows share `label_ids`."""

    teacher: str | None
    tokenizer: Encoder | None
    label_ids: Sequence[int] | None = None

    columns = ("prompt_ids", "prompt", "label_ids", "labels")

    def read(self, fields: Mapping[str, Any]) -> LabelRead:
        """The read of a row.

        Raises:
            InvalidRead: the row makes none.
        """
        labels = self.label_ids
        if labels is None and (labels := fields.get("label_ids")) is None:
            if (texts := fields.get("labels")) is None:
                raise InvalidRead(f"has neither label_ids nor labels{_there_are(fields)}")
            labels = one_token_each(texts, self.tokenizer)
        return LabelRead(_ids(fields, "prompt", self.tokenizer, add_special_tokens=True), labels, teacher=self.teacher)


def one_token_each(texts: Any, tokenizer: Encoder | None) -> list[int]:
    """The ids of labels given as text.

    Raises:
        InvalidRead: one is no text, or not one token.
    """
    if not isinstance(texts, list | tuple):
        raise InvalidRead(f"is a {type(texts).__name__}; allowed is a list of texts", field="labels")
    labels = []
    for i, text in enumerate(texts):
        ids = _encode(text, f"labels[{i}]", tokenizer, add_special_tokens=False)
        if len(ids) != 1:
            raise InvalidRead(f"is {text!r}, which is {len(ids)} tokens; a label is one", field=f"labels[{i}]")
        labels += ids
    return labels


def _ids(fields: Mapping[str, Any], what: str, tokenizer: Encoder | None, add_special_tokens: bool) -> Any:
    if (ids := fields.get(f"{what}_ids")) is not None:
        return ids
    if (text := fields.get(what)) is None:
        raise InvalidRead(f"has neither {what}_ids nor {what}{_there_are(fields)}")
    return _encode(text, what, tokenizer, add_special_tokens)


def _encode(text: Any, field: str, tokenizer: Encoder | None, add_special_tokens: bool) -> list[int]:
    if not isinstance(text, str):
        raise InvalidRead(
            f"is a {type(text).__name__}; allowed is text (a conversation is text once a chat template wrote it)",
            field=field,
        )
    if tokenizer is None:
        raise InvalidRead("is text, which needs --tokenizer with the folder of the teacher's tokenizer", field=field)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _there_are(fields: Mapping[str, Any]) -> str:
    return f"; its columns are {', '.join(map(str, list(fields)[:20])) or 'none'}"
