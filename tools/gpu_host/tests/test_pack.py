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
        (["out", "--python_version=3.²"], "--python_version='3.²': must be 3.N"),
        (["out", "--python_version=3.١٢"], "--python_version='3.١٢': must be 3.N"),
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


def site_of_ours(out: Path, tmp_path: Path) -> Path:
    """Packs our wheel; gives the folder that it will be installed into."""
    assert pack.main(["out", "--peers=none"], fetched) == 0
    return tmp_path / "site" / "stream_attention"


def test_a_folder_that_the_installer_did_not_make_is_left_alone(out: Path, tmp_path: Path) -> None:
    folder = site_of_ours(out, tmp_path)
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("years of work")
    done = run_installer(out / "part0", tmp_path / "site")
    assert done.returncode == 1
    assert done.stderr.startswith(f"install: {folder}: was not made by this program")
    assert "move it away, or name another SITE" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]
    assert [path.name for path in folder.parent.iterdir()] == ["stream_attention"]


@pytest.mark.parametrize("name", [".stream_attention.new", ".stream_attention.old", ".pieces"])
def test_nor_does_it_delete_such_a_folder_in_its_way(out: Path, tmp_path: Path, name: str) -> None:
    folder = site_of_ours(out, tmp_path).with_name(name)
    assert run_installer(out / "part0", tmp_path / "site").returncode == 0
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    done = run_installer(out / "part0", tmp_path / "site")
    assert done.returncode == 1 and f"{folder}: was not made by this program" in done.stderr
    assert (folder / "thesis.tex").exists()
    assert imported(tmp_path / "site" / "stream_attention", "ours") == "7"


def test_a_link_is_not_followed(out: Path, tmp_path: Path) -> None:
    folder = site_of_ours(out, tmp_path)
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "house")
    done = run_installer(out / "part0", tmp_path / "site")
    assert done.returncode == 1 and f"{folder}: was not made by this program" in done.stderr
    assert folder.is_symlink() and len(list((tmp_path / "house").iterdir())) == 1


def test_what_it_made_and_an_empty_folder_are_replaced(out: Path, tmp_path: Path) -> None:
    folder = site_of_ours(out, tmp_path)
    folder.mkdir(parents=True)
    for _ in range(2):
        done = run_installer(out / "part0", tmp_path / "site")
        assert done.returncode == 0, done.stderr
        assert imported(folder, "ours") == "7" and not (folder / "stale.py").exists()
        assert [path.name for path in folder.parent.iterdir()] == ["stream_attention"]
        (folder / "stale.py").write_text("of the installation before")


def test_the_old_one_stays_where_the_new_one_cannot_be_unpacked(out: Path, tmp_path: Path) -> None:
    folder = site_of_ours(out, tmp_path)
    assert run_installer(out / "part0", tmp_path / "site").returncode == 0
    (tmp_path / "house" / "ours-1.0-py3-none-any.whl").write_text("no wheel")
    assert pack.main(["second", "--peers=none"], fetched) == 0
    done = run_installer(tmp_path / "second" / "part0", tmp_path / "site")
    assert done.returncode == 1 and "Traceback" not in done.stderr.partition("install: ")[2]
    assert imported(folder, "ours") == "7"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ("[]", "lacks what a pack has"),
        ('{"paths": {"..": [""]}, "wheels": []}', "has a name that is none of a file"),
        ('{"paths": {"a": [3]}, "wheels": []}', "has a name that is no text"),
        ('{"num_parts": 1, "paths": [], "wheels": []}', "has a list where a pack has names"),
    ],
)
def test_a_manifest_that_is_none_is_an_error_of_one_line(
    out: Path, tmp_path: Path, text: str, message: str
) -> None:
    site_of_ours(out, tmp_path)
    manifest = out / "part0" / "manifest.json"
    manifest.write_text(text)
    done = run_installer(out / "part0", tmp_path / "site")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"install: {manifest}: {message}")
    assert not (tmp_path / "site").exists()


def test_a_house_without_wheels_is_an_error(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pack, "WHEELHOUSE", tmp_path / "none")
    assert pack.main(["out"], fetched) == 1
    assert f"pack: {tmp_path / 'none'}: has no wheels of ours; use " in capsys.readouterr().err
    assert not out.exists()
