"""What is different from vLLM's server on purpose, and why. The tests hold every entry to both servers.

Beside these, of all routes: a request's own `request_id` comes before the X-Request-Id header, since Serve gives every
request that header; values must have the type of their field, where vLLM takes `2.0`, `"2"` or `true` for 2; a
`cache_salt` is checked and has no effect, and so the headers X-Vllm-Priority, X-Session-ID and X-data-parallel-rank; a
deadline that passed is a 504; and the one token is the likeliest, whatever the temperature.
"""

from tests.parity.cases import CHAT, GENERATE, TOKENIZE, complete, generate, ids, label, scored
from tests.parity.conftest import LENGTH, MOST

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]

REFUSED_HERE: dict[str, tuple[tuple[str, dict], str | None]] = {
    # A stream has nothing to bring piece by piece: the scores are all there when the prefill is.
    "generate, a stream": (generate(fields={"stream": True}, prompt_logprobs=0), None),
    "completions, a stream": (complete(stream=True, prompt_logprobs=0), "stream"),
    # Reads make one token, and its text would be a generation.
    "generate, no scores asked for": (generate(), "prompt_logprob_token_ids"),
    "completions, no scores asked for": (complete(prompt_logprobs=None), "prompt_logprobs"),
    "generate, two tokens": (scored(max_tokens=2), "max_tokens"),
    "completions, two tokens": (complete(max_tokens=2), "max_tokens"),
    "generate, text": (generate(fields={"output_mode": "text"}, prompt_logprobs=0), None),
    "generate, two choices": (scored(n=2, temperature=1.0), "n"),
    "completions, two choices": (complete(n=2, temperature=1.0), "n"),
    "completions, a beam": (complete(use_beam_search=True), "use_beam_search"),
    # The token's own log-probability is of the row after the last one read. A label read has it.
    "generate, logprobs of the token": (scored(logprobs=2), "logprobs"),
    "completions, logprobs of the token": (complete(logprobs=2), "logprobs"),
    "generate, labels": (scored(logprob_token_ids=[5, 6]), "logprob_token_ids"),
    "completions, labels": (complete(logprobs=2, logprob_token_ids=[5, 6]), "logprobs"),
    "completions, an echo": (complete(echo=True), "echo"),
    # They choose another token, or its end, or move it by what is not scored.
    "generate, a stop text": (scored(stop=["x"]), "stop"),
    "completions, a stop text": (complete(stop="x"), "stop"),
    "generate, a stop id": (scored(stop_token_ids=[5]), "stop_token_ids"),
    "completions, a stop id": (complete(stop_token_ids=[5]), "stop_token_ids"),
    "generate, repetitions": (
        scored(repetition_detection={"max_pattern_size": 4, "min_count": 2}),
        "repetition_detection",
    ),
    "generate, arguments of a plugin": (scored(extra_args={"a": 1}), "extra_args"),
    "completions, arguments of a plugin": (complete(vllm_xargs={"a": 1}), "vllm_xargs"),
    "completions, a JSON": (complete(length_penalty=0.5), "length_penalty"),
    # A prompt that is cut off has other scores than the one that was sent.
    "completions, a prompt cut off": (complete(truncate_prompt_tokens=5), "truncate_prompt_tokens"),
    "labels, a prompt cut off": (label(items=[[1] * LENGTH]), None),
    # vLLM drops them without a word.
    "completions, candidates": (complete([1, 2], prompt_logprob_token_ids=[[5]]), "prompt_logprob_token_ids"),
    "completions, an old grammar": (complete(guided_regex="a"), "guided_regex"),
    # Turning these into the template's variables is vLLM's own code.
    "tokenize, contents of parts": (
        (TOKENIZE, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
        None,
    ),
    "tokenize, another field of a message": (
        (TOKENIZE, {"messages": [{"role": "user", "content": "x", "name": "me"}]}),
        None,
    ),
    "tokenize, a role that templates rarely have": (
        (TOKENIZE, {"messages": [{"role": "developer", "content": "x"}]}),
        None,
    ),
    "tokenize, tools": ((TOKENIZE, {"messages": CHAT, "tools": TOOLS}), "tools"),
}
"""Requests that vLLM answers and this service refuses, with the `param` of the refusal. vLLM's server cannot be asked
on a CPU for penalties, biases and grammars, which have no kernels there: their refusals are in `tests/test_vllm_*.py`.
"""

ELSEWHERE: dict[str, tuple[tuple[str, dict], tuple[int, int]]] = {
    # There what is left out means many tokens; here there is one.
    "generate, max_tokens left out": (
        (GENERATE, {"token_ids": ids(9), "sampling_params": {"prompt_logprobs": 0, "temperature": 0}}),
        (200, 200),
    ),
    "completions, max_tokens left out": (complete(max_tokens=...), (200, 200)),
    # Older versions of vLLM took one list of candidates for all rows.
    "generate, candidates for all rows": (scored(candidates=[1, 2]), (400, 200)),
    # Here a -1 inside a row is a mistake of the caller's; there it scores -inf.
    "generate, a pad inside a row": (scored(candidates=[[5, -1, 7]] * 3), (200, 400)),
    # Types: a JSON value is what it says.
    "generate, ids as text": (scored(tokens=["11", "12", "13", "14"]), (200, 400)),
    "completions, an id as a float": (complete([1.0, 2]), (200, 400)),
    "completions, one token as text": (complete(max_tokens="1"), (200, 400)),
    "labels, a flag as a number": (label(apply_softmax=1), (200, 400)),
    # Label reads have a bound of their own.
    "labels, more than the likeliest tokens it gives": (label(label_token_ids=ids(MOST + 1, 8)), (400, 200)),
}
"""Other requests that are met differently: the status there, and here."""
