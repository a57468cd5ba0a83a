"""Scored reads begin in the cache, at most up to their first scored row: vLLM's schedulers, and engines.

The schedulers are vLLM's own, without a model: what they hand to it is looked at. Here are also an engine with vLLM's
asynchronous scheduler and one without reuse; the others are in `test_exactness.py`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from vllm import AsyncEngineArgs, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from scoring import MatrixBatch
from scoring.engine import EngineSettings, TeacherEngine, engine_arguments
from scoring.errors import RefusedSettings, WrongEngineAnswer
from scoring.vllm_extension.prefix_reuse import BoundedAsyncScheduler, BoundedScheduler, bound_prefix_reuse
from tests.shared_prompts import (
    check_every_start,
    check_kinds,
    check_preemption,
    check_scores,
    check_with_and_without,
    ids,
    read_of,
    read_watched,
)

WINDOW = 80


# Schedulers.


@pytest.fixture(scope="module")
def make_config(tiny_path):
    """vLLM's own configuration of a tiny engine with these engine arguments."""

    def make(**engine_args):
        engine_args = {"max_model_len": 512, "max_num_batched_tokens": 64, **engine_args}
        settings = EngineSettings(str(tiny_path), dtype="float32", engine_args=engine_args)
        return AsyncEngineArgs(**engine_arguments(settings)).create_engine_config()

    return make


SHAPE = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
LAYERS = {
    "full": [FullAttentionSpec(block_size=32, **SHAPE)],
    "window": [SlidingWindowSpec(block_size=32, sliding_window=WINDOW, **SHAPE)],
    "both": [
        FullAttentionSpec(block_size=32, **SHAPE),
        SlidingWindowSpec(block_size=32, sliding_window=WINDOW, **SHAPE),
    ],
    "wide": [
        FullAttentionSpec(block_size=32, **SHAPE),
        SlidingWindowSpec(block_size=64, sliding_window=WINDOW, **SHAPE),
    ],
}


@dataclass
class Trace:
    """What a scheduler did with one request."""

    chunks: list[tuple[int, int]] = field(default_factory=list)  # (first token, one past the last)
    blocks: tuple[list[int], ...] = ()  # per kind of layer, when the last chunk was scheduled


class Scheduled:
    """A scheduler of vLLM's, whose model makes the token 1 after every prompt.

    Args:
        scheduler: its class.
        layers: which of `LAYERS` the model has.
        blocks: how many blocks its cache holds.
        config: made by `make_config`.
    """

    def __init__(self, scheduler: type[Scheduler], config, layers: str = "full", blocks: int = 1000) -> None:
        config = copy.deepcopy(config)
        self.lag = int(issubclass(scheduler, AsyncScheduler))  # steps that are computed while the next is scheduled
        config.scheduler_config.async_scheduling = bool(self.lag)
        config.cache_config.num_gpu_blocks = blocks
        specs = LAYERS[layers]
        sizes = [spec.block_size for spec in specs]
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(min(sizes), sha256)
        self.scheduler = scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=max(sizes),
            hash_block_size=min(sizes),
        )
        self.serial = 0

    def request(
        self, tokens: Sequence[int], start: int | None, *, skip: bool = False, adapter: LoRARequest | None = None
    ) -> Request:
        """One that scores the rows from `start` on; None asks for the next token only."""
        options = {} if start is None else {"skip_reading_prefix_cache": skip}
        if start is not None:
            rows = np.zeros((len(tokens) - 1 - start, 1), np.int32)
            options |= {"prompt_logprob_token_ids": rows, "prompt_logprob_start": start}
        params = SamplingParams(max_tokens=1, temperature=0.0, **options)
        self.serial += 1
        name = f"request {self.serial}"
        return Request(
            name, list(tokens), params, None, arrival_time=self.serial, lora_request=adapter, block_hasher=self.hasher
        )

    def run(self, requests: Sequence[Request]) -> list[Trace]:
        """Schedule requests that come at once until all are done."""
        traces, under_way = {request.request_id: Trace() for request in requests}, deque()
        for request in requests:
            self.scheduler.add_request(request)
        for _ in range(1000):
            if not self.scheduler.has_unfinished_requests() and not under_way:
                break
            output, tokens = self.scheduler.schedule(), []
            for name, count in output.num_scheduled_tokens.items():
                request = self.scheduler.requests[name]
                traces[name].chunks.append((request.num_computed_tokens - count, request.num_computed_tokens))
                traces[name].blocks = self.scheduler.kv_cache_manager.get_block_ids(name)
                tokens.append([] if request.is_prefill_chunk else [1])
            names = list(output.num_scheduled_tokens)
            made = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, tokens)
            under_way.append((output, made))
            if len(under_way) > self.lag:
                self.scheduler.update_from_output(*under_way.popleft())
        assert all(request.is_finished() for request in requests)
        return list(traces.values())

    def begins(self, *args, **options) -> int:
        """How many tokens of one request come from the cache."""
        (trace,) = self.run([self.request(*args, **options)])
        return trace.chunks[0][0]


both_schedulers = pytest.mark.parametrize("scheduler", [BoundedScheduler, BoundedAsyncScheduler])


@both_schedulers
@pytest.mark.parametrize(("layers", "block"), [("full", 32), ("window", 32), ("both", 32), ("wide", 64)])
def test_a_scored_read_takes_whole_blocks_before_its_first_row_and_no_more(make_config, scheduler, layers, block):
    engine = Scheduled(scheduler, make_config(), layers)
    tokens = ids(330)
    assert engine.begins(tokens, 0) == 0
    for start in [*range(0, 329, 7), 31, 32, 33, 63, 64, 65, 128, 319, 320, 321, 328]:
        assert engine.begins(tokens, start) == start // block * block, start


@both_schedulers
@pytest.mark.parametrize("layers", ["full", "window", "both", "wide"])
def test_the_blocks_that_are_taken_hold_the_tokens_that_they_stand_for(make_config, scheduler, layers):
    engine = Scheduled(scheduler, make_config(max_num_batched_tokens=512), layers)
    tokens = ids(330)
    (first,) = engine.run([engine.request(tokens, 0)])  # in one step, so that it holds all its blocks in the end
    for start in (64, 100, 200, 300):
        (trace,) = engine.run([engine.request(tokens, start)])
        hit = trace.chunks[0][0]
        for spec, computed, taken in zip(LAYERS[layers], first.blocks, trace.blocks, strict=True):
            seen = max(0, hit - WINDOW + 1) if isinstance(spec, SlidingWindowSpec) else 0
            within = slice(seen // spec.block_size, hit // spec.block_size)
            assert taken[within] == computed[within]
            assert len(computed[within]) > 0
            whole = computed[: len(tokens) // spec.block_size]  # what is still cached; a part of a block never is
            assert not set(taken[hit // spec.block_size :]) & set(whole)


@both_schedulers
def test_a_read_takes_as_much_as_is_cached_when_that_is_less(make_config, scheduler):
    engine = Scheduled(scheduler, make_config())
    tokens = ids(300)
    assert engine.begins(tokens[:110] + ids(50, 1), 100) == 0
    assert engine.begins(tokens, 250) == 96  # of 110 tokens that they share
    assert engine.begins(tokens, 250) == 224


@both_schedulers
def test_other_requests_are_looked_up_as_ever(make_config, scheduler):
    engine = Scheduled(scheduler, make_config())
    tokens = ids(320)
    assert engine.begins(tokens, None) == 0
    assert engine.begins(tokens, None) == 288  # all but the last token, in whole blocks
    assert engine.begins(tokens[:200], None) == 192
    assert engine.begins(tokens, 200, skip=True) == 0


@both_schedulers
def test_adapters_and_their_base_share_no_blocks(make_config, scheduler):
    engine = Scheduled(scheduler, make_config())
    tokens = ids(200)
    adapters = [None, LoRARequest("tone@1", 1, "/tone"), LoRARequest("tone@2", 2, "/tone")]
    assert [engine.begins(tokens, 150, adapter=adapter) for adapter in adapters] == [0, 0, 0]
    assert [engine.begins(tokens, 150, adapter=adapter) for adapter in adapters] == [128, 128, 128]


@both_schedulers
def test_reads_of_one_step_share_a_prompt_that_is_new(make_config, scheduler):
    engine = Scheduled(scheduler, make_config(max_num_batched_tokens=1024))
    prompt = ids(101)
    traces = engine.run([engine.request(prompt + ids(50, 1 + i), 100) for i in range(4)])
    assert [trace.chunks for trace in traces] == [[(0, 151)], *[[(96, 151)]] * 3]


CRAMPED = {
    "max_num_batched_tokens": 512,
    "long_prefill_token_threshold": 32,
    "scheduler_reserve_full_isl": False,
}


@both_schedulers
@pytest.mark.parametrize("shared", [0, 150], ids=["apart", "shared"])
def test_a_read_that_was_preempted_begins_again_before_its_first_row(make_config, scheduler, shared):
    engine = Scheduled(scheduler, make_config(**CRAMPED), blocks=19)
    prompt = ids(shared)
    requests = [engine.request(prompt + ids(400 - shared, 1 + i), 150 + 5 * i) for i in range(8)]
    traces = engine.run(requests)
    assert sum(request.num_preemptions for request in requests) >= 4
    again = 0
    for i, (request, trace) in enumerate(zip(requests, traces, strict=True)):
        assert trace.chunks[-1][1] == 400
        begins = [chunk for chunk, before in zip(trace.chunks[1:], trace.chunks, strict=False) if chunk[0] != before[1]]
        assert len(begins) <= request.num_preemptions
        for first, _ in (trace.chunks[0], *begins):
            assert first % 32 == 0
            assert first <= 150 + 5 * i
        again += sum(first > 0 for first, _ in begins)
    assert again >= 2  # they found blocks of their own in the cache


def test_a_bound_that_vllm_gives_holds_where_it_is_less(make_config, monkeypatch):
    """Only vLLM 0.33 gives one."""
    engine = Scheduled(BoundedScheduler, make_config())
    monkeypatch.setattr(Scheduler, "_get_local_prefix_cache_hit", lambda self, request, bound: (request, bound))
    scored, plain = engine.request(ids(330), 100), engine.request(ids(330), None)
    for given, due in ((None, None), (64, 64), (320, 100)):
        request, bound = engine.scheduler._get_local_prefix_cache_hit(scored, given)
        assert (request.num_tokens, bound) == (101, due)
        assert request.request_id == scored.request_id
        assert engine.scheduler._get_local_prefix_cache_hit(plain, given) == (plain, given)


@pytest.mark.parametrize("scheduler", [Scheduler, AsyncScheduler])
def test_vllms_own_schedulers_read_past_the_first_row(make_config, scheduler):
    """Once they do not, ours have nothing to add."""
    engine = Scheduled(scheduler, make_config())
    assert [engine.begins(ids(330), 100) for _ in range(2)] == [0, 320]


@pytest.mark.parametrize(("asynchronous", "base"), [(False, Scheduler), (True, AsyncScheduler)])
def test_an_engine_gets_the_bounded_kind_of_its_scheduler(make_config, asynchronous, base):
    config = make_config()
    config.scheduler_config.async_scheduling = asynchronous
    assert config.scheduler_config.get_scheduler_cls() is base
    bound_prefix_reuse(config)
    chosen = config.scheduler_config.get_scheduler_cls()
    assert issubclass(chosen, (BoundedScheduler, base))
    assert issubclass(chosen, AsyncScheduler) == asynchronous


def test_another_scheduler_is_refused(make_config):
    config = make_config(scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")
    with pytest.raises(RefusedSettings, match=r"engine_args.scheduler_cls.* is refused.*setting prefix_reuse turns"):
        bound_prefix_reuse(config)


# Engines. The functions run in their processes.


def scheduler_of(engine: TeacherEngine) -> str:
    return engine._llm.vllm_config.scheduler_config.scheduler_cls


async def read_unbounded(engine: TeacherEngine, batch: MatrixBatch, *, skip: bool | None = None) -> tuple:
    """As `read_watched`, of an engine that takes vLLM's own scheduler for one that bounds hits."""
    engine._prefix_reuse = True
    try:
        return await read_watched(engine, batch, skip=skip)
    finally:
        engine._prefix_reuse = False


def test_with_asynchronous_scheduling_all_of_it_holds(tiny_asynchronous, tiny_model):
    engine = tiny_asynchronous
    assert engine.call(scheduler_of) == "scoring.vllm_extension.prefix_reuse.BoundedAsyncScheduler"
    check_with_and_without(engine, tiny_model, 2, seed=610)
    check_every_start(engine, tiny_model, seed=620, roomy=False)
    check_kinds(engine, tiny_model, seed=630)
    check_preemption(engine, tiny_model, seed=640)


def test_an_engine_without_reuse_says_so(experts_without_reuse):
    info = experts_without_reuse.call(TeacherEngine.info)
    assert (info.prefix_reuse, info.block_size) == (False, 32)


def test_without_reuse_no_scored_read_reads_the_cache(experts_without_reuse, experts_model):
    reads = [read_of(150, 60, 10, 701)]
    for _ in range(2):
        scores, given = experts_without_reuse.call(read_watched, MatrixBatch.from_reads(reads))
        assert given == [True]
        assert scores.cached_tokens.tolist() == [0]
        check_scores(experts_model, reads, scores)


def test_scores_lost_to_a_prefix_cache_hit_are_asked_for_again(experts_without_reuse, experts_model):
    reads = [read_of(96, 40, 82, 81)]
    for due in ([True], [False, True]):  # vLLM leaves the scores out once; the second request brings them
        scores, given = experts_without_reuse.call(read_unbounded, MatrixBatch.from_reads(reads))
        assert given == due
        check_scores(experts_model, reads, scores)


def test_scores_lost_twice_are_an_error_and_never_made_up(experts_without_reuse):
    batch = MatrixBatch.from_reads([read_of(96, 40, 84, 83)])
    experts_without_reuse.read_matrix(batch)
    scores, given = experts_without_reuse.call(read_unbounded, batch, skip=False)
    assert given == [False, False]
    assert isinstance(scores[0], WrongEngineAnswer)
    assert "no scores" in str(scores[0])
