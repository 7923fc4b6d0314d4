"""Whether tensors still have the dtypes, shapes and strides they had, in one call.

Reading shape and strides in Python makes two tuples a tensor, which is most of what a run would
cost. torch's own guard compares them where they lie, for all tensors at once. It also compares
what a plan does not depend on (`requires_grad`, and the dispatch keys under the thread's modes), so
its "no" means only "look closely"; its "yes" is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

Check = Callable[..., bool]


@functools.cache
def tensor_guards() -> Any:
    """torch's class of guards over many tensors, or `None`: it is not part of the public API."""
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None
    return TensorGuards


def form_of(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    """Dtype, shape and strides of `tensor`."""
    return tensor.dtype, tensor.shape, tensor.stride()


def form_check(tensors: Sequence[torch.Tensor]) -> Check:
    """A function of the same tensors, in order, that is true only if no form changed.

    It may also say no where none did, when the thread's modes (inference, autocast, ...) or a
    tensor's `requires_grad` are others than now. tensors: at least one, none of them twice.
    """
    forms = tuple(map(form_of, tensors))
    guards = tensor_guards()
    if guards is not None:
        check: Check = guards(
            *tensors,
            dynamic_dims_sizes=[list(shape) for _, shape, _ in forms],
            dynamic_dims_strides=[list(stride) for _, _, stride in forms],
        ).check
        if check(*tensors):
            return check
    # What torch cannot guard here and now is compared in Python.
    return lambda *now: tuple(map(form_of, now)) == forms
