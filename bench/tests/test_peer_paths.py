"""Folders for the import path of a contender's worker: their form, and who gets which."""

import os

import pytest

from stream_attention.bench.peer_paths import folders_of, parse_paths

NAMES = ("flashinfer_xqa", "flashinfer_fa2", "sdpa")


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    return {name: str(tmp_path / name) for name in ("a", "b", "c")}


def test_names_and_beginnings_get_absolute_folders(folders):
    entries = [f"flashinfer=a{os.pathsep}{folders['b']},sdpa=c", "flashinfer_xqa=b"]
    paths = parse_paths(entries, NAMES)
    assert paths == {
        "flashinfer": (folders["a"], folders["b"]),
        "sdpa": (folders["c"],),
        "flashinfer_xqa": (folders["b"],),
    }
    assert folders_of("flashinfer_fa2", paths) == (folders["a"], folders["b"])
    assert folders_of("flashinfer_xqa", paths) == (folders["b"],)
    assert folders_of("torch", paths) == () and parse_paths([], NAMES) == {}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("flashinfer", "--peer_paths='flashinfer': must be NAME_OR_PREFIX=DIR"),
        ("=a", "--peer_paths='=a': must be NAME_OR_PREFIX=DIR"),
        ("sdpa=", "--peer_paths='sdpa=': must be NAME_OR_PREFIX=DIR"),
        ("flashinfr=a", "--peer_paths='flashinfr': must begin the name of a contender of this run"),
        ("sdpa=a,sdpa=b", "--peer_paths='sdpa': must be given once; use DIR:DIR"),
        ("sdpa=absent", "absent': must be a folder that exists"),
        ("other=absent,x", "3 faults"),
    ],
)
def test_what_is_no_folder_of_a_contender_is_refused(folders, entry, message):
    with pytest.raises(ValueError, match=message):
        parse_paths([entry], NAMES)
