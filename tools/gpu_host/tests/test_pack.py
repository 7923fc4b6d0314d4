"""`./bazelw run //tools/gpu_host:pack -- OUT_DIR`, and the installer that it packs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pack
import pytest
from hypothesis import given
from hypothesis import strategies as st


def make_wheel(path: Path, name: str, extra: dict[str, str] | None = None) -> Path:
    """A wheel of one module `name`, with `extra` files, that pip installs."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": "NUMBER = 7\n",
        **(extra or {}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    wheel = path / f"{name}-1.0-py3-none-any.whl"
    path.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(file, text)
    return wheel


def fetched(requirement: str, folder: Path, python: str, platforms: Sequence[str]) -> None:
    """In place of pip: a wheel of that name, with a file to leave out."""
    assert python == "3.12" and platforms
    name = requirement.partition("==")[0].replace("-", "_")
    make_wheel(
        folder, name, {"flashinfer/data/csrc/kda/big.cu": "x" * 5000, f"{name}/kept.cu": "y"}
    )


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_wheel(tmp_path / "house", "ours")
    monkeypatch.setattr(pack, "WHEELHOUSE", tmp_path / "house")
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    return tmp_path / "out"


def run_installer(part: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(part / "install.py"), str(site)], capture_output=True, text=True
    )


def imported(site: Path, module: str) -> str:
    code = f"import {module}; print({module}.NUMBER)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


sizes = st.lists(st.integers(1, 50), max_size=8)


@given(sizes, st.integers(1, 40))
def test_parts_hold_every_byte_once_and_no_more_than_the_limit(
    sizes: list[int], limit: int
) -> None:
    wheels = [("site", f"{index}.whl", size) for index, size in enumerate(sizes)]
    parts = pack.cut(wheels, limit)
    assert all(sum(piece.size for piece in part) <= limit for part in parts)
    assert all(sum(piece.size for piece in part) == limit for part in parts[:-1])
    for _, name, size in wheels:
        pieces = [piece for part in parts for piece in part if piece.wheel == name]
        assert [piece.begin for piece in pieces] == [
            sum(before.size for before in pieces[:index]) for index in range(len(pieces))
        ]
        assert sum(piece.size for piece in pieces) == size


def test_each_peer_is_installed_into_a_folder_of_its_own(out: Path, tmp_path: Path) -> None:
    assert pack.main(["out"], fetched) == 0
    done = run_installer(out / "part0", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert imported(tmp_path / "site" / "stream_attention", "ours") == "7"
    assert imported(tmp_path / "site" / "flashinfer", "flashinfer_python") == "7"
    assert imported(tmp_path / "site" / "flashinfer", "flash_attn_4") == ""
    assert imported(tmp_path / "site" / "flash_attn_4", "flash_attn_4") == "7"
    assert f"--peer_paths=flashinfer={tmp_path / 'site' / 'flashinfer'}" in done.stdout
    assert "nvidia_cutlass_dsl/dsl_packages" in done.stdout
    assert not (tmp_path / "site" / ".pieces").exists()


def test_what_attention_does_not_need_is_left_out(out: Path, tmp_path: Path) -> None:
    assert pack.main(["out", "--peers=flashinfer"], fetched) == 0
    assert run_installer(out / "part0", tmp_path / "site").returncode == 0
    site = tmp_path / "site" / "flashinfer"
    assert (site / "flashinfer_python" / "kept.cu").exists()
    assert not (site / "flashinfer" / "data").exists()
    record = (site / "flashinfer_python-1.0.dist-info" / "RECORD").read_text()
    assert "kept.cu" in record and "big.cu" not in record


def test_parts_may_come_one_after_another(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "MIB", 1500)
    assert pack.main(["out", "--peers=flash_attn_4", "--part_mib=1"], fetched) == 0
    parts = sorted(out.iterdir(), key=lambda part: int(part.name[4:]))
    assert len(parts) > 2
    codes = []
    for part in parts:  # never two on the host at once
        host = tmp_path / "host" / "part0"
        shutil.copytree(part, host)
        codes.append(run_installer(host, tmp_path / "site").returncode)
        shutil.rmtree(host)
    assert codes == [3] * (len(parts) - 1) + [0]
    assert imported(tmp_path / "site" / "flash_attn_4", "flash_attn_4") == "7"


def test_a_damaged_piece_is_refused_by_name(out: Path, tmp_path: Path) -> None:
    assert pack.main(["out", "--peers=none"], fetched) == 0
    (piece,) = (out / "part0" / "stream_attention").iterdir()
    data = piece.read_bytes()
    piece.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    done = run_installer(out / "part0", tmp_path / "site")
    assert done.returncode == 1
    assert "ours-1.0-py3-none-any.whl: its SHA-256 is not that of the pack" in done.stderr
    assert not (tmp_path / "site" / "stream_attention").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out", "--peers=flashinfre"], "--peers='flashinfre': must be of flashinfer"),
        (["out", "--part_mib=0"], "--part_mib=0: must be at least 1"),
        (["out", "--python_version=2.7"], "--python_version='2.7': must be 3.N"),
        (["house"], "is there already; name a folder that is not"),
    ],
)
def test_bad_arguments_name_the_rule(
    out: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        pack.main(arguments, fetched)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_download_that_fails_leaves_nothing(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise subprocess.CalledProcessError(1, ["pip"])

    assert pack.main(["out"], fails) == 1
    assert "pip" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["house"]


def test_every_requirement_names_its_version() -> None:
    plan = json.loads((pack.HERE / "peers.json").read_text())
    for peer in plan["peers"].values():
        assert all("==" in requirement for requirement in peer["requirements"])
