"""vLLM's general plugin: lets Model Runner V2 run on a CPU. On any other platform it does nothing."""


def register() -> None:
    """Called by vLLM in every process of an engine, before it builds anything; may be called repeatedly.

    On a CPU it replaces the hook through which the platform swaps Triton kernels, which vLLM calls in each
    worker just before it loads its runner. Processes without a worker (the caller's own, the engine core)
    import nothing more. With TRITON_INTERPRET=1 vLLM's own kernels stay and Triton interprets them.

    Raises:
        RuntimeError: on a CPU, a vLLM version that the kernels were not written for.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    import vllm
    from vllm.platforms.cpu import CpuPlatform

    from scoring.vllm_extension.version import require_supported

    require_supported(vllm.__version__)
    hook = CpuPlatform.register_triton_kernel_overrides
    if hook.__func__ is not replace_kernels:
        CpuPlatform.vllms_own_kernel_overrides = hook
        CpuPlatform.register_triton_kernel_overrides = classmethod(replace_kernels)


def replace_kernels(platform: type) -> None:
    """Put the CPU kernels in place of vLLM's in this process, once, for the runner it is about to load.

    ``VLLM_USE_V2_MODEL_RUNNER=0`` gets vLLM's own replacements for the V1 runner: vLLM leaves them out
    where it believes that Triton works, which the marker backend makes it believe.
    """
    # The worker module patches torch and vLLM for the CPU and must come before any runner module.
    import vllm.v1.worker.cpu.shm  # noqa: F401
    from triton import knobs
    from vllm import envs, triton_utils
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.sample.ops import topk_topp_sampler

    # The PyTorch way to top-k and top-p; Triton's interpreter fails on the kernel.
    topk_topp_sampler.HAS_TRITON = False
    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        triton_utils.HAS_TRITON = False
        try:
            platform.vllms_own_kernel_overrides()
        finally:
            triton_utils.HAS_TRITON = True
    elif not knobs.runtime.interpret:
        from scoring.vllm_extension.kernels import REPLACEMENTS

        register_kernels(REPLACEMENTS)
