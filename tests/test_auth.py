"""Tokens: the file they stand in, and how a request brings one."""

import base64
import os
import time

import pytest

from deployments import auth
from deployments.auth import Tokens, read_tokens
from scoring.errors import RefusedSettings

ALICE, BOB = "alice-0123456789abcdef", "bob/0123456789+abcdef=="


@pytest.fixture
def write(tmp_path):
    """Writes a token file, of its owner alone unless told otherwise, and gives its path."""

    def write_file(text: str | bytes, mode: int = 0o600) -> str:
        path = tmp_path / "tokens"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(mode)
        return str(path)

    return write_file


def bearer(token: str) -> list[bytes]:
    return [b"Bearer " + token.encode()]


def basic(token: str, user: str = "any") -> list[bytes]:
    return [b"Basic " + base64.b64encode(f"{user}:{token}".encode())]


def test_a_request_is_known_by_its_token_in_either_form(write):
    tokens = Tokens(write(f"# trainers\n\nalice: {ALICE}\n  bob.2:{BOB}  \n", mode=0o640))
    assert tokens.name_of(bearer(ALICE)) == "alice"
    assert tokens.name_of(bearer(BOB)) == "bob.2"
    assert tokens.name_of([b"bEARER   " + ALICE.encode()]) == "alice"
    assert tokens.name_of(basic(BOB)) == tokens.name_of(basic(BOB, user="")) == "bob.2"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        bearer(ALICE[:-1]),
        bearer(ALICE + "0"),
        bearer(ALICE.upper()),
        bearer("alice"),
        bearer(f"alice: {ALICE}"),
        bearer(f"any:{ALICE}"),
        [ALICE.encode()],
        [b"Digest " + ALICE.encode()],
        [b"Basic " + ALICE.encode()],
        [b"Basic " + base64.b64encode(ALICE.encode())],
        [b"Basic \xff\xfe"],
        [b"Bearer \xff\xfe"],
        basic(f"{ALICE}:"),
        bearer(ALICE) * 2,
        [*bearer("other-0123456789abcdef"), *bearer(ALICE)],
    ],
)
def test_anything_else_is_nobody(write, headers):
    assert Tokens(write(f"alice: {ALICE}\n")).name_of(headers) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no token"),
        ("# alice: x\n", "holds no token"),
        (f"alice {ALICE}", r"line 1 is not `name: token`"),
        (ALICE, r"line 1 is not `name: token`"),
        (f": {ALICE}", r"line 1 is not `name: token`"),
        ("alice:", r"line 1 is not `name: token`"),
        (f"a b: {ALICE}", r"line 1 is not `name: token`"),
        (f"{'a' * 65}: {ALICE}", r"line 1 is not `name: token`"),
        ("#\nalice: short-012345678", "line 2: the token of 'alice' is no token; allowed are 16 or more letters"),
        (f"alice: {ALICE} x", "line 1: the token of 'alice' is no token"),
        (f"alice: {ALICE}é", "line 1: the token of 'alice' is no token"),
        (f"alice: {ALICE}\nalice: {BOB}", "line 2: the name 'alice' is there already"),
        (f"alice: {ALICE}\nbob: {ALICE}", "line 2: the token of 'bob' is that of 'alice'; each needs its own"),
        (b"alice: \xff\xfe" + b"x" * 20, "line 1: the token of 'alice' is no token"),
        ("#" * (1 << 20) + "\n", "has more than 1048576 bytes"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_a_sentence_that_shows_no_token(write, text, says):
    with pytest.raises(RefusedSettings, match=says) as refusal:
        read_tokens(write(text))
    assert str(refusal.value).startswith("token_file /")
    assert "0123456789" not in str(refusal.value)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o777])
def test_a_file_for_every_user_of_the_machine_is_refused(write, mode):
    with pytest.raises(RefusedSettings, match=rf"has mode {mode:03o}: every user of the machine has access"):
        read_tokens(write(f"alice: {ALICE}", mode))


def test_no_file_is_refused_and_names_the_node_as_the_place(tmp_path):
    with pytest.raises(RefusedSettings, match=r"cannot be read on this node \(No such file or directory\)"):
        Tokens(str(tmp_path / "none"))
    with pytest.raises(RefusedSettings, match="Is a directory"):
        Tokens(str(tmp_path))
    os.mkfifo(tmp_path / "pipe", 0o600)
    writer = os.open(tmp_path / "pipe", os.O_RDWR)  # or opening it to read would wait for one
    with pytest.raises(RefusedSettings, match="is no file"):
        Tokens(str(tmp_path / "pipe"))
    os.close(writer)


@pytest.fixture
def clock(monkeypatch):
    """Lets time pass: `clock(seconds)`."""
    passed, real = [0.0], time.monotonic
    monkeypatch.setattr(auth.time, "monotonic", lambda: real() + passed[0])

    def pass_time(seconds: float) -> None:
        passed[0] += seconds

    return pass_time


def test_tokens_come_and_go_with_the_file(write, clock):
    tokens = Tokens(write(f"alice: {ALICE}\n"))
    write(f"bob: {BOB}\n")
    clock(1.1)
    assert tokens.name_of(bearer(ALICE)) is None
    assert tokens.name_of(bearer(BOB)) == "bob"


def test_a_file_that_is_replaced_by_one_of_the_same_size_is_seen(write, clock, tmp_path):
    path = write(f"alice: {ALICE}\n")
    tokens = Tokens(path)
    before = os.stat(path)
    (tmp_path / "new").write_text(f"alice: {ALICE[::-1]}\n")
    (tmp_path / "new").chmod(0o600)
    os.utime(tmp_path / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "new").replace(path)
    clock(1.1)
    assert tokens.name_of(bearer(ALICE)) is None
    assert tokens.name_of(bearer(ALICE[::-1])) == "alice"


@pytest.mark.parametrize("broken", ["alice: short\n", "", None])
def test_a_file_that_breaks_leaves_the_tokens_of_before_and_says_so_once(write, clock, monkeypatch, broken, tmp_path):
    tokens = Tokens(write(f"alice: {ALICE}\n"))
    said: list[str] = []
    monkeypatch.setattr(auth.logger, "error", lambda line, *args: said.append(line % args))
    if broken is None:
        (tmp_path / "tokens").unlink()
    else:
        write(broken)
    for _ in range(3):
        clock(1.1)
        assert tokens.name_of(bearer(ALICE)) == "alice"
    (line,) = said
    assert line.startswith("the tokens of before stay: token_file /")
    write(f"bob: {BOB}\n")
    clock(1.1)
    assert tokens.name_of(bearer(BOB)) == "bob"


def test_every_token_is_compared_whole_whatever_was_given(write, monkeypatch):
    """That a token is found neither ends the comparisons, nor does one that differs at once."""
    tokens = Tokens(write(f"alice: {ALICE}\nbob: {BOB}\n"))
    compared = []
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda one, other: compared.append(one) or one == other)
    for headers in (bearer(ALICE), bearer(BOB), bearer("x"), [], basic("")):
        compared.clear()
        tokens.name_of(headers)
        assert len(compared) == 2
        assert {len(digest) for digest in compared} == {32}
