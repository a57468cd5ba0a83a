"""What the tests share: checkpoints, and engines in processes of their own (at most two at a time)."""

import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub, which reads it once
os.environ["RAY_AUTH_MODE"] = "token"  # likewise of ray: given a cluster's address, it asks for no token by itself

import hypothesis
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from scoring.demo_teacher import demo_teacher
from scoring.environment import prepare_engine_environment
from tests.engine_process import EngineProcess, Engines
from tests.tiny_teacher import make_tiny_experts, make_tiny_teacher

TINY_BLOCK_BYTES = 32 * 2 * 2 * 2 * 32 * 4  # 32 tokens x (key and value) x 2 layers x 2 heads x 32 x 4 bytes
TOKENIZER_SIZE = 2000  # the tiny teacher's vocabulary has 48 ids more, as padded embeddings do

prepare_engine_environment()
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> Path:
    """The tiny teacher's checkpoint, with a tokenizer of 2000 ids and sampling defaults that nothing may heed."""
    path = make_tiny_teacher(tmp_path_factory.mktemp("tiny-teacher"))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(TOKENIZER_SIZE)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 20, "temperature": 0.6}))
    return path


@pytest.fixture(scope="session")
def tiny_model(tiny_path) -> PreTrainedModel:
    """The tiny teacher as Hugging Face computes it, in float32."""
    return AutoModelForCausalLM.from_pretrained(tiny_path).eval()


@pytest.fixture(scope="session")
def other_tiny_path(tmp_path_factory) -> Path:
    """Other weights for the tiny teacher: a checkpoint that differs in its numbers alone, and has no tokenizer."""
    return make_tiny_teacher(tmp_path_factory.mktemp("other-tiny-teacher"), seed=1)


@pytest.fixture(scope="session")
def other_tiny_model(other_tiny_path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(other_tiny_path).eval()


@pytest.fixture(scope="session")
def experts_path(tmp_path_factory) -> Path:
    """The checkpoint of the tiny teacher of experts."""
    return make_tiny_experts(tmp_path_factory.mktemp("tiny-experts"))


@pytest.fixture(scope="session")
def experts_model(experts_path) -> PreTrainedModel:
    """The tiny teacher of experts as Hugging Face computes it, in float32."""
    return AutoModelForCausalLM.from_pretrained(experts_path).eval()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct with bfloat16 weights, which float32 holds exactly."""
    return demo_teacher("bfloat16")


@pytest.fixture(scope="session")
def engines(request, tmp_path_factory):
    """The engines by name. `engines.close()` makes room for a module that starts its own."""
    from scoring.engine import EngineSettings  # imports vLLM

    def tiny(model: str = "tiny_path", **options) -> EngineSettings:
        engine_args = {"max_model_len": 512, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 64 << 20}
        engine_args |= options.pop("engine_args", {})
        path = str(request.getfixturevalue(model))
        return EngineSettings(path, teacher="tiny", dtype="float32", engine_args=engine_args, **options)

    def smollm2(dtype: str, **options) -> EngineSettings:
        path = str(request.getfixturevalue("smollm2_path"))
        engine_args = {"max_model_len": 512, "kv_cache_memory_bytes": 256 << 20}
        return EngineSettings(path, teacher="smollm2", dtype=dtype, engine_args=engine_args, **options)

    def tiny_cramped(**engine_args) -> EngineSettings:
        return tiny(
            engine_args={
                "max_num_batched_tokens": 512,
                # A lone read is prefilled in one step; of several at once, each gets 32 tokens a step, and their
                # 19 blocks (one of which vLLM keeps empty) cannot hold two long reads to their ends.
                "long_prefill_token_threshold": 32,
                "scheduler_reserve_full_isl": False,
                "kv_cache_memory_bytes": 19 * TINY_BLOCK_BYTES,
                **engine_args,
            }
        )

    def tiny_logits() -> EngineSettings:
        return tiny(scores="logits", engine_args={"max_model_len": 2048, "max_num_batched_tokens": 2048})

    engines = Engines(
        [
            {"tiny": tiny, "tiny_cramped": tiny_cramped},
            {"tiny_logits": tiny_logits, "smollm2_f32": lambda: smollm2("float32")},
            {
                "smollm2_bf16": lambda: smollm2("bfloat16"),
                "smollm2_bf16_head_f32": lambda: smollm2("bfloat16", head_dtype="float32"),
            },
            {
                "experts_without_reuse": lambda: tiny("experts_path", prefix_reuse=False),
                "tiny_asynchronous": lambda: tiny_cramped(async_scheduling=True),
            },
        ],
        cores=sorted(os.sched_getaffinity(0)),
        logs=tmp_path_factory.mktemp("engine-logs"),
    )
    yield engines
    engines.close()


@pytest.fixture
def tiny(engines) -> EngineProcess:
    """float32, 512 tokens at most, prefilled in chunks of 64."""
    return engines["tiny"]


@pytest.fixture
def tiny_cramped(engines) -> EngineProcess:
    """The tiny teacher with room for one long read: a lone read in one chunk, several preempt one another."""
    return engines["tiny_cramped"]


@pytest.fixture
def tiny_logits(engines) -> EngineProcess:
    """The tiny teacher answering with logits, for up to 2048 tokens, prefilled at once."""
    return engines["tiny_logits"]


@pytest.fixture
def smollm2_f32(engines) -> EngineProcess:
    return engines["smollm2_f32"]


@pytest.fixture
def smollm2_bf16(engines) -> EngineProcess:
    return engines["smollm2_bf16"]


@pytest.fixture
def smollm2_bf16_head_f32(engines) -> EngineProcess:
    """A bfloat16 body under a float32 head."""
    return engines["smollm2_bf16_head_f32"]


@pytest.fixture
def experts_without_reuse(engines) -> EngineProcess:
    """As `tiny`, with a teacher of experts; its scheduler is vLLM's own, and no scored read reads the prefix cache."""
    return engines["experts_without_reuse"]


@pytest.fixture
def tiny_asynchronous(engines) -> EngineProcess:
    """As `tiny_cramped`, with the scheduler of GPUs, which schedules a step while the one before is computed."""
    return engines["tiny_asynchronous"]
