"""The structs of `csrc/decode_abi.h` as ctypes sees them."""

from __future__ import annotations

import ctypes


class DecodeParams(ctypes.Structure):
    """`StreamAttentionDecodeParams`; strides in elements."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "key", "value", "page_table", "kv_lens")),
        *((name, ctypes.c_void_p) for name in ("attn_sink", "key_scale", "value_scale")),
        *((name, ctypes.c_void_p) for name in ("out", "lse", "scratch")),
        *((name, ctypes.c_int64) for name in ("q_token_stride", "q_head_stride")),
        *((f"k_{axis}_stride", ctypes.c_int64) for axis in ("page", "token", "head")),
        *((f"v_{axis}_stride", ctypes.c_int64) for axis in ("page", "token", "head")),
        *((name, ctypes.c_int64) for name in ("table_batch_stride", "table_head_stride")),
        *((name, ctypes.c_int64) for name in ("lens_batch_stride", "lens_head_stride")),
        *((name, ctypes.c_int64) for name in ("key_scale_stride", "value_scale_stride")),
        *((name, ctypes.c_int64) for name in ("out_token_stride", "out_head_stride")),
        *((name, ctypes.c_int64) for name in ("lse_token_stride", "lse_head_stride")),
        *((name, ctypes.c_int32) for name in ("batch", "qo_len", "num_kv_heads", "group")),
        *((name, ctypes.c_int32) for name in ("capacity", "page_size", "head_dim", "dtype")),
        *((name, ctypes.c_int32) for name in ("kv_dtype", "causal", "window_left")),
        *((name, ctypes.c_float) for name in ("sm_scale", "soft_cap")),
        *((name, ctypes.c_int32) for name in ("num_pages", "batch_invariant")),
    ]


class DecodeGeometry(ctypes.Structure):
    """`StreamAttentionDecodeGeometry`: how a problem is launched, whatever the lengths."""

    _fields_ = [
        ("scratch_floats", ctypes.c_int64),
        ("grid", ctypes.c_int32),
        ("blocks_per_head", ctypes.c_int32),
        ("row_groups", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("tile_tokens", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("slots", ctypes.c_int32),
    ]
