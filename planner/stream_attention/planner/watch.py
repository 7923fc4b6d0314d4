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
Form = tuple[torch.dtype, torch.Size, tuple[int, ...]]


@functools.cache
def tensor_guards() -> Any:
    """torch's class of guards over many tensors, or `None`: it is not part of the public API.

    torch 2.11 and 2.13 have it. Another may drop it or give it another meaning, so it is
    used only once it has told apart what a plan must tell apart.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None
    return TensorGuards if tells_apart(TensorGuards) else None


def tells_apart(guards: Any) -> bool:
    """Whether a guard says yes to what it was made of, and no to each kind of other form.

    The axis of one element is there because its stride, which addresses nothing, is compared too.
    """
    # On the CPU whatever the default device is: a first run may be one that a graph captures.
    first = torch.empty(64, dtype=torch.float32, device="cpu")
    second = first.as_strided((2, 1, 3), (8, 7, 1))
    others = (
        second.view(torch.int32),
        second.as_strided((2, 1, 2), (8, 7, 1)),
        second.as_strided((2, 1, 3), (9, 7, 1)),
        second.as_strided((2, 1, 3), (8, 6, 1)),
        second.as_strided((2, 1, 3, 1), (8, 7, 1, 1)),
        second.as_strided((2, 3), (8, 1)),
    )
    try:
        check = _guard(guards, (first, second))
        return check(first, second) is True and not any(check(first, t) for t in others)
    except Exception:  # whatever a changed function raises at arguments that it does not know
        return False


def _guard(guards: Any, tensors: Sequence[torch.Tensor]) -> Check:
    check: Check = guards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check
    return check


def form_of(tensor: torch.Tensor) -> Form:
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
        check = _guard(guards, tensors)
        if check(*tensors):
            return check
    # What torch cannot guard here and now is compared in Python.
    return functools.partial(_have_forms, forms)


def _have_forms(forms: tuple[Form, ...], *tensors: torch.Tensor) -> bool:
    for (dtype, shape, stride), tensor in zip(forms, tensors, strict=True):
        if tensor.dtype is not dtype or tensor.shape != shape or tensor.stride() != stride:
            return False
    return True
