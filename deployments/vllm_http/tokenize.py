"""`POST /tokenize`, of a text or a conversation, and `/detokenize`.

Beside what all routes here have in common:
- A conversation is of messages with a role and a text each: no parts of contents, no media, no tools.
- The chat template is the checkpoint's. Other conversations than it takes are refused, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

from fastapi import APIRouter, Request, Response

from deployments.http_door import JSON, beside_the_loop
from deployments.vllm_http import dialect
from deployments.vllm_http.described import IDS, described
from deployments.vllm_http.dialect import FLAG, LIST, OBJECT, TEXT, Refusal, malformed, or_null
from deployments.vllm_http.served import Served
from scoring.tokenizer import Tokenizer


def add(routes: APIRouter, served: Served) -> None:
    @routes.post("/tokenize", openapi_extra=_TOKENIZE)
    async def tokenize(request: Request) -> Response:
        """The ids of a text, or of a conversation (`messages`) as the checkpoint's chat template writes it."""
        asked = await dialect.read_request(request, served.limits, _parse_text)
        info = await served.info(await served.teacher(request, asked.model))
        tokenizer = await served.tokenizer(info)
        content = await dialect.tokenise(served.limits, _tokenized, asked.texts, asked, tokenizer, info["max_length"])
        return Response(content, media_type=JSON)

    @routes.post("/detokenize", openapi_extra=_DETOKENIZE)
    async def detokenize(request: Request) -> Response:
        """The text of ids."""
        tokens, model = await dialect.read_request(request, served.limits, _parse_ids)
        info = await served.info(await served.teacher(request, model))
        tokenizer = await served.tokenizer(info)
        if len(tokens) > served.limits.max_batch_tokens:
            raise served.limits.exceeded("max_batch_tokens", len(tokens))
        content = await beside_the_loop(64 * len(tokens), _detokenized, tokens, tokenizer)
        return Response(content, media_type=JSON)


@dataclass(frozen=True)
class _Asked:
    """What is left of a request that passed: one text, or the texts of messages."""

    texts: list[str]
    roles: list[str] | None
    add_special_tokens: bool
    return_token_strs: bool
    model: str | None
    template: dict[str, Any] = field(default_factory=dict)


def _parse_text(body: Mapping[str, Any]) -> _Asked:
    """
    Raises:
        Refusal: as vLLM does, or for a field that is not taken here.
    """
    chat = "messages" in body and "prompt" not in body
    if not chat:
        dialect.require(body, "prompt")
    dialect.check_types(body, _TYPES)
    if chat:
        dialect.check_types(body, _CHAT_TYPES, _NO_PROMPT)
    else:
        dialect.check_types(body, {"prompt": TEXT})
    common = {"return_token_strs": bool(body.get("return_token_strs")), "model": body.get("model") or None}
    if not chat:
        return _Asked([body["prompt"]], None, body.get("add_special_tokens", True), **common)
    if body.get("chat_template") is not None:
        raise Refusal("chat_template is given; the template is the checkpoint's")
    prompted, continued = body.get("add_generation_prompt", True), body.get("continue_final_message", False)
    if continued and body.get("add_generation_prompt"):
        raise Refusal("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    dialect.refuse_more(body, _NEUTRAL)
    template = body.get("chat_template_kwargs") or {}
    for name in _ARGUMENTS & template.keys():
        raise Refusal(
            f"chat_template_kwargs holds {name!r}, which is no variable of a template", "chat_template_kwargs"
        )
    roles, texts = _messages(body["messages"])
    template = template | {"add_generation_prompt": prompted, "continue_final_message": continued}
    return _Asked(texts, roles, body.get("add_special_tokens", False), **common, template=template)


def _messages(messages: list) -> tuple[list[str], list[str]]:
    """The roles and the texts of a conversation."""
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise malformed(f"messages[{i}] is {short(message)}; a message is an object", _NO_PROMPT)
        if not isinstance(message.get("role"), str) or message["role"] == "developer":
            raise Refusal(f"messages[{i}].role is {short(message.get('role'))}; allowed are roles of the template")
        if not isinstance(message.get("content"), str):
            raise Refusal(f"messages[{i}].content is {short(message.get('content'))}; it is a string here")
        for name in message.keys() - {"role", "content"}:
            raise Refusal(f"messages[{i}].{name} is not taken here; a message has a role and a content")
    return [message["role"] for message in messages], [message["content"] for message in messages]


_NO_PROMPT = "body.prompt"  # the `param` of a malformed conversation: there it is no text first of all
_TYPES: dict[str, dialect.Types] = {
    "model": or_null(TEXT),
    "add_special_tokens": FLAG,
    "return_token_strs": or_null(FLAG),
}
_CHAT_TYPES: dict[str, dialect.Types] = {
    "messages": LIST,
    "add_generation_prompt": FLAG,
    "continue_final_message": FLAG,
    "chat_template_kwargs": or_null(OBJECT),
}
_NEUTRAL: dict[str, tuple] = {
    "tools": (None, []),
    "media_io_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
}

# Arguments by which a template is applied, here and by Transformers; the others are the template's own variables.
_ARGUMENTS = {
    *("self", "messages"),
    *("conversation", "tools", "documents", "chat_template", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}


def _tokenized(texts: list[str], asked: _Asked, tokenizer: Tokenizer, max_length: int) -> str:
    (text,) = texts if asked.roles is None else (_conversation(asked, tokenizer),)
    ids = tokenizer.encode(text, asked.add_special_tokens)
    strings = tokenizer.token_strings(ids) if asked.return_token_strs else None
    return dialect.written({"count": len(ids), "max_model_len": max_length, "tokens": ids, "token_strs": strings})


def _conversation(asked: _Asked, tokenizer: Tokenizer) -> str:
    messages = [{"role": role, "content": text} for role, text in zip(asked.roles, asked.texts, strict=True)]
    try:
        return tokenizer.chat(messages, **asked.template)
    except ValueError as error:
        raise Refusal(str(error)) from error


def _parse_ids(body: Mapping[str, Any]) -> tuple[list[int], str | None]:
    """The ids to write as text, and the model."""
    dialect.require(body, "tokens")
    dialect.check_types(body, {"model": or_null(TEXT), "tokens": LIST})
    tokens = body["tokens"]
    wrong = dialect.first_no_integer(tokens)
    if wrong is None:
        wrong = next((i for i, token in enumerate(tokens) if not 0 <= token < 2**32), None)
    if wrong is not None:
        raise malformed(f"tokens[{wrong}] is {short(tokens[wrong])}; ids are integers from 0", f"body.tokens.{wrong}")
    return tokens, body.get("model") or None


def _detokenized(tokens: list[int], tokenizer: Tokenizer) -> str:
    return dialect.written({"prompt": tokenizer.decode(tokens)})


_TOKENIZE = described(
    required=[],
    properties={
        "prompt": {"type": "string"},
        "messages": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"type": "string"}, "content": {"type": "string"}},
            },
        },
        "add_special_tokens": {"type": "boolean", "description": "true of a prompt, false of messages"},
        "add_generation_prompt": {"type": "boolean", "default": True},
        "continue_final_message": {"type": "boolean", "default": False},
        "return_token_strs": {"type": ["boolean", "null"], "default": False},
        "model": {"type": ["string", "null"], "description": "a teacher"},
    },
    example={"prompt": "Hello, teacher"},
)
_DETOKENIZE = described(
    required=["tokens"],
    properties={"tokens": IDS | {"minItems": 0}, "model": {"type": ["string", "null"]}},
    example={"tokens": [1, 2, 3]},
)
