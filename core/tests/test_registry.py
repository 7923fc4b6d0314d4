"""The registry: discovery by name, and a missing or broken package as a reason."""

import sys
import threading

import pytest

import stream_attention
from stream_attention.core.device import DeviceFacts
from stream_attention.core.registry import (
    KERNEL_PACKAGES,
    AttentionRecord,
    CapabilityRule,
    MergeProblem,
    MergeRecord,
    Registry,
    default_registry,
)

CPU = DeviceFacts(type="cpu")


def _attention(route, rules=()):
    return AttentionRecord(
        route=route, backend="b", package="p", rules=rules, estimate_us=lambda *_: 1.0
    )


def _merge(name, rules=()):
    return MergeRecord(name=name, package="p", rules=rules, build=lambda *_: None)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder that joins the namespace and gets kernel packages; none is found elsewhere."""
    root = tmp_path / "stream_attention"
    root.mkdir()
    own = [path for path in stream_attention.__path__ if "kernels_sm" not in path]
    monkeypatch.setattr(stream_attention, "__path__", [*own, str(root)])

    def add(name, capabilities):
        (root / name).mkdir()
        (root / name / "__init__.py").write_text("")
        if capabilities is not None:
            (root / name / "capabilities.py").write_text(capabilities)

    kept = {name: mod for name, mod in sys.modules.items() if ".kernels_" in name}
    for name in kept:
        del sys.modules[name]
    yield add
    for name in [name for name in sys.modules if ".kernels_" in name]:
        del sys.modules[name]
    sys.modules.update(kept)
    for name in [n for n in vars(stream_attention) if n.startswith("kernels_")]:
        delattr(stream_attention, name)


REGISTERS = """
from stream_attention.core.registry import MergeRecord

def register(registry):
    registry.register_merge(MergeRecord("{name}", "test", (), lambda *args: None))
"""


def test_a_missing_package_is_a_reason_that_names_the_wheel(packages):
    registry = Registry()
    missing = {rejection.route: rejection.reasons for rejection in registry.missing()}
    for name in KERNEL_PACKAGES:
        wheel = f"stream-attention-{name.replace('_', '-')}"
        assert missing[name] == (f"package {wheel} is not installed",)
    assert {record.route for record in registry.attention_records()} >= {"torch", "triton"}


def test_an_installed_package_registers_its_records(packages):
    packages("kernels_sm80", REGISTERS.format(name="found"))
    registry = Registry()
    assert [record.name for record in registry.merge_records()] == ["found"]
    assert "kernels_sm80" not in {rejection.route for rejection in registry.missing()}


def test_a_broken_package_is_a_reason_and_does_not_take_the_others_along(packages):
    packages("kernels_sm80", "raise OSError('libcuda is odd')")
    packages("kernels_sm90", REGISTERS.format(name="fine"))
    packages("kernels_sm100", None)
    registry = Registry()
    missing = {rejection.route: rejection.reasons[0] for rejection in registry.missing()}
    assert missing["kernels_sm80"] == "failed to load: OSError: libcuda is odd"
    assert missing["kernels_sm100"].startswith("failed to load: ModuleNotFoundError")
    assert [record.name for record in registry.merge_records()] == ["fine"]


def test_packages_of_other_architectures_are_found_by_name_alone(packages):
    packages("kernels_sm123", REGISTERS.format(name="new"))
    assert "new" in [record.name for record in Registry().merge_records()]


def test_a_taken_name_is_refused():
    registry = Registry(discover=False)
    registry.register_attention(_attention("a"))
    registry.register_merge(_merge("a"))  # routes and merges are two lists
    with pytest.raises(ValueError, match="name='a': a record of that name is registered"):
        registry.register_attention(_attention("a"))
    with pytest.raises(ValueError, match="name='a': a record of that name is registered"):
        registry.register_merge(_merge("a"))


def test_unregister_removes_and_refuses_unknown_names():
    registry = Registry(discover=False)
    registry.register_attention(_attention("a"))
    registry.unregister("a")
    assert registry.attention_records() == ()
    with pytest.raises(KeyError, match="'a' is not registered"):
        registry.unregister("a")


def test_version_grows_with_every_change():
    registry = Registry(discover=False)
    versions = [registry.version]
    registry.register_attention(_attention("a"))
    versions.append(registry.version)
    registry.register_merge(_merge("m"))
    versions.append(registry.version)
    registry.unregister("a")
    versions.append(registry.version)
    assert versions == sorted(set(versions))


def test_records_keep_the_order_of_registration():
    registry = Registry(discover=False)
    for name in ("c", "a", "b"):
        registry.register_attention(_attention(name))
    assert [record.route for record in registry.attention_records()] == ["c", "a", "b"]


def test_reasons_are_all_broken_rules():
    rules = (
        CapabilityRule("no", lambda problem, device: f"{device.type} is not served"),
        CapabilityRule("yes", lambda problem, device: None),
        CapabilityRule("also no", lambda problem, device: f"{problem}: too odd"),
    )
    want = ("cpu is not served", "x: too odd")
    assert _attention("a", rules).reasons("x", CPU) == want
    assert _merge("m", rules).reasons("x", CPU) == want
    assert _attention("a").reasons("x", CPU) == ()


def test_merge_problem_rules():
    good = {"num_states": 1, "head_dim": 512, "part_dtype": "float32", "out_dtype": "float32"}
    MergeProblem(**good)
    with pytest.raises(ValueError, match="num_states=0: must be an int >= 1"):
        MergeProblem(**{**good, "num_states": 0})
    with pytest.raises(ValueError, match=r"head_dim=513: must be an int in 1\.\.512"):
        MergeProblem(**{**good, "head_dim": 513})


def test_discovery_runs_once_from_many_threads(packages):
    packages("kernels_sm80", REGISTERS.format(name="once"))
    registry, found = Registry(), []
    threads = [
        threading.Thread(target=lambda: found.append(registry.merge_records())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all([record.name for record in records] == ["once"] for records in found)


def test_default_registry_is_one_per_process():
    assert default_registry() is default_registry()
