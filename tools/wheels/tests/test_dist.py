"""`./bazelw run //tools/wheels:dist -- DIR`."""

from __future__ import annotations

from pathlib import Path

import dist
import pytest


@pytest.fixture
def called_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    house = tmp_path / "house"
    house.mkdir()
    (house / "a-1-py3-none-any.whl").write_bytes(b"wheel")
    monkeypatch.setattr(dist, "WHEELHOUSE", house)
    return tmp_path


def test_wheels_land_in_a_folder_beside_what_is_there(
    called_from: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = called_from / "new" / "dist"
    assert dist.main(["new/dist"]) == 0
    assert "5 bytes" in capsys.readouterr().out
    (target / "kept.txt").write_text("mine")
    (target / "a-1-py3-none-any.whl").write_bytes(b"stale")
    assert dist.main(["new/dist"]) == 0
    assert (target / "a-1-py3-none-any.whl").read_bytes() == b"wheel"
    assert sorted(path.name for path in target.iterdir()) == ["a-1-py3-none-any.whl", "kept.txt"]


def test_a_file_in_the_way_is_left_alone(
    called_from: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (called_from / "dist").write_text("mine")
    assert dist.main(["dist"]) == 1
    assert "must be a folder, or not exist yet" in capsys.readouterr().err
    assert (called_from / "dist").read_text() == "mine"


@pytest.mark.parametrize("args", [[], ["a", "b"], ["--help"]])
def test_other_arguments_print_the_usage(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert dist.main(args) == 2
    assert dist.USAGE in capsys.readouterr().err
