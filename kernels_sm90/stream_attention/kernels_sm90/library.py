"""The shared library of this package. It loads on first use and needs no driver to load."""

from __future__ import annotations

from stream_attention.core.native import NativeLibrary

LIBRARY = NativeLibrary("stream_attention.kernels_sm90", "libstream_attention_sm90.so")
