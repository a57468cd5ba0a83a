"""Errors arrive as they were raised: over pickles inside pickles (Ray), over JSON (HTTP)."""

import json
import pickle

import pytest

from scoring import errors
from scoring.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidRead,
    Overloaded,
    ScoringError,
    TeacherUnavailable,
    UnknownTeacher,
    VersionMismatch,
    WrongEngineAnswer,
    from_dict,
)

CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, ScoringError)]
STATUSES = {
    "ScoringError": 500,
    "InvalidRead": 422,
    "BatchTooLarge": 422,
    "InvalidAdapter": 422,
    "InvalidCheckpoint": 422,
    "NoTokenizer": 422,
    "UnknownTeacher": 422,
    "VersionMismatch": 409,
    "Overloaded": 429,
    "TeacherUnavailable": 503,
    "EngineDead": 503,
    "DeadlineExceeded": 504,
    "WrongEngineAnswer": 500,
    "SelfTestFailed": 500,
    "RefusedSettings": 500,
    "InvalidLoss": 422,
    "Unauthorized": 401,
}


def parts(error: ScoringError) -> tuple:
    return type(error), error.message, error.read, error.field, error.details, str(error)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"read": 0},
        {"read": 7, "field": "candidate_ids[3][1]"},
        {"field": "rows", "retry_after_s": 0.5, "replica": "a1"},
    ],
)
def test_an_error_survives_three_pickles_in_one_another_and_json(cls, arguments):
    error = cls("is 7; allowed is 6 (setting max_candidates)", **arguments)
    carried = error
    for _ in range(3):
        carried = pickle.dumps({"error": carried})
    for _ in range(3):
        carried = pickle.loads(carried)["error"]
    assert parts(carried) == parts(error)
    assert parts(from_dict(json.loads(json.dumps(error.to_dict())))) == parts(error)


def test_every_error_has_the_status_it_becomes_over_http():
    assert {cls.__name__: cls.status for cls in CLASSES} == STATUSES


def test_an_error_says_which_read_and_which_field_it_speaks_of():
    assert str(ScoringError("is wrong")) == "is wrong"
    assert str(ScoringError("is wrong", read=0)) == "read 0: is wrong"
    assert str(ScoringError("is wrong", field="rows")) == "rows: is wrong"
    assert str(ScoringError("is wrong", read=3, field="rows[2]")) == "read 3, rows[2]: is wrong"


def test_an_error_can_be_said_of_another_read():
    error = Overloaded("all replicas are full", read=1, field="ids", retry_after_s=2.0)
    moved = error.at(5)
    assert parts(moved)[:5] == (Overloaded, "all replicas are full", 5, "ids", {"retry_after_s": 2.0})
    assert error.read == 1


def test_an_error_of_an_unknown_kind_is_still_a_scoring_error():
    error = from_dict({"type": "FromTheFuture", "message": "is new", "read": 2})
    assert parts(error) == (ScoringError, "is new", 2, None, {}, "read 2: is new")


@pytest.mark.parametrize(
    ("cls", "family"),
    [
        (InvalidRead, ValueError),
        (UnknownTeacher, InvalidRead),
        (DeadlineExceeded, TimeoutError),
        (EngineDead, TeacherUnavailable),
        (VersionMismatch, ScoringError),
        (WrongEngineAnswer, ScoringError),
    ],
)
def test_an_error_is_caught_by_the_name_one_expects(cls, family):
    assert issubclass(cls, family)
    assert issubclass(cls, ScoringError)
