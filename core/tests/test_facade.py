"""The facade: lazy names, errors that name the wheel, and a light import."""

import json
import os
import subprocess
import sys

import pytest

import stream_attention


def _python(code, **env):
    """Run `code` in a fresh interpreter that sees this one's path and no GPU."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "CUDA_VISIBLE_DEVICES": "",
        **env,
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_core_names_resolve_to_what_their_module_holds():
    from stream_attention.core import cache, errors, info, problem, state, tile_plan

    assert stream_attention.PagedKVCache is cache.PagedKVCache
    assert stream_attention.ContiguousKVCache is cache.ContiguousKVCache
    assert stream_attention.AttentionProblem is problem.AttentionProblem
    assert stream_attention.AttentionTilePlan is tile_plan.AttentionTilePlan
    assert stream_attention.AttentionInfo is info.AttentionInfo
    assert stream_attention.UnsupportedProblem is errors.UnsupportedProblem
    assert stream_attention.merge_states is state.merge_states
    assert callable(stream_attention.reference.attention)


def test_dir_lists_every_public_name():
    assert set(stream_attention.__all__) <= set(dir(stream_attention))
    for name in ("decode", "attention", "prefill", "train", "StreamAttnEngine", "merge_states"):
        assert name in stream_attention.__all__


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'flash'"):
        _ = stream_attention.flash


HIDE_PLANNER = """
import importlib.abc, sys

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("stream_attention.planner"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="stream_attention.planner")

sys.meta_path.insert(0, Hide())
import stream_attention
stream_attention.PagedKVCache
try:
    stream_attention.decode
except ImportError as error:
    print(error)
"""


def test_a_missing_package_is_named_by_its_wheel():
    text = _python(HIDE_PLANNER)
    assert "stream_attention.decode needs the package stream-attention-planner" in text
    assert "install stream-attention-planner or stream-attention" in text


BREAK_CORE = """
import sys
sys.modules["stream_attention.core.cache"] = None
import stream_attention
try:
    stream_attention.PagedKVCache
except ImportError as error:
    print(type(error).__name__, "wheel" if "install" in str(error) else "plain")
"""


def test_an_error_inside_a_package_is_not_taken_for_a_missing_one():
    assert _python(BREAK_CORE).split() == ["ModuleNotFoundError", "plain"]


def test_import_loads_neither_triton_nor_torch_nor_kernels():
    code = """
import json, sys
import stream_attention
print(json.dumps([m for m in ("torch", "triton", "numpy") if m in sys.modules]))
"""
    assert json.loads(_python(code)) == []


def test_core_names_need_no_triton_gpu_or_compiler():
    code = """
import json, sys
import stream_attention as sa
sa.PagedKVCache, sa.merge_states, sa.reference.attention
print(json.dumps(sorted(m for m in sys.modules if m.split(".")[0] == "triton")))
"""
    assert json.loads(_python(code, PATH="", CC="", CXX="")) == []


# The bound is over `import torch`. One run of five must keep it: other tests run at the same time.
IMPORT_SECONDS = 0.3
TIMED = """
import time, torch
start = time.perf_counter()
import stream_attention as sa
[getattr(sa, name) for name in sa.__all__ if sa._OWNER[name].startswith(("core", "reference"))]
print(time.perf_counter() - start)
"""


def test_import_takes_at_most_a_third_of_a_second_over_torch():
    assert any(float(_python(TIMED)) <= IMPORT_SECONDS for _ in range(5))
