"""`POST /v1/completions` for one token and the `prompt_logprobs` of the prompts: how TRL's asynchronous distillation
asks its teachers.

Beside what all routes here have in common:
- `max_tokens` left out means 1 here, and 16 there.
- The token is the likeliest one, whatever the temperature.
- `echo`, `logprobs` and everything else that asks for more is refused by name; so are a few fields that belong to other
  routes or older versions of vLLM, which that drops without a word.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from deployments.http_door import JSON, beside_the_loop, trace_headers
from deployments.vllm_http import dialect, prompt_logprobs
from deployments.vllm_http.described import IDS, described
from deployments.vllm_http.dialect import FLAG, LIST, NUMBER, OBJECT, TEXT, WHOLE, Refusal, malformed, or_null
from deployments.vllm_http.served import Served
from scoring.errors import InvalidRead, UnknownTeacher
from scoring.scores import MatrixScores
from scoring.tokenizer import Tokenizer

_MOST_PROMPTS = 1024  # vLLM's VLLM_MAX_COMPLETION_PROMPTS


def add(routes: APIRouter, served: Served) -> None:
    @routes.post("/v1/completions", openapi_extra=_DESCRIPTION)
    async def completions(request: Request) -> Response:
        """vLLM's completions, for requests with `prompt_logprobs` and `max_tokens` of 1."""
        asked = await dialect.read_request(request, served.limits, _parse)
        teacher = await served.teacher(request, asked.model)
        info = await served.info(teacher)
        tokenizer = await (served.tokenizer(info) if asked.texts else served.tokenizer_if_any(info))
        prompts = asked.prompts
        if asked.texts:
            prompts = await dialect.tokenise(
                served.limits, _encode, asked.texts, tokenizer, asked.add_special_tokens, info
            )
        _check_lengths(prompts, info["max_length"])
        tokens = sum(map(len, prompts))
        prompt_logprobs.check_size(tokens, asked.count, served.limits)
        reads = [prompt_logprobs.read_of(ids, asked.count, teacher=teacher, priority=asked.priority) for ids in prompts]
        try:
            scores, following = await prompt_logprobs.ask(served.router(), reads, trace_headers(request))
        except InvalidRead as error:
            raise _in_their_words(error) from error
        request_id = asked.request_id or request.headers.get("x-request-id") or uuid.uuid4().hex[:16]
        size = prompt_logprobs.json_bytes(tokens, asked.count)
        return await beside_the_loop(size, _answer, asked, prompts, scores, following, request_id, tokenizer)


def _encode(texts: list[str], tokenizer: Tokenizer, add_special_tokens: bool, info: Mapping[str, Any]) -> list:
    """int32 [T] of each text."""
    most = info["max_length"] * tokenizer.most_characters
    for text in texts:
        if len(text) > most:
            raise Refusal(
                f"This model's maximum context length is {info['max_length']} tokens. However, your prompt contains "
                f"{len(text)} characters (more than {most}, which so many tokens have at most). Please reduce the "
                "length of the input prompt.",
                "input_text",
            )
    prompts = [np.array(tokenizer.encode(text, add_special_tokens), dtype=np.int32) for text in texts]
    if not all(map(len, prompts)):
        raise Refusal("a prompt has no tokens; at least one is needed")
    return prompts


def _check_lengths(prompts: list[np.ndarray], most: int) -> None:
    """Refuse a prompt that leaves no room for the token that the engine always makes."""
    for ids in prompts:
        if len(ids) >= most:
            raise Refusal(
                f"This model's maximum context length is {most} tokens. However, your prompt contains {len(ids)} "
                f"input tokens, and 1 is always made: {len(ids)}+1 > {most}. Please reduce the length of the input "
                "prompt.",
                "input_tokens" if len(ids) > most else "max_tokens",
            )


def _in_their_words(error: InvalidRead) -> Exception:
    """What a teacher refused of a read, said of the fields the caller knows."""
    if isinstance(error, UnknownTeacher) or not error.field:
        return error
    name, _, index = error.field.partition("[")
    if name == "top_k":
        return Refusal(f"prompt_logprobs {error.message}", "prompt_logprobs")
    place = int(index[:-1] or 0) + (name == "response_ids") if index else None
    return Refusal(f"prompt {error.read or 0}{'' if place is None else f'[{place}]'} {error.message}")


@dataclass(frozen=True)
class _Asked:
    """What is left of a request that passed. One of `texts` and `prompts` is empty."""

    texts: list[str]
    prompts: list[np.ndarray]  # int32 [T] each
    count: int
    add_special_tokens: bool
    skip_special_tokens: bool
    ignore_eos: bool
    with_stop: bool  # the text of a token that ends it is part of the answer
    return_token_ids: bool
    model: str | None
    priority: int
    request_id: str | None


def _parse(body: Mapping[str, Any]) -> _Asked:
    """
    Raises:
        Refusal: as vLLM does, or for a field that would change the answer.
    """
    dialect.check_common({"cache_salt": body.get("cache_salt")})
    prompt_logprobs.check_count(body.get("prompt_logprobs"))
    if body.get("prompt") in (None, "") and not body.get("prompt_embeds"):
        raise Refusal("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    dialect.check_types(body, _TYPES)
    dialect.check_common({"priority": body.get("priority", 0)})
    texts, prompts = _prompts(body["prompt"]) if "prompt" in body else ([], [])
    dialect.refuse_more(body, _NEUTRAL)
    dialect.check_sampling({name: value for name, value in body.items() if value is not None}, "body.{}")
    for name in _DROPPED & body.keys():
        raise Refusal(f"{name} is no field of this route, and vLLM drops it without a word: leave it out", name)
    if (count := body.get("prompt_logprobs")) is None:
        raise Refusal(
            "prompt_logprobs is missing: this service answers log-probabilities of the prompt, and generates no text",
            "prompt_logprobs",
        )
    return _Asked(
        texts=texts,
        prompts=prompts,
        count=count,
        add_special_tokens=body.get("add_special_tokens", True),
        skip_special_tokens=body.get("skip_special_tokens", True),
        ignore_eos=body.get("ignore_eos", False),
        with_stop=body.get("include_stop_str_in_output", False),
        return_token_ids=bool(body.get("return_token_ids")),
        model=body.get("model") or None,
        priority=body.get("priority", 0),
        request_id=body.get("request_id"),
    )


def _prompts(value: Any) -> tuple[list[str], list[np.ndarray]]:
    """The texts, or the ids, of a prompt or of several. `param` of a wrong one is its first item, as it is there, where
    a list is tried as ids first."""
    if isinstance(value, str):
        return [value], []
    if not isinstance(value, list):
        raise malformed(f"prompt is {short(value)}; it is a text, a list of ids, or a list of either", "body.prompt")
    if not value:
        raise Refusal("prompt is an empty list; at least one id or text is needed")
    if dialect.first_no_integer(value) is None:
        return [], [_ids(value, "prompt", "body.prompt.{}")]
    if len(value) > _MOST_PROMPTS:
        raise Refusal(
            f"prompt list length {len(value)} exceeds the maximum allowed count of {_MOST_PROMPTS}.", "prompt"
        )
    if set(map(type, value)) == {str}:
        return value, []
    if set(map(type, value)) == {list}:
        return [], [_ids(ids, f"prompt[{i}]", "body.prompt.0") for i, ids in enumerate(value)]
    wrong = dialect.first_no_integer(value)
    raise malformed(f"prompt[{wrong}] is {short(value[wrong])}; all are texts, or all ids", f"body.prompt.{wrong}")


def _ids(value: list, name: str, param: str) -> np.ndarray:
    """int32 [T] of a prompt."""
    wrong = dialect.first_no_integer(value)
    if wrong is None:
        wrong = next((i for i, x in enumerate(value) if x < 0), None)
    if wrong is not None:
        raise malformed(f"{name}[{wrong}] is {short(value[wrong])}; ids are integers from 0", param.format(wrong))
    if not value:
        raise Refusal(f"{name} is empty; a prompt has at least one token")
    return dialect.token_ids(value, name)


_TYPES: dict[str, dialect.Types] = {
    **dict.fromkeys(("request_id", "mm_payload"), TEXT),
    **dict.fromkeys(("model", "suffix", "user", "session_id", "truncation_side"), or_null(TEXT)),
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output", "ignore_eos", "add_special_tokens"), FLAG),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), FLAG),
    **dict.fromkeys(("echo", "stream", "watermarking", "return_token_ids", "return_token_offsets"), or_null(FLAG)),
    **dict.fromkeys(("return_tokens_as_token_ids", "return_mm_kwargs"), or_null(FLAG)),
    **dict.fromkeys(("n", "min_tokens", "priority", "routed_experts_prompt_start"), WHOLE),
    **dict.fromkeys(("max_tokens", "seed", "top_k", "stream_interval", "truncate_prompt_tokens"), or_null(WHOLE)),
    **dict.fromkeys(("logprobs", "thinking_token_budget"), or_null(WHOLE)),
    "length_penalty": NUMBER,
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), or_null(NUMBER)),
    **dict.fromkeys(("temperature", "top_p", "min_p"), or_null(NUMBER)),
    "bad_words": LIST,
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids", "logprob_token_ids"), or_null(LIST)),
    **dict.fromkeys(("logit_bias", "structured_outputs", "response_format", "stream_options"), or_null(OBJECT)),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "vllm_xargs"), or_null(OBJECT)),
    "repetition_detection": or_null(OBJECT),
}

# Fields that change the answer, or ask for more of it: the values that ask for nothing.
_NEUTRAL: dict[str, tuple] = {
    "max_tokens": (1, None),
    "min_tokens": (0,),
    "n": (1,),
    "echo": (None, False),
    "logprobs": (None,),
    "stream": (None, False),
    "stream_options": (None,),
    "suffix": (None,),
    "stop": (None, []),
    "stop_token_ids": (None, []),
    "bad_words": ([],),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "logprob_token_ids": (None, []),
    "truncate_prompt_tokens": (None,),
    "truncation_side": (None,),
    "prompt_embeds": (None, []),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "kv_transfer_params": (None, {}),
    "ec_transfer_params": (None, {}),
    "vllm_xargs": (None, {}),
    "repetition_detection": (None,),
    "thinking_token_budget": (None, -1),
    "watermarking": (None, False),
    "routed_experts_prompt_start": (0,),
}

# Fields of other routes, and of older versions, that ask for something.
_DROPPED = {
    *("prompt_logprob_token_ids", "prompt_logprob_start", "best_of"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
}


def _answer(
    asked: _Asked,
    prompts: list[np.ndarray],
    scores: MatrixScores,
    following: list[int],
    request_id: str,
    tokenizer: Tokenizer | None,
) -> Response:
    """vLLM's answer, with every field it writes."""
    tokens = sum(map(len, prompts))
    metas = [score.meta for score in scores]
    document = {
        "id": f"cmpl-{request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": metas[0].teacher,
        "service_tier": None,
        "system_fingerprint": f"{metas[0].engine.replace(' ', '-')}-{metas[0].checkpoint}",
        "usage": {
            "prompt_tokens": tokens,
            "total_tokens": tokens + len(prompts),
            "completion_tokens": len(prompts),
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }
    choices = []
    for i, (ids, score, token) in enumerate(zip(prompts, scores, following, strict=True)):
        choice = {"index": i, "logprobs": None, "routed_experts": None, **_ending(asked, ids, token, tokenizer)}
        choice["token_ids"] = [token] if asked.return_token_ids else None
        choice["prompt_token_ids"] = ids.tolist() if asked.return_token_ids else None
        written = prompt_logprobs.as_json(score, ids, tokenizer)
        choices.append(dialect.written(choice, prompt_logprobs=written))
    return Response(dialect.written(document, choices=f"[{', '.join(choices)}]"), media_type=JSON)


def _ending(asked: _Asked, ids: np.ndarray, token: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What the one token says, and why no other follows. A token that ends the text says nothing."""
    if tokenizer is None:
        return {"text": "", "finish_reason": "length", "stop_reason": None}
    ends = not asked.ignore_eos and (token == tokenizer.eos_id or token in tokenizer.stop_ids)
    text = ""
    if not ends or asked.with_stop:
        text = tokenizer.next_text(ids.tolist(), token, asked.skip_special_tokens)
    reason = token if ends and token != tokenizer.eos_id else None
    return {"text": text, "finish_reason": "stop" if ends else "length", "stop_reason": reason}


_DESCRIPTION = described(
    required=["prompt", "prompt_logprobs"],
    properties={
        "prompt": {
            "anyOf": [
                {"type": "string", "minLength": 1},
                IDS,
                {"type": "array", "items": IDS, "minItems": 1, "maxItems": _MOST_PROMPTS},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": _MOST_PROMPTS},
            ]
        },
        "prompt_logprobs": {"type": "integer", "minimum": 0, "maximum": prompt_logprobs.MOST},
        "max_tokens": {"const": 1, "default": 1},
        "model": {"type": ["string", "null"], "description": "a teacher"},
        "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 2, "description": "changes no score"},
        "add_special_tokens": {"type": "boolean", "default": True, "description": "around a text"},
        "return_token_ids": {"type": ["boolean", "null"]},
    },
    example={"prompt": [1, 2, 3, 4], "max_tokens": 1, "prompt_logprobs": 2},
)
