"""A path is relative to where its user stands."""

from pathlib import Path

import pytest

from stream_attention.core.user_paths import user_path


def test_a_path_is_relative_to_where_the_user_stands(monkeypatch, tmp_path):
    monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)
    assert user_path("a/b") == Path("a/b") and user_path("/a") == Path("/a")
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", "")
    assert user_path("a/b") == Path("a/b")
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    assert user_path("a/b") == tmp_path / "a" / "b" == user_path(Path("a/b"))
    assert user_path("/a") == Path("/a")


def test_an_empty_path_is_refused():
    with pytest.raises(ValueError, match="path='': must name a file or a folder"):
        user_path("")
