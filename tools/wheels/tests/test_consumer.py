"""A consumer's machine: a clean venv outside the tree, our wheels, nothing else of this repository.

torch and the other requirements come from the interpreter that runs the test, through a `.pth`
file, so that nothing is downloaded. Programs run with `-I` in an empty folder: neither PYTHONPATH
nor the working folder can lend them a source file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

WHEELHOUSE = Path("tools/wheels/wheelhouse").absolute()
KERNELS = ("kernels_sm80", "kernels_sm90", "kernels_sm100")
PACKAGES = ("core", "planner", "policies", "flows", "bench", *KERNELS)

DECODE = """
import torch
import stream_attention as sa

torch.manual_seed(0)
q = torch.randn(3, 1, 8, 64)
pages, values = torch.randn(2, 40, 16, 2, 64).unbind()
table = torch.randperm(40).to(torch.int32)[:36].view(3, 12)
lens = torch.tensor([0, 100, 192], dtype=torch.int32)
cache = sa.PagedKVCache(key=pages, value=values, page_table=table, sequence_lengths=lens)

out, lse, info = sa.decode(q, cache, return_lse=True)
want, want_lse = sa.reference.attention(q, cache, return_lse=True)
close = {"atol": 1e-5, "rtol": 1e-5}
torch.testing.assert_close(out.double().view(3, 8, 64), want.double().view(3, 8, 64), **close)
assert out[0].abs().max() == 0 and lse.view(3, 8)[0].isneginf().all(), "an empty row is 0 and -inf"
assert info.guarantee == "exact", info

out_a, out_b = torch.randn(2, 10, 8, 64).unbind()
lse_a, lse_b = torch.randn(2, 10, 8).unbind()
merged, merged_lse = sa.merge_states(out_a, lse_a, out_b, lse_b)
torch.testing.assert_close(merged_lse, torch.logaddexp(lse_a, lse_b))
weight_a, weight_b = ((lse - merged_lse).exp().unsqueeze(-1) for lse in (lse_a, lse_b))
torch.testing.assert_close(merged, weight_a * out_a + weight_b * out_b)
print("ran", info.route)
"""

PLACES = """
import importlib, sys
import stream_attention
roots = [stream_attention.__file__]
for name in sys.argv[1:]:
    roots += list(importlib.import_module("stream_attention." + name).__path__)
print(*roots, sep="\\n")
"""

EXPLAIN = """
import torch
import stream_attention as sa
q, k = torch.randn(1, 1, 2, 64), torch.randn(1, 32, 2, 64)
print(sa.StreamAttnEngine().plan(q, k, k).explain())
"""

LIBRARIES = """
import ctypes, importlib, importlib.resources, sys
from stream_attention.core import resources
for name in sys.argv[1:]:
    folder = importlib.resources.files("stream_attention." + name)
    (library,) = [entry for entry in folder.iterdir() if entry.name.endswith(".so")]
    ctypes.CDLL(str(library))
    owner = importlib.import_module("stream_attention." + name + ".library").LIBRARY
    assert owner.reason() is None, owner.reason()
    assert resources.reason(owner) is None, resources.reason(owner)
    print("kernels_sm%d" % owner.arch())
"""


def wheel_name(package: str) -> str:
    return f"stream-attention-{package.replace('_', '-')}"


class Consumer:
    """A venv that sees the requirements of our wheels, and an empty folder to work in."""

    def __init__(self, root: Path) -> None:
        self.venv = root / "venv"
        self.empty = root / "empty"
        self.empty.mkdir()
        self.env = {
            "HOME": str(root),
            "OMP_NUM_THREADS": "1",
            "PATH": os.defpath,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "TMPDIR": str(root),
            "TRITON_CACHE_DIR": str(root / "triton"),
        }
        self._call([sys.executable, "-m", "venv", str(self.venv)])
        self.python = self.venv / "bin" / "python"
        site = self.run("import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
        lent = [entry for entry in sys.path if entry.endswith("site-packages")]
        (Path(site) / "lent.pth").write_text("\n".join(lent) + "\n", encoding="utf-8")

    def _call(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, cwd=self.empty, env=self.env, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    def run(self, code: str, *args: str) -> str:
        return self._call([str(self.python), "-I", "-c", code, *args]).stdout

    def fail(self, code: str) -> str:
        """The last line on stderr of a program that must fail."""
        command = [str(self.python), "-I", "-c", code]
        done = subprocess.run(
            command, cwd=self.empty, env=self.env, capture_output=True, text=True, timeout=240
        )
        assert done.returncode != 0, done.stdout
        return done.stderr.strip().splitlines()[-1]

    def pip(self, *args: str) -> str:
        return self._call([str(self.python), "-I", "-m", "pip", *args]).stdout

    def install(self, *wheels: str) -> None:
        offline = ["--no-index", "--no-deps", "--find-links", str(WHEELHOUSE)]
        self.pip("install", *offline, *wheels)

    @contextlib.contextmanager
    def without(self, package: str) -> Iterator[None]:
        """Uninstalls a package's wheel for a while."""
        self.pip("uninstall", "--yes", wheel_name(package))
        try:
            yield
        finally:
            self.install(wheel_name(package))


@pytest.fixture(scope="module")
def consumer(tmp_path_factory: pytest.TempPathFactory) -> Consumer:
    made = Consumer(tmp_path_factory.mktemp("consumer"))
    made.install("stream-attention", *map(wheel_name, PACKAGES))
    return made


def test_decode_and_merge_states_run_from_wheels(consumer: Consumer) -> None:
    assert consumer.run(DECODE).startswith("ran ")


def test_namespace_merges_over_all_wheels(consumer: Consumer) -> None:
    places = consumer.run(PLACES, *PACKAGES).split()
    assert len(places) == len(PACKAGES) + 1
    assert all(Path(place).is_relative_to(consumer.venv) for place in places), places


def test_import_loads_neither_torch_planner_nor_kernels(consumer: Consumer) -> None:
    code = "import sys, stream_attention; print(*sorted(sys.modules), sep='\\n')"
    modules = consumer.run(code).split()
    ours = [name for name in modules if name.startswith("stream_attention.")]
    assert "torch" not in modules
    assert not ours


def test_pip_finds_every_requirement(consumer: Consumer) -> None:
    done = subprocess.run(
        [str(consumer.python), "-I", "-m", "pip", "check"],
        cwd=consumer.empty,
        env=consumer.env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    faults = [line for line in done.stdout.splitlines() if line.startswith("stream-attention")]
    assert not faults, faults
    with consumer.without("flows"):
        # The same look at a broken set, so that the check above is known to see one.
        broken = subprocess.run(
            [str(consumer.python), "-I", "-m", "pip", "check"],
            cwd=consumer.empty,
            env=consumer.env,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert "requires stream-attention-flows, which is not installed" in broken.stdout


def test_a_name_of_a_missing_wheel_is_an_import_error_that_names_it(consumer: Consumer) -> None:
    with consumer.without("planner"):
        for name in ("decode", "StreamAttnEngine"):
            line = consumer.fail(f"import stream_attention as sa; sa.{name}")
            assert line == (
                f"ImportError: stream_attention.{name} needs the package stream-attention-planner, "
                "which is not installed; install stream-attention-planner or stream-attention"
            )
        assert consumer.run("import stream_attention as sa; print(sa.PagedKVCache.__name__)")


def test_kernel_libraries_load_from_wheels_without_a_driver(consumer: Consumer) -> None:
    assert consumer.run(LIBRARIES, *KERNELS).split() == list(KERNELS)


def test_a_missing_kernel_wheel_is_a_reason_in_explain(consumer: Consumer) -> None:
    reason = "package stream-attention-kernels-sm90 is not installed"
    assert reason not in consumer.run(EXPLAIN)
    with consumer.without("kernels_sm90"):
        text = consumer.run(EXPLAIN)
    assert reason in text
    assert "kernels-sm80 is not installed" not in text


def test_namespace_merges_over_editable_installs(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for package in ("core", "planner", "tools/wheels"):
        shutil.copytree(package, tree / package, ignore=shutil.ignore_patterns("wheelhouse"))
    (tmp_path / "venv").mkdir()
    made = Consumer(tmp_path / "venv")
    for package in ("core", "planner"):
        options = ["--no-index", "--no-deps", "--no-build-isolation"]
        made.pip("install", *options, "--editable", str(tree / package))
    places = made.run(PLACES, "core", "planner").split()
    assert all(Path(place).is_relative_to(tree) for place in places), places
    assert made.run(DECODE).startswith("ran ")
    line = made.fail("import stream_attention.flows")
    assert line == "ModuleNotFoundError: No module named 'stream_attention.flows'"
