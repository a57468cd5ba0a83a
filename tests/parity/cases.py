"""The requests that are sent to both servers."""

import numpy as np

from tests.parity.conftest import LENGTH, MOST
from tests.text_teacher import VOCABULARY

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
SCORING, TOKENIZE, DETOKENIZE = "/generative_scoring", "/tokenize", "/detokenize"


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


def rows(count: int, width: int, seed: int = 1) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (count, width)).tolist()


def generate(tokens: list | None = None, fields: dict | None = None, **params) -> tuple[str, dict]:
    tokens = ids(30) if tokens is None else tokens
    params = {"max_tokens": 1, "temperature": 0.0, **params}
    return GENERATE, {"token_ids": tokens, "sampling_params": params, **(fields or {})}


def scored(**more) -> tuple[str, dict]:
    """`/inference/v1/generate` with two candidates for each of three rows."""
    fields = more.pop("fields", {})
    tokens = more.pop("tokens", [11, 12, 13, 14])
    candidates = more.pop("candidates", [[1, 2], [3, 4], [5, 6]])
    return generate(tokens, fields, prompt_logprob_token_ids=candidates, **more)


def complete(prompt=None, **fields) -> tuple[str, dict]:
    prompt = ids(30) if prompt is None else prompt
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 3, **fields}
    return COMPLETIONS, {name: value for name, value in body.items() if value is not ...}


def label(**fields) -> tuple[str, dict]:
    body = {"query": [11, 12, 13], "items": [[14], [15, 16]], "label_token_ids": [20, 21], **fields}
    return SCORING, {name: value for name, value in body.items() if value is not ...}


TEXT = "A teacher reads what a student wrote: naïve 🙂 façades, 12 rows."
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Yes or no?"}]

ANSWERED: dict[str, tuple[str, dict]] = {
    # ---- /inference/v1/generate
    "candidates of each row": scored(tokens=ids(40), candidates=rows(39, 7)),
    "candidates from a row on": scored(tokens=ids(40), candidates=rows(20, 7), prompt_logprob_start=19),
    "candidates of longer prompts than a block": scored(tokens=ids(200), candidates=rows(199, MOST)),
    "ragged candidates": scored(candidates=[[1, 2], [3], [5, -1]]),
    "a candidate twice": scored(candidates=[[1, 1], [3, 3], [5, 5]]),
    "start null": scored(prompt_logprob_start=None),
    **{f"prompt_logprobs={n}": generate(prompt_logprobs=n) for n in (0, 1, 5, MOST)},
    "prompt_logprobs of one token": generate([7], prompt_logprobs=4),
    "prompt_logprobs of two tokens": generate([7, 8], prompt_logprobs=4),
    "prompt_logprobs of a long prompt": generate(ids(LENGTH - 1, 3), prompt_logprobs=2),
    "prompt_logprobs and candidates": scored(prompt_logprobs=2),
    "prompt_logprobs and candidates from a row on": scored(
        candidates=[[1, 2], [3, 4]], prompt_logprob_start=1, prompt_logprobs=2
    ),
    "the ids back": generate(fields={"return_token_ids": True}, prompt_logprobs=0),
    "generate with a model": generate(fields={"model": "default"}, prompt_logprobs=0),
    "generate with an empty model": generate(fields={"model": ""}, prompt_logprobs=0),
    "generate with an unknown field": generate(fields={"unheard_of": 5, "output_mode": "tokens"}, prompt_logprobs=0),
    "generate with fields that change no score": scored(
        fields={"stream": False, "cache_salt": "abc", "priority": 3, "request_id": "r"},
        seed=5,
        ignore_eos=True,
        skip_special_tokens=False,
        detokenize=True,
        stop=[],
        logit_bias=None,
        n=1,
        unheard_of=1,
    ),
    # ---- /v1/completions
    "what TRL sends": (
        COMPLETIONS,
        {"model": "default", "prompt": ids(24), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 8},
    ),
    **{f"completions, prompt_logprobs={n}": complete(prompt_logprobs=n) for n in (0, 1, MOST)},
    "completions of a text": complete(TEXT),
    "completions of a text without special tokens": complete(TEXT, add_special_tokens=False),
    "completions of texts": complete([TEXT, "Yes", "naïve"]),
    "completions of lists of ids": complete([ids(5), ids(70, 1), [9]]),
    "completions of one id": complete([7]),
    "completions of the longest prompt": complete(ids(LENGTH - 1, 4)),
    "completions with ids": complete(return_token_ids=True),
    "completions with special tokens in the text": complete(skip_special_tokens=False),
    "completions with fields that change no score": complete(
        seed=1,
        user="me",
        n=1,
        stream=False,
        echo=False,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        frequency_penalty=0.0,
        presence_penalty=None,
        repetition_penalty=1.0,
        logit_bias=None,
        stop=None,
        stop_token_ids=[],
        bad_words=[],
        length_penalty=1.0,
        use_beam_search=False,
        min_tokens=0,
        ignore_eos=True,
        spaces_between_special_tokens=False,
        response_format={"type": "text"},
        session_id="s",
        return_token_offsets=False,
        stream_interval=4,
        cache_salt="abc",
        priority=2,
        request_id="r",
        unheard_of=5,
        model="",
    ),
    # ---- /generative_scoring
    "labels": label(),
    "true probabilities": label(apply_softmax=False),
    "items first": label(item_first=True),
    "labels twice": label(label_token_ids=[20, 21, 20]),
    "one label": label(label_token_ids=[20]),
    "as many labels as both take": label(label_token_ids=ids(MOST - 1, 8)),
    "labels of texts": label(query="Is it likely? ", items=["Yes", " naïve 🙂"]),
    "labels of texts, items first": label(query=" is likely", items=["Yes", "No"], item_first=True),
    "labels of texts without special tokens": label(query="Is it?", items=["Yes", "No"], add_special_tokens=False),
    "labels of a text and ids": label(query="Is it?", items=[[5], [6, 7]]),
    "labels of ids and texts": label(query=[5, 6], items=["Yes", "No"]),
    "labels of an empty item": label(items=[[]]),
    "labels of an empty query": label(query=[]),
    "labels with fields that change no score": label(
        cache_salt="abc", priority=1, request_id="r", unheard_of=5, model="default"
    ),
    # ---- /tokenize, /detokenize
    "tokenize": (TOKENIZE, {"prompt": TEXT}),
    "tokenize, token strings": (TOKENIZE, {"prompt": TEXT, "return_token_strs": True, "model": "default"}),
    "tokenize without special tokens": (TOKENIZE, {"prompt": TEXT, "add_special_tokens": False}),
    "tokenize nothing": (TOKENIZE, {"prompt": ""}),
    "tokenize more than the teacher takes": (TOKENIZE, {"prompt": TEXT * 40}),
    "tokenize special tokens": (TOKENIZE, {"prompt": "<s>Yes</s>", "add_special_tokens": False}),
    "tokenize a conversation": (TOKENIZE, {"messages": CHAT}),
    "tokenize a conversation that is to be continued": (
        TOKENIZE,
        {"messages": CHAT, "add_generation_prompt": False, "continue_final_message": True},
    ),
    "tokenize a conversation with template variables": (
        TOKENIZE,
        {"messages": CHAT, "chat_template_kwargs": {"shout": True, "unheard_of": 1}, "add_generation_prompt": False},
    ),
    "tokenize a conversation with special tokens": (TOKENIZE, {"messages": CHAT, "add_special_tokens": True}),
    "detokenize": (DETOKENIZE, {"tokens": ids(30, 9)}),
    "detokenize nothing": (DETOKENIZE, {"tokens": []}),
    "detokenize ids that nobody knows": (DETOKENIZE, {"tokens": [VOCABULARY - 1, 10**6, 40]}),
}

_TYPES = {"a number": 5, "a word": "x", "a list": [1], "an object": {"a": 1}, "a fraction": 1.5, "null": None}
"""Values that a field may have instead of its own."""


def _wrong(make, **fields) -> dict[str, tuple[str, dict]]:
    """Each field with values of other types than those it is said to take."""
    return {
        f"{make.__name__}: {name} {what}": make(**{name: value})
        for name, taken in fields.items()
        for what, value in _TYPES.items()
        if what not in taken.split(", ")
    }


REFUSED: dict[str, tuple[str, dict]] = {
    # ---- /inference/v1/generate
    "generate without token_ids": (GENERATE, {"sampling_params": {}}),
    "generate without sampling_params": (GENERATE, {"token_ids": [1]}),
    "no token_ids": scored(tokens=[]),
    "a negative token id": scored(tokens=[11, -2, 13, 14]),
    "a token id beyond the vocabulary": scored(tokens=[11, VOCABULARY, 13, 14]),
    "a fractional token id": scored(tokens=[11, 2.5, 13, 14]),
    "a prompt too long": scored(tokens=[1] * LENGTH, candidates=[[1]] * (LENGTH - 1)),
    "a prompt far too long": generate([1] * 4 * LENGTH, prompt_logprobs=0),
    "generate for an unknown model": scored(fields={"model": "nobody"}),
    "generate with a salt that is too long": scored(fields={"cache_salt": "x" * 129}),
    "generate with a salt with a slash": scored(fields={"cache_salt": "a/b"}),
    "generate with an empty salt": scored(fields={"cache_salt": ""}),
    "too many candidates": scored(candidates=[list(range(MOST + 1))] * 3),
    "too few rows": scored(candidates=[[1]] * 2),
    "too many rows": scored(candidates=[[1]] * 4),
    "a candidate beyond the vocabulary": scored(candidates=[[1, 2], [3, VOCABULARY], [5, 6]]),
    "a candidate of -2": scored(candidates=[[1, 2], [3, -2], [5, 6]]),
    "a candidate that is no id": scored(candidates=[[1, 2], ["3", 4], [5, 6]]),
    "a start below zero": scored(prompt_logprob_start=-1),
    "a start at the end": scored(candidates=[[1]], prompt_logprob_start=3),
    "a start without candidates": generate(prompt_logprobs=1, prompt_logprob_start=1),
    "more likeliest tokens than it gives": generate(prompt_logprobs=MOST + 1),
    "prompt_logprobs=-2": generate(prompt_logprobs=-2),
    "prompt_logprobs=-1": generate(prompt_logprobs=-1),
    "prompt_logprobs of a word": generate(prompt_logprobs="x"),
    "prompt_logprobs of a fraction": generate(prompt_logprobs=1.5),
    "generate with max_tokens 0": scored(max_tokens=0),
    "generate at temperature 3": scored(temperature=3),
    "generate with top_p 0": scored(top_p=0),
    "generate with min_p 2": scored(min_p=2),
    "generate with top_k -2": scored(top_k=-2),
    # ---- /v1/completions
    "completions without a prompt": complete(...),
    "completions of nothing": complete(""),
    "completions of null": (COMPLETIONS, {"prompt": None, "max_tokens": 1, "prompt_logprobs": 1}),
    "completions of a number": complete(5),
    "completions of an object": complete({"a": 1}),
    "completions of a mixed list": complete([1, "x"]),
    "completions of a negative id": complete([1, -2]),
    "completions of an id beyond the vocabulary": complete([1, VOCABULARY]),
    "completions of an empty list of ids": complete([[1], []]),
    "completions of an empty list": complete([]),
    "completions of a negative id in a list": complete([[1, 2], [1, -2]]),
    "completions of a fraction in a list": complete([[1, 2], [1, 2.5]]),
    "completions of an id beyond the vocabulary in a list": complete([[1, 2], [1, VOCABULARY]]),
    "completions of an id beyond int32": complete([1, 2**31]),
    "completions of ids and texts": complete([[1], "x"]),
    "completions of texts and a null": complete(["x", None]),
    "completions too long by one": complete([1] * LENGTH),
    "completions too long": complete([1] * (LENGTH + 1)),
    "completions of a text far too long": complete("x" * 100_000),
    "completions of too many prompts": complete([[1]] * 1025),
    "completions for an unknown model": complete(model="nobody"),
    "completions, prompt_logprobs=21": complete(prompt_logprobs=MOST + 1),
    "completions, prompt_logprobs=-1": complete(prompt_logprobs=-1),
    "completions, prompt_logprobs=-2": complete(prompt_logprobs=-2),
    "completions, prompt_logprobs of a word": complete(prompt_logprobs="x"),
    "completions with max_tokens 0": complete(max_tokens=0),
    "completions at temperature 3": complete(temperature=3),
    "completions with top_p 0": complete(top_p=0),
    "completions with min_p 2": complete(min_p=2),
    "completions with options of a stream": complete(stream_options={"include_usage": True}),
    "completions with a suffix": complete("x", suffix="y"),
    "completions with an empty salt": complete(cache_salt=""),
    "completions with a salt that is no text": complete(cache_salt=5),
    **_wrong(complete, model="a word, null", n="a number", seed="a number, null", temperature="a fraction, null"),
    **_wrong(complete, echo="null", add_special_tokens="", request_id="a word", max_tokens="a number, null"),
    # ---- /generative_scoring
    "labels without a query": label(query=...),
    "labels without items": label(items=...),
    "labels without labels": label(label_token_ids=...),
    "no items": label(items=[]),
    "no labels": label(label_token_ids=[]),
    "a label beyond the vocabulary": label(label_token_ids=[20, VOCABULARY]),
    "a label below zero": label(label_token_ids=[20, -1]),
    "a label that is no id": label(label_token_ids=["x"]),
    "a query that is no id": label(query=["x"]),
    "a query of an id beyond the vocabulary": label(query=[VOCABULARY]),
    "a query of a negative id": label(query=[-1]),
    "an item of a negative id": label(items=[[5], [-1]]),
    "nothing to score": label(query=[], items=[[]]),
    "an item of an id beyond int32": label(items=[[2**31]]),
    "a label beyond int32": label(label_token_ids=[2**31]),
    "items of texts and ids": label(items=["x", [1]]),
    "items of ids and texts": label(items=[[1], "x"]),
    "an item that is no id": label(items=[["x"]]),
    "a prompt of many unknown ids": label(query=[VOCABULARY] * 9),
    **_wrong(label, query="a word, a list", items="", label_token_ids="a list", item_first="", add_special_tokens=""),
    "labels for an unknown model": label(model="nobody"),
    "labels with a salt with a slash": label(cache_salt="a/b"),
    **_wrong(label, apply_softmax="", priority="a number", model="a word, null"),
    # ---- /tokenize, /detokenize
    "tokenize for an unknown model": (TOKENIZE, {"prompt": "x", "model": "nobody"}),
    "tokenize neither": (TOKENIZE, {}),
    "tokenize with a template": (TOKENIZE, {"messages": CHAT, "chat_template": "x"}),
    "tokenize a conversation that both ends and goes on": (
        TOKENIZE,
        {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
    ),
    "tokenize messages that are none": (TOKENIZE, {"messages": ["x"]}),
    "tokenize messages that are a number": (TOKENIZE, {"messages": 5}),
    "tokenize a number": (TOKENIZE, {"prompt": 5}),
    "tokenize with a flag that is none": (TOKENIZE, {"prompt": "x", "add_special_tokens": "maybe"}),
    "tokenize a conversation that ends and goes on by default": (
        TOKENIZE,
        {"messages": CHAT, "continue_final_message": True},
    ),
    "detokenize without tokens": (DETOKENIZE, {}),
    "detokenize a negative id": (DETOKENIZE, {"tokens": [1, -1]}),
    "detokenize a word": (DETOKENIZE, {"tokens": ["x"]}),
    "detokenize a text": (DETOKENIZE, {"tokens": "x"}),
    "detokenize what is no id at all": (DETOKENIZE, {"tokens": [2**63]}),
    "detokenize for an unknown model": (DETOKENIZE, {"tokens": [1], "model": "nobody"}),
}
