"""Discovery of routes is all or nothing, and can be tried again after it failed."""

import sys
import types

import pytest

from stream_attention.core import registry as registry_module
from stream_attention.core import routes
from stream_attention.core.registry import AttentionRecord, Registry


def record(name):
    return AttentionRecord(name, "none", "tests", (), lambda problem, device: 1.0, build=print)


def broken(registry):
    registry.register_attention(record("half"))
    raise RuntimeError("cannot load")


def test_a_failed_discovery_leaves_nothing_and_can_be_repeated(monkeypatch):
    registry = Registry()
    monkeypatch.setattr(routes, "register", broken)
    for _ in range(2):  # the second try must meet the same cause, not the first one's names
        with pytest.raises(RuntimeError, match="cannot load"):
            registry.attention_records()
    monkeypatch.undo()
    assert "half" not in {known.route for known in registry.attention_records()}


def test_a_package_that_fails_half_way_registers_nothing(monkeypatch):
    module = types.ModuleType("stream_attention.kernels_broken.capabilities")
    module.register = broken
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(
        sys.modules, "stream_attention.kernels_broken", types.ModuleType("kernels_broken")
    )
    monkeypatch.setattr(registry_module, "_kernel_packages", lambda: ("kernels_broken",))
    registry = Registry()
    names = {known.route for known in registry.attention_records()}
    assert "half" not in names
    assert "torch" in names
    reasons = {missing.route: missing.reasons for missing in registry.missing()}
    assert reasons["kernels_broken"] == ("failed to load: RuntimeError: cannot load",)
