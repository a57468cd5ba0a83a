"""vLLM's general plugin: the candidate gather in every worker; on a CPU also what lets Model Runner V2 run."""

from functools import cache


def register() -> None:
    """Called by vLLM in every process of an engine, before it builds anything; may be called repeatedly.

    It takes the place of the hook through which a platform replaces Triton kernels. vLLM calls that hook in each worker
    just before it loads its runner, so processes without a worker (the caller's own, the engine core) keep an unpatched
    torch. In all of them, what was asked is kept out of the log; on a CPU, waiting for each other is made to cost less.

    Raises:
        RuntimeError: on a CPU, a vLLM version that the kernels were not written for.
    """
    from vllm.platforms import current_platform

    from scoring.vllm_extension.logs import keep_requests_out_of_the_log

    keep_requests_out_of_the_log()
    if current_platform.is_cpu():
        import vllm

        from scoring.vllm_extension.version import require_supported
        from scoring.vllm_extension.waiting import wait_without_spinning

        require_supported(vllm.__version__)
        wait_without_spinning()
    hook = current_platform.register_triton_kernel_overrides
    if hook.__func__ is not prepare_worker:
        platform = type(current_platform)
        platform.vllms_own_kernel_overrides = hook
        platform.register_triton_kernel_overrides = classmethod(prepare_worker)


def prepare_worker(platform: type) -> None:
    """What a worker gets before it loads its runner: the candidate gather, and on a CPU the kernels."""
    from vllm import envs
    from vllm.platforms import current_platform

    from scoring.vllm_extension.gather import replace_gather

    if current_platform.is_cpu():
        replace_kernels(platform)
    else:
        platform.vllms_own_kernel_overrides()
    if envs.VLLM_USE_V2_MODEL_RUNNER is not False:
        replace_gather()


def replace_kernels(platform: type) -> None:
    """Replace vLLM's Triton kernels in this process for the runner it is about to load.

    - Model Runner V2: by ``scoring.vllm_extension.kernels``.
    - ``VLLM_USE_V2_MODEL_RUNNER=0``: by vLLM's own replacements for the V1 runner, which vLLM leaves out
      where it believes that Triton works, as the marker backend makes it believe.
    - ``TRITON_INTERPRET=1``: not at all, for the V2 runner; Triton interprets the kernels, slowly.

    In every case top-k and top-p take vLLM's PyTorch way: Triton's interpreter fails on that kernel too. And in every
    case the operators for LoRA are mended.
    """
    # vLLM's adaptation of torch to the CPU; it must come before any module of the runner.
    import vllm.v1.worker.cpu.shm  # noqa: F401
    from triton import knobs
    from vllm import envs
    from vllm.v1.sample.ops import topk_topp_sampler

    from scoring.vllm_extension import lora

    topk_topp_sampler.HAS_TRITON = False
    lora.replace_operators()
    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        _replace_for_v1(platform)
    elif not knobs.runtime.interpret:
        _replace_for_v2()


@cache
def _replace_for_v1(platform: type) -> None:
    from vllm import triton_utils

    triton_utils.HAS_TRITON = False
    try:
        platform.vllms_own_kernel_overrides()
    finally:
        triton_utils.HAS_TRITON = True


@cache
def _replace_for_v2() -> None:
    from triton.runtime import driver
    from vllm.triton_utils.dispatcher import register_kernels

    from scoring.vllm_extension.kernels import REPLACEMENTS
    from scoring.vllm_extension.triton_marker.driver import CpuMarkerDriver

    register_kernels(REPLACEMENTS)
    # A kernel that was not replaced then fails with a sentence that names it.
    driver.set_active(CpuMarkerDriver())
