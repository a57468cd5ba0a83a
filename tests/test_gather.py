"""The candidate gather: its numbers, which rows it computes, and the place in vLLM's workers that it takes.

Expected numbers are computed in float64 by numpy from the same logits. What a real engine answers with it is compared
with Hugging Face in `test_exactness.py`.
"""

import hashlib
import inspect
import itertools
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm
import vllm.v1.worker.gpu.sample.logprob
from vllm import SamplingParams
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample import prompt_logprob

from scoring.columns import Columns
from scoring.vllm_extension import fill as fill_module
from scoring.vllm_extension import gather
from scoring.vllm_extension.fill import fill
from scoring.vllm_extension.gather import Gather, asked_for
from scoring.vllm_extension.kernels import logprob

INF = float("inf")
EXACT = 1e-5  # nats


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_logits(n: int, vocabulary: int, dtype: torch.dtype, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(n, vocabulary, generator=rng(seed)) * scale).to(dtype)


def random_ids(n: int, width: int, vocabulary: int, seed: int = 1, pads: bool = True) -> torch.Tensor:
    """int64 [n, 1 + width]: an own token, then candidates, with repetitions and pads among them."""
    ids = torch.randint(-1 if pads else 0, vocabulary, (n, 1 + width), generator=rng(seed))
    ids[:, 0].clamp_(min=0)
    return ids


def log_sum_exp(values: np.ndarray) -> float:
    highest = values.max(initial=-INF)
    return highest if highest == -INF else highest + np.log(np.exp(values - highest).sum())


def expected(logits: torch.Tensor, ids: torch.Tensor, columns: Columns) -> np.ndarray:
    """float64 [n, width], from the definitions."""
    answer = np.empty((len(logits), columns.width))
    for row, values, its_ids in zip(answer, logits.double().numpy(), ids.tolist(), strict=True):
        logprobs = values - log_sum_exp(values)
        row[: len(its_ids)] = [logprobs[i] if i >= 0 else -INF for i in its_ids]
        if columns.tail:
            candidates = [i for i in its_ids[1:] if i >= 0]
            row[columns.tail_at] = log_sum_exp(np.delete(logprobs, candidates))
        if columns.entropy:
            possible = logprobs[logprobs > -INF]
            row[columns.entropy_at] = -(np.exp(possible) * possible).sum()
        if columns.rank:
            row[columns.rank_at] = (values >= values[max(its_ids[0], 0)]).sum()
        best = np.lexsort([np.arange(len(values)), -values])[: columns.top_k]
        row[columns.top_ids_at], row[columns.top_logprobs_at] = best, logprobs[best]
    return answer


def filled(logits: torch.Tensor, ids: torch.Tensor, columns: Columns, **options: bool) -> np.ndarray:
    out = torch.full((len(logits), columns.width), 777.0)
    before = logits.clone()
    fill(out, logits, ids, columns, **options)
    assert torch.equal(logits, before) or before.isnan().any()  # the engine may use them again
    return out.numpy()


def check(logits: torch.Tensor, ids: torch.Tensor, columns: Columns, tolerance: float = EXACT) -> np.ndarray:
    found, due = filled(logits, ids, columns), expected(logits, ids, columns)
    np.testing.assert_array_equal(found[:, columns.top_ids_at], due[:, columns.top_ids_at])
    if columns.rank:
        np.testing.assert_array_equal(found[:, columns.rank_at], due[:, columns.rank_at])
    np.testing.assert_allclose(found, due, rtol=0, atol=tolerance)
    return found


# --- the numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("n", "vocabulary", "width", "top_k"),
    [
        (12, 49_152, 16, 32),
        (300, 2048, 7, 1),
        (40, 1000, 1, 1000),
        (3, 50_257, 1024, 300),
        (5, 17, 40, 5),
        (4, 1, 1, 1),
    ],
)
def test_all_columns_are_what_float64_says(dtype, n, vocabulary, width, top_k):
    columns = Columns(width, top_k, tail=True, entropy=True, rank=True)
    check(random_logits(n, vocabulary, dtype), random_ids(n, width, vocabulary), columns)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("rank", [False, True])
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("width", [0, 4])
def test_what_is_asked_for_stands_in_its_columns(tail, entropy, rank, top_k, width):
    columns = Columns(width, top_k, tail, entropy, rank)
    check(random_logits(9, 500, torch.float32), random_ids(9, width, 500), columns)


def test_a_large_teachers_ids_come_out_exactly():
    logits = random_logits(2, 262_144, torch.bfloat16)
    logits[0, 262_143], logits[1, 200_001] = 50.0, 50.0
    found = check(logits, random_ids(2, 3, 262_144), Columns(3, 40, True, True))
    assert found[:, Columns(3, 40, True, True).top_ids_at][:, 0].tolist() == [262_143, 200_001]


@pytest.mark.parametrize("levels", [1, 2, 40])
@pytest.mark.parametrize("top_k", [1, 10, 64, 640])
def test_equal_logits_come_by_their_ids(levels, top_k):
    """Also where many tokens share the last place that is answered."""
    logits = torch.randint(0, levels, (6, 640), generator=rng(2)).bfloat16()
    check(logits, random_ids(6, 2, 640), Columns(2, top_k, rank=True))


def test_a_rank_counts_as_vllms_own_kernel_does():
    """Tokens with the same logit count, before and after: of the largest of five equal ones the rank is 5."""
    logits = random_logits(40, 3000, torch.bfloat16)  # many ties
    ids, due = random_ids(40, 0, 3000), torch.zeros(40, dtype=torch.int64)
    logprob.ranks(due, logits, 3000, ids[:, 0], 3000, 8192)
    assert filled(logits, ids, Columns(0, rank=True))[:, 1].tolist() == due.tolist()
    assert due.tolist() != [1 + int((row > row[i]).sum()) for row, i in zip(logits, ids[:, 0], strict=True)]
    flat = torch.zeros(1, 5)
    assert filled(flat, torch.tensor([[3]]), Columns(0, rank=True), as_logits=True).tolist() == [[0, 5]]


def test_zero_and_minus_zero_are_equal():
    logits = torch.tensor([[-0.0, 0.0, -1.0, 0.0, -0.0, -2.0]])
    found = filled(logits, torch.tensor([[0]]), Columns(0, 6))
    assert found[0, 1:7].tolist() == [0, 1, 3, 4, 2, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("log_tail", [-1.0, -16.1, -45.0, -47.0, -80.0, -200.0])
def test_a_tail_far_below_rounding_is_exact(dtype, log_tail):
    """Where one minus the candidates' sum would be 0 or off by a percent, and where exponentials of float32 end."""
    logits = random_logits(8, 5000, dtype, scale=1.0)
    ids = random_ids(8, 4, 5000)
    ids[:, 1] = torch.arange(8) * 600
    at = torch.arange(8)
    logits[at, ids[:, 1]] = logits.float().logsumexp(dim=1).sub(log_tail).to(dtype)
    columns = Columns(4, tail=True)
    found = check(logits, ids, columns, tolerance=EXACT * max(1.0, -log_tail / 50))
    assert np.abs(found[:, columns.tail_at] - log_tail).max() < 1.0  # it is the tail that was meant


def test_the_tail_without_candidates_is_everything_and_nothing_when_they_are_the_vocabulary():
    logits = random_logits(3, 6, torch.float32)
    assert filled(logits, torch.tensor([[0]] * 3), Columns(0, tail=True))[:, 1].tolist() == [0, 0, 0]
    pads = torch.tensor([[0, -1, -1]] * 3)
    assert filled(logits, pads, Columns(2, tail=True))[:, 3].tolist() == [0, 0, 0]
    everything = torch.tensor([[0, 5, 4, 3, 2, 1, 0, 0, -1]] * 3)
    assert filled(logits, everything, Columns(8, tail=True))[:, 9].tolist() == [-INF] * 3


def test_repeated_candidates_count_once_and_the_own_token_only_as_a_candidate():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))
    for candidates, outside in {(1, 1, 1): 0.75, (1, 2, -1): 0.625, (0, 1, 1): 0.25, (-1, 0, 0): 0.5}.items():
        found = filled(logits, torch.tensor([[0, *candidates]]), Columns(3, tail=True))
        np.testing.assert_allclose(found[0, 4], np.log(outside), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_impossible_tokens_make_no_nan(dtype):
    logits = random_logits(20, 300, dtype)
    logits[:, ::3] = -INF
    logits[0] = -INF
    logits[0, 7] = 2.0  # a certain token: the entropy is 0
    columns = Columns(5, 250, tail=True, entropy=True)
    found = check(logits, random_ids(20, 5, 300), columns)
    assert found[0, columns.entropy_at] == 0
    assert np.isneginf(found[1:, columns.top_logprobs_at][:, 200:]).all()


def test_where_only_impossible_tokens_are_left_the_tail_is_empty():
    logits = torch.tensor([[1.0, 2.0, -INF, -INF]])
    assert filled(logits, torch.tensor([[0, 0, 1]]), Columns(2, tail=True))[0, 3] == -INF


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("at", [0, 123, 299])
def test_a_nan_is_seen_in_its_row_and_in_no_other(sign, at):
    logits, ids = random_logits(9, 300, torch.float32), random_ids(9, 5, 300, pads=False)
    logits[4, at] = torch.tensor(float("nan")).copysign(torch.tensor(sign))
    columns = Columns(5, 8, tail=True, entropy=True)
    found = filled(logits, ids, columns)
    numbers = np.setdiff1d(np.arange(columns.width), np.arange(columns.width)[columns.top_ids_at])
    assert np.isnan(found[4, numbers]).all()
    others = np.arange(9) != 4
    np.testing.assert_allclose(found[others], expected(logits, ids, columns)[others], rtol=0, atol=EXACT)


def test_logits_in_the_place_of_log_probabilities():
    logits, ids = random_logits(11, 700, torch.bfloat16), random_ids(11, 4, 700)
    columns = Columns(4, 6)
    found = filled(logits, ids, columns, as_logits=True)
    at = columns.top_ids_at
    np.testing.assert_array_equal(found[:, at], expected(logits, ids, columns)[:, at])
    values, at = logits.float().numpy(), ids.numpy()
    np.testing.assert_array_equal(found[:, :5], np.where(at < 0, -INF, np.take_along_axis(values, at, axis=1)))
    np.testing.assert_array_equal(found[:, columns.top_logprobs_at], -np.sort(-values, axis=1)[:, :6])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_given_ids_score_the_same_bits_as_in_the_plain_gather(dtype):
    logits, ids = random_logits(50, 5001, dtype), random_ids(50, 9, 5001, pads=False)
    plain = torch.empty(50, 10)
    logprob.topk_log_softmax(plain, logits, logits.stride(0), ids, ids.stride(0), 10, 5001, 1024, 16)
    found = filled(logits, ids, Columns(9, 20, tail=True, entropy=True))
    np.testing.assert_array_equal(found[:, :10], plain.numpy())


def test_the_size_of_a_piece_changes_nothing(monkeypatch):
    logits, ids, columns = random_logits(23, 900, torch.float32), random_ids(23, 3, 900), Columns(3, 4, True, True)
    whole = filled(logits, ids, columns)
    monkeypatch.setattr(fill_module, "_pieces", lambda logits: iter([slice(0, 10), slice(10, 20), slice(20, 23)]))
    np.testing.assert_array_equal(filled(logits, ids, columns), whole)


# --- which rows are computed, of which requests, in which products


@pytest.fixture(autouse=True)
def no_triton(monkeypatch):
    """vLLM's kernel by its definition: it would have to be compiled."""

    def compute_token_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return logits.float().log_softmax(dim=1).gather(1, ids)

    monkeypatch.setattr(vllm.v1.worker.gpu.sample.logprob, "compute_token_logprobs", compute_token_logprobs)


HIDDEN, V = 8, 64
HEAD = torch.randn(HIDDEN, V, generator=rng(3))


class Steps:
    """A worker's steps over made-up requests. Each has hidden states of its own for all of its tokens."""

    def __init__(self, **options: bool) -> None:
        self.gather = Gather(torch.device("cpu"), **{"as_logits": False} | options)
        self.products: list[int] = []  # the rows of each product with the head
        self.hidden: dict[str, torch.Tensor] = {}
        self.ids: dict[str, torch.Tensor] = {}

    def add(self, req_id: str, tokens: int, start: int, columns: Columns, share_head: bool = True, rows=None) -> None:
        """`rows`: which of the scored rows have ids; all by default."""
        count = tokens - 1 - start
        ids = random_ids(count, columns.candidates, V, seed=len(self.ids))
        if rows is not None:
            ids[np.setdiff1d(np.arange(count), rows)] = -1
        sent = ids.numpy().astype(np.int32)
        extra_args = asked_for(columns, share_head)
        params = SamplingParams(
            max_tokens=1, prompt_logprob_token_ids=sent, prompt_logprob_start=start, extra_args=extra_args
        )
        self.hidden[req_id] = torch.randn(tokens, HIDDEN, generator=rng(100 + len(self.hidden)))
        self.ids[req_id] = ids
        self.gather.add(req_id, params, **extra_args[gather.KEY])

    def step(self, *chunks: tuple[str, int, int], resumed: str | None = None) -> dict[str, torch.Tensor]:
        """One step over chunks (request, begin, end) of prompts; `resumed` has made tokens before."""
        self.products = []
        lengths = [end - begin for _, begin, end in chunks]
        states = [self.hidden[req_id][begin:end] for req_id, begin, end in chunks]
        prompt_lens = np.array([len(self.hidden[req_id]) for req_id, *_ in chunks])[::-1].copy()
        batch = SimpleNamespace(
            req_ids=[req_id for req_id, *_ in chunks],
            idx_mapping_np=np.arange(len(chunks))[::-1],  # the slots of requests lie in another order
            num_computed_prefill_tokens_np=np.array([begin for _, begin, _ in chunks]),
            num_scheduled_tokens=np.array(lengths),
            query_start_loc_np=np.cumsum([0, *lengths]),
            prefill_len_np=np.array([len(self.hidden[r]) + (r == resumed) for r, *_ in chunks]),
        )
        assert vars(batch).keys() <= set(InputBatch.__dataclass_fields__)
        return self.gather.compute(self.logits, torch.cat([*states, torch.full((3, HIDDEN), 9.0)]), batch, prompt_lens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.products.append(len(hidden))
        return hidden @ HEAD

    def check(self, answer: torch.Tensor, req_id: str, start: int, columns: Columns) -> None:
        due = expected(self.hidden[req_id][start:-1] @ HEAD, self.ids[req_id], columns)
        asked = (self.ids[req_id] >= 0).any(dim=1).numpy()
        assert answer.dtype == torch.float32
        answer = answer.numpy()
        np.testing.assert_allclose(answer[asked], due[asked], rtol=0, atol=EXACT)
        assert np.isneginf(answer[~asked]).all()


ALL = Columns(3, 4, tail=True, entropy=True, rank=True)


def test_a_request_in_one_step():
    steps = Steps()
    steps.add("a", 10, 4, ALL)
    answers = steps.step(("a", 0, 10))
    steps.check(answers["a"], "a", 4, ALL)
    assert steps.products == [5]
    assert not steps.gather.reads


@pytest.mark.parametrize("cuts", [[0, 3, 10], [0, 5, 6, 10], [0, 9, 10], [0, 10]])
def test_chunks_of_a_prompt_add_up(cuts):
    steps = Steps()
    steps.add("a", 10, 4, ALL)
    for begin, end in itertools.pairwise(cuts[:-1]):
        assert steps.step(("a", begin, end)) == {}
    steps.check(steps.step(("a", cuts[-2], 10))["a"], "a", 4, ALL)


def test_requests_of_a_step_share_one_product_and_get_their_own_rows():
    steps = Steps()
    steps.add("a", 10, 4, ALL)
    steps.add("b", 30, 0, Columns(7, entropy=True))
    steps.add("c", 6, 4, Columns(0, 2))
    steps.add("d", 8, 2, Columns(5))
    steps.step(("b", 0, 11))
    assert steps.products == [11]
    answers = steps.step(("a", 0, 10), ("b", 11, 30), ("c", 0, 6), ("d", 0, 8))
    assert steps.products == [5 + 18 + 1 + 5]
    steps.check(answers["a"], "a", 4, ALL)
    steps.check(answers["b"], "b", 0, Columns(7, entropy=True))
    steps.check(answers["c"], "c", 4, Columns(0, 2))
    steps.check(answers["d"], "d", 2, Columns(5))


def test_requests_that_do_not_share_have_products_of_their_own():
    steps = Steps()
    for name, share_head in {"a": True, "b": True, "c": False, "d": False, "e": True}.items():
        steps.add(name, 10, 4, ALL, share_head)
    answers = steps.step(*((name, 0, 10) for name in "abcde"))
    assert steps.products == [10, 5, 5, 5]
    for name in "abcde":
        steps.check(answers[name], name, 4, ALL)


def test_a_product_has_so_many_rows_at_most(monkeypatch):
    monkeypatch.setattr(gather, "PRODUCT_ROWS_CPU", 100)
    steps = Steps()
    for name, tokens in {"a": 251, "b": 41, "c": 31, "d": 41}.items():
        steps.add(name, tokens, 0, Columns(2, entropy=True))
    answers = steps.step(*((name, 0, len(steps.hidden[name])) for name in "abcd"))
    assert steps.products == [100, 100, 50 + 40, 30 + 40]
    for name in "abcd":
        steps.check(answers[name], name, 0, Columns(2, entropy=True))


@pytest.mark.parametrize("columns", [ALL, Columns(2)], ids=["filled here", "by vLLM's kernel"])
def test_the_logits_of_a_product_are_gone_before_those_of_the_next_come(monkeypatch, columns):
    monkeypatch.setattr(gather, "PRODUCT_ROWS_CPU", 100)
    steps, made, left = Steps(), [], []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        left.append(sum(there() is not None for there in made))
        memory = (hidden @ HEAD).numpy().copy()
        made.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    steps.logits = logits
    steps.add("a", 251, 0, columns)
    steps.add("b", 31, 0, columns)
    answers = steps.step(("a", 0, 251), ("b", 0, 31))
    assert left == [0, 0, 0]
    steps.check(answers["a"], "a", 0, columns)


def test_rows_without_ids_are_not_computed():
    steps = Steps()
    steps.add("a", 30, 4, ALL, rows=[0, 7, 8, 24])
    steps.add("b", 12, 0, ALL, rows=[10])
    assert steps.step(("a", 0, 10)) == {}
    assert steps.products == [1]
    assert steps.step(("a", 10, 11)) == {}
    assert steps.products == []
    answers = steps.step(("a", 11, 30), ("b", 0, 12))
    assert steps.products == [4]
    steps.check(answers["a"], "a", 4, ALL)
    steps.check(answers["b"], "b", 0, ALL)


def test_a_prefill_that_began_beyond_the_first_row_gets_no_answer():
    steps = Steps()
    steps.add("a", 10, 4, ALL)
    steps.add("b", 10, 5, ALL)
    answers = steps.step(("a", 5, 10), ("b", 5, 10))
    assert set(answers) == {"b"}
    steps.check(answers["b"], "b", 5, ALL)
    assert not steps.gather.reads


def test_a_request_that_goes_on_after_its_prompt_or_is_resumed_has_been_answered():
    steps = Steps()
    steps.add("a", 10, 4, ALL)
    steps.add("b", 10, 4, ALL)
    assert steps.step(("a", 10, 11), ("b", 0, 10), resumed="b") == {}
    assert steps.products == []
    assert not steps.gather.reads


def test_a_preempted_request_begins_anew():
    steps = Steps()
    steps.add("a", 10, 4, ALL)
    steps.step(("a", 0, 7))
    steps.add("a", 10, 4, ALL)
    steps.check(steps.step(("a", 0, 10))["a"], "a", 4, ALL)


# --- the place in vLLM that it takes


def test_vllms_file_is_the_one_that_is_extended():
    """When this fails, read what has changed there, and change `Gather` with it."""
    assert hashlib.sha256(Path(prompt_logprob.__file__).read_bytes()).hexdigest() == gather.SOURCE


def test_vllms_runner_still_calls_what_is_replaced():
    text = inspect.getsource(model_runner)
    for call in ("add_request(", "remove_request(", "compute_prompt_token_id_logprobs("):
        assert text.count(f"self.prompt_logprobs_worker.{call}") == 1


@pytest.fixture
def unreplaced(monkeypatch):
    """vLLM's own class, put back after the test."""
    worker = prompt_logprob.PromptLogprobsWorker
    for name in ("add_request", "remove_request", "compute_prompt_token_id_logprobs"):
        monkeypatch.setattr(worker, name, inspect.unwrap(getattr(worker, name)))
    gather.replace_gather.cache_clear()
    yield worker
    gather.replace_gather.cache_clear()


def test_requests_of_this_project_are_answered_here_and_others_by_vllm(unreplaced):
    gather.replace_gather()
    gather.replace_gather()
    worker = unreplaced(4, torch.device("cpu"))
    ids = np.array([[3, -1, -1, -1], [5, -1, -1, -1]], np.int32)
    ours = SamplingParams(max_tokens=1, prompt_logprob_token_ids=ids, extra_args=asked_for(Columns(1, 1), True))
    others = SamplingParams(max_tokens=1, prompt_logprob_token_ids=ids, extra_args={"theirs": 1})
    for req_id, params in {"ours": ours, "others": others, "gone": ours, "removed": others}.items():
        worker.add_request(req_id, 0, params)
    worker.remove_request("gone")
    worker.remove_request("removed")
    assert set(worker.token_id_scores) == {"others"}
    assert set(worker.teacher_scoring.reads) == {"ours"}
    assert unreplaced(4, torch.device("cpu"), "raw_logits") is not worker


def test_a_request_that_vllm_answers_as_well_asks_for_nothing_more():
    assert asked_for(Columns(5), share_head=False) is None
    assert asked_for(Columns(5), share_head=True)
    assert asked_for(Columns(5, tail=True), share_head=False)


def test_a_changed_file_of_vllms_is_refused(unreplaced, monkeypatch):
    original = unreplaced.add_request
    monkeypatch.setattr(gather, "SOURCE", "0" * 64)
    with pytest.raises(RuntimeError, match=r"prompt_logprob\.py of vLLM 0\.32.* is not the file"):
        gather.replace_gather()
    assert unreplaced.add_request is original


def test_under_a_vllm_that_no_engine_runs_on_nothing_is_replaced(unreplaced, monkeypatch):
    original = unreplaced.add_request
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    gather.replace_gather()
    assert unreplaced.add_request is original
