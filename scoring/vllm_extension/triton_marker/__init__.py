"""A Triton backend named ``cpu`` that never compiles anything.

vLLM allows Model Runner V2 on a CPU only where Triton lists a backend of that name. This package is
listed through the entry-point group ``triton.backends`` and is enough as long as every kernel that is
launched has been replaced (``scoring.vllm_extension.kernels``). It runs no kernel itself.
"""
