"""Arrays over memory that vLLM hands to kernels as bare addresses."""

import numpy as np


class _Memory:
    """What numpy needs to see int32 values at an address (its array interface, version 3)."""

    def __init__(self, address: int, shape: tuple[int, ...]):
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": "<i4",
            "version": 3,
        }


def int32_at(address: int, shape: tuple[int, ...]) -> np.ndarray:
    """An int32 array of ``shape`` over the memory at ``address``, C order; writes go through.

    The array does not keep the memory alive: it is for the length of one kernel call, during which vLLM
    holds the tensor that the address came from. Nothing checks that the memory is as large as ``shape``.
    """
    return np.asarray(_Memory(address, shape))
