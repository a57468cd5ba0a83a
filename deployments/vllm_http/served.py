"""Which teacher answers a request of vLLM's, and with which tokenizer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from deployments.router import Router
from deployments.shared import Shared
from deployments.vllm_http.dialect import not_served
from scoring.errors import NoTokenizer, TeacherUnavailable
from scoring.limits import BatchLimits
from scoring.tokenizer import Tokenizer

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Served:
    """What the routes answer with.

    Attributes:
        router: gives the Router; called once a request, in the event loop that serves it.
        limits: what one request may hold.
    """

    router: Callable[[], Router]
    limits: BatchLimits
    # By folder; one that could not be loaded is not tried again before the ingress starts anew.
    _tokenizers: dict[str, Shared | Tokenizer | NoTokenizer] = field(default_factory=dict)

    async def teacher(self, request: Request, model: str | None) -> str | None:
        """The teacher that answers; None is the default one.

        Under `/teachers/{name}/` it is that one, or an adapter of it that `model` names; otherwise the teacher of that
        name, or the first whose checkpoint it is.

        Raises:
            Refusal: vLLM's 404.
        """
        name = request.path_params.get("teacher")
        if name is None and not model:
            return None
        router = self.router()
        served = await router.served_by()
        if name is not None and name not in served:
            raise not_served(f"The teacher `{name}` does not exist. Valid names: {', '.join(served)}.", None)
        if name is not None and model in (None, "", name):
            return name
        if name is None and model in served:
            return model
        known = await self.models(request)
        if model in known:
            return model
        for other, info in known.items():
            if model in (info.get("adapter"), info.get("model")):
                return other
        raise not_served(f"The model `{model}` does not exist. Valid aliases: {', '.join(known)}.")

    async def models(self, request: Request) -> dict[str, dict[str, Any]]:
        """What there is to say of each teacher that a server at this path would serve: of all; or of the one that the
        path names, first, and of its adapters."""
        known = await self.router().teachers()
        name = request.path_params.get("teacher")
        if name is None:
            return known
        if name not in known:
            raise not_served(f"The teacher `{name}` does not exist. Valid names: {', '.join(known)}.", None)
        return {name: known[name]} | {other: info for other, info in known.items() if info.get("base") == name}

    async def info(self, teacher: str | None) -> dict[str, Any]:
        """What there is to say of one teacher.

        Raises:
            Refusal: there is none of that name.
            TeacherUnavailable: none of its replicas answers.
        """
        known = await self.router().teachers()
        for name, info in known.items():
            if name == teacher or (teacher is None and info.get("default")):
                if not info["replicas"]:
                    raise TeacherUnavailable(f"no replica of teacher {name!r} answers")
                return info
        raise not_served(f"The model `{teacher}` does not exist. Valid aliases: {', '.join(known)}.")

    async def tokenizer(self, info: dict[str, Any]) -> Tokenizer:
        """The tokenizer of a teacher's checkpoint, loaded when it is asked for first, from the folder that the
        teacher's replicas have it from.

        Raises:
            NoTokenizer: the checkpoint has none, or this machine does not have that folder.
        """
        if info.get("tokenizer") is None:
            raise NoTokenizer(f"the checkpoint of teacher {info['teacher']!r} has no tokenizer: send ids")
        path = info["model"]
        found = self._tokenizers.setdefault(path, Shared(lambda: asyncio.to_thread(_loaded, path)))
        if isinstance(found, Shared):
            found = self._tokenizers[path] = await found.result()
        if isinstance(found, NoTokenizer):
            raise found.at(None)
        if found.hash != info["tokenizer"]:
            raise NoTokenizer("the machine of the HTTP ingress has another tokenizer than the teacher's: send ids")
        return found

    async def tokenizer_if_any(self, info: dict[str, Any]) -> Tokenizer | None:
        try:
            return await self.tokenizer(info)
        except NoTokenizer:
            return None


def _loaded(path: str) -> Tokenizer | NoTokenizer:
    try:
        return Tokenizer(path)
    except NoTokenizer as error:
        logger.warning("text is not tokenised: %s %s", error, error.details)
        return error
