"""How the service is reached: its address, the token, and whom to trust."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from scoring.cli.ending import WrongInput


@dataclass(frozen=True)
class Connection:
    """The address and secrets of a service.

    Raises:
        WrongInput: it is no address.
    """

    url: str
    token: str | None
    tls: ssl.SSLContext | None

    def __post_init__(self) -> None:
        # A token may stand in front of the @, and what httpx says of a URL may hold some of it.
        no_address = WrongInput(f"{self.url.rpartition('@')[2]!r} is no address; one is like http://127.0.0.1:8000")
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL:
            raise no_address from None
        if url.scheme not in ("http", "https") or not url.host:
            raise no_address
        if url.userinfo and self.token is not None:
            raise WrongInput("a token is given twice: in --token-file and in the URL")

    @classmethod
    def of(cls, url: str, token_file: Path | None, ca_file: Path | None) -> Connection:
        """Reads the files.

        Raises:
            WrongInput: one cannot be read, or holds something else.
        """
        token, tls = None, None
        if token_file is not None:
            try:
                token = token_file.read_text(encoding="ascii").strip()
            except (OSError, ValueError) as error:
                raise WrongInput(f"--token-file {token_file}: {error}") from None
            if not token or token.split() != [token]:
                raise WrongInput(f"--token-file {token_file}: holds one token and nothing else")
        if ca_file is not None:
            try:
                tls = ssl.create_default_context(cafile=ca_file)
            except (OSError, ssl.SSLError) as error:
                raise WrongInput(f"--ca-file {ca_file}: {error}") from None
        return cls(url, token, tls)

    def client(self, client: Any, **options: Any) -> Any:
        """A client of a class of `scoring.http_client`. Use it in a `with` block."""
        return client(self.url, token=self.token, tls=self.tls, **options)
