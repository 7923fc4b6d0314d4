"""Compiles Triton kernels ahead of time for a named GPU, on a machine without one.

Triton decides when it is imported whether it compiles or interprets, so it is imported when it is
used: a process that asks for the interpreter compiles nothing.
"""

from __future__ import annotations

from typing import Any

import torch

# Shared memory that one program may use, in bytes.
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}

_POINTER = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


_OPTIONS = ("num_warps", "num_stages", "launch_pdl")  # of a launch, and no arguments of a kernel


def compile_for(kernel: Any, args: tuple[Any, ...], meta: dict[str, Any], capability: int) -> Any:
    """What `kernel[grid](*args, **meta)` would compile on a device of that capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    meta = dict(meta)
    options = {key: meta.pop(key) for key in _OPTIONS if key in meta}
    names = kernel.arg_names
    values = {**dict(zip(names, args, strict=False)), **meta}
    not_specialized = set(kernel.do_not_specialize or ())
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(names):
        value = values[name]
        if name in meta or value is None:
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTER[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and name not in not_specialized:
            signature[name], constants[(index,)] = "constexpr", 1
        else:
            signature[name] = "i32"
            if value % 16 == 0 and name not in not_specialized:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
