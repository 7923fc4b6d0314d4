"""One namespace over many roots, in runfiles: what Bazel's tests and binaries import."""

import importlib
import pathlib

import pytest

import stream_attention

PACKAGES = ("bench", "core", "flows", "planner", "policies")
PACKAGES += ("kernels_sm80", "kernels_sm90", "kernels_sm100")


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_imported_from_its_own_root(package):
    module = importlib.import_module(f"stream_attention.{package}")
    (folder,) = module.__path__
    assert pathlib.Path(folder).parts[-3:] == (package, "stream_attention", package)


def test_the_namespace_is_the_facade_of_core():
    assert pathlib.Path(stream_attention.__file__).parts[-3:-1] == ("core", "stream_attention")
    assert len(stream_attention.__path__) == len(PACKAGES)


def test_bazel_made_up_no_init_file():
    inits = [path.parts[0] for path in pathlib.Path(".").glob("*/stream_attention/__init__.py")]
    assert inits == ["core"]
    assert not pathlib.Path("core/__init__.py").exists()
