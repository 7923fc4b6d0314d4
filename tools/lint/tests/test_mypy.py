import os
import pathlib
import subprocess
import sys

import lint_tree
import pytest

ROOTS = ("core", "planner", "policies", "flows", "bench")
ROOTS += ("kernels_sm80", "kernels_sm90", "kernels_sm100")


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """One tree of all roots of the namespace: mypy knows nothing of pkgutil.extend_path."""
    root = tmp_path_factory.mktemp("merged")
    num_files = 0
    for path in lint_tree.sources(".py"):
        # What only tests use spreads tables of keywords over constructors: noise to mypy.
        public = path.parts[1] == "stream_attention" and "testing" not in path.parts
        if path.parts[0] in ROOTS and public:
            target = root / pathlib.Path(*path.parts[1:])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
            num_files += 1
    assert num_files > 10
    (root / "pyproject.toml").write_bytes(pathlib.Path("pyproject.toml").read_bytes())
    return root


def mypy(cwd, *args):
    command = [sys.executable, "-m", "mypy", "--config-file=pyproject.toml"]
    command += [f"--cache-dir={os.environ['TEST_TMPDIR']}/mypy_cache", "--namespace-packages"]
    done = subprocess.run([*command, *args], cwd=cwd, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_public_modules_type_check(merged):
    code, output = mypy(merged, "-p", "stream_attention")
    assert code == 0, output


def test_mypy_with_this_configuration_reports_a_type_error(merged, tmp_path):
    (tmp_path / "pyproject.toml").write_bytes((merged / "pyproject.toml").read_bytes())
    (tmp_path / "bad.py").write_text("def f(x):\n    return x\n\n\ny: int = 'a'\n")
    code, output = mypy(tmp_path, "bad.py")
    assert code == 1
    assert "Incompatible types in assignment" in output
