"""What a CPU engine must not be asked for, because it would launch a kernel that has no replacement."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scoring.errors import InvalidRead, RefusedSettings

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

# Sampling parameter -> whether its value launches a kernel without a replacement. The conditions are those
# under which vllm.v1.worker.gpu.sample.* and .structured_outputs launch one.
_LAUNCHES_A_KERNEL: dict[str, Callable[[Any], bool]] = {
    "presence_penalty": lambda value: value != 0.0,
    "frequency_penalty": lambda value: value != 0.0,
    "repetition_penalty": lambda value: value != 1.0,
    "logit_bias": bool,
    "allowed_token_ids": bool,
    "min_tokens": lambda value: value > 0,
    "bad_words": bool,
    "structured_outputs": lambda value: value is not None,
    "thinking_token_budget": lambda value: value is not None,
    "trace_decode_token_ids": lambda value: value is not None,
}


def refuse_unreplaced(params: "SamplingParams") -> None:
    """Raise InvalidRead if ``params`` would launch a kernel without a replacement; it would end the engine.

    The sentence names every field at fault. Does nothing where vLLM's own kernels run: on other platforms,
    under Triton's interpreter, and with the V1 runner.
    """
    if not kernels_are_replaced():
        return
    fields = [name for name, launches in _LAUNCHES_A_KERNEL.items() if launches(getattr(params, name))]
    if fields:
        given = ", ".join(f"{name}={getattr(params, name)!r}" for name in fields)
        raise InvalidRead(
            f"sampling parameters {given} are not available on a CPU: there they would launch a kernel of "
            "Model Runner V2 that has no replacement and end the engine. Leave them at their defaults."
        )


def refuse_unreplaced_options(config: "VllmConfig") -> None:
    """Raise RefusedSettings if an engine of this configuration would launch kernels without a replacement.

    The same as ``refuse_unreplaced`` for what is chosen when the engine starts, to be called before it
    does: the first step would end the engine.
    """
    if not kernels_are_replaced():
        return
    from vllm import envs

    model = config.model_config
    at_fault = {
        "speculative_config": config.speculative_config is not None,
        "watermark_config": config.watermark_config is not None,
        "return_sampling_mask": model.return_sampling_mask,
        "enable_trace_replay": model.enable_trace_replay,
        "enable_prompt_embeds": model.enable_prompt_embeds,
        "VLLM_COMPUTE_NANS_IN_LOGITS": envs.VLLM_COMPUTE_NANS_IN_LOGITS,
        "a model with multimodal positions (M-RoPE)": model.uses_mrope,
        "a model with recurrent (Mamba) layers": model.has_inner_state,
    }
    options = [name for name, launches in at_fault.items() if launches]
    if options:
        raise RefusedSettings(
            f"engine options {', '.join(options)} are not available on a CPU: they launch kernels of Model "
            "Runner V2 that have no replacement. Leave them out, or choose another model."
        )


def kernels_are_replaced() -> bool:
    """Whether engines started from this process run the CPU replacements (see the plugin)."""
    from triton import knobs
    from vllm import envs
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and envs.VLLM_USE_V2_MODEL_RUNNER is not False and not knobs.runtime.interpret
