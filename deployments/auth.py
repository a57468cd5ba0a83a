"""Who may ask over HTTP: named tokens from a file, and the one that a request brings.

The file has a line `name: token` per token; empty lines and lines that begin with `#` are skipped. It is read where the
ingress runs, so it lies at the same path on every node, as a model does: what travels through Ray and stands in Serve's
status is the path. It is looked at again while the service runs, so a token is added or withdrawn by changing the file.

A request brings a token as `Authorization: Bearer TOKEN`, or as the password of HTTP Basic, with any user name: clients
that can set no header put it into the URL (`https://any:TOKEN@host`). Nothing here ever says or logs a token.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence

from scoring.errors import RefusedSettings

logger = logging.getLogger("ray.serve")

CHALLENGE = 'Bearer realm="teacher-scoring", Basic realm="teacher-scoring"'
"""What a 401 says in WWW-Authenticate: both ways in which a token may come."""

SHORTEST_TOKEN = 16
_LOOK_S = 1.0
_LARGEST_FILE = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # what RFC 6750 lets a bearer token be


class Tokens:
    """The tokens of a file, by name.

    A file that changes is read again within a second. One that cannot be read then, or holds a mistake, changes
    nothing: the tokens of before stay, and the log says why.

    Args:
        path: the file.

    Raises:
        RefusedSettings: it cannot be read, others than its owner and group can read or write it, or a line is wrong.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp = _stamp(path)
        self._names = read_tokens(path)
        self._looked = time.monotonic()

    def name_of(self, authorization: Sequence[bytes]) -> str | None:
        """The name of the token in a request's Authorization headers; None unless there is one header with a known one.

        The time this takes says nothing of how much of a token was right, nor of which it was.
        """
        self._look()
        given = _digest(_presented(authorization[0]) if len(authorization) == 1 else b"")
        found = None
        for digest, name in self._names.items():
            if hmac.compare_digest(digest, given):
                found = name
        return found

    def _look(self) -> None:
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._names = read_tokens(self._path)
        except RefusedSettings as error:
            logger.error("the tokens of before stay: %s", error)
        else:
            logger.info("the tokens were read again: %s", ", ".join(self._names.values()))


def read_tokens(path: str) -> Mapping[bytes, str]:
    """The names of the tokens in a file, by the tokens' digests.

    Raises:
        RefusedSettings: see `Tokens`.
    """

    def refused(what: str) -> RefusedSettings:
        return RefusedSettings(f"token_file {path}: {what}")

    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_LARGEST_FILE + 1) if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise refused(f"cannot be read on this node ({error.strerror}); it must be there on every node") from None
    if not stat.S_ISREG(mode):
        raise refused("is no file")
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise refused(f"has mode {stat.S_IMODE(mode):03o}: every user of the machine has access (chmod o= ends that)")
    if len(data) > _LARGEST_FILE:
        raise refused(f"has more than {_LARGEST_FILE} bytes")
    names: dict[bytes, str] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        text = line.decode("utf-8", "replace").strip()
        if not text or text.startswith("#"):
            continue
        name, _, token = (part.strip() for part in text.partition(":"))
        # Never what stands there: it may be a token.
        if not _NAME.fullmatch(name) or not token:
            raise refused(
                f"line {number} is not `name: token`, with a name of up to 64 letters, digits, dots, underscores and "
                "hyphens"
            )
        if not _TOKEN.fullmatch(token) or len(token) < SHORTEST_TOKEN:
            raise refused(
                f"line {number}: the token of {name!r} is no token; allowed are {SHORTEST_TOKEN} or more letters, "
                "digits and -._~+/, with = at the end (`openssl rand -hex 32` makes a good one)"
            )
        digest = _digest(token.encode())
        if digest in names:
            raise refused(f"line {number}: the token of {name!r} is that of {names[digest]!r}; each needs its own")
        if name in names.values():
            raise refused(f"line {number}: the name {name!r} is there already")
        names[digest] = name
    if not names:
        raise refused("holds no token; a line is `name: token`")
    return names


def _presented(header: bytes) -> bytes:
    """The token in an Authorization header; empty where there is none."""
    scheme, _, value = header.partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            pass
    return b""


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _stamp(path: str) -> tuple[int, ...] | None:
    """Changes when the file does; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
