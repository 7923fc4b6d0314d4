"""A file is whole or as before, whatever step fails, and no draft stays behind."""

import errno
import os
import stat

import pytest

from stream_attention.core.atomic_files import read_file, replace_file, sync_folder


def failing(number):
    def fail(*args, **options):
        raise OSError(number, os.strerror(number))

    return fail


def names(folder):
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("step", ["fchmod", "fsync", "replace"])
@pytest.mark.parametrize("before", [None, b"old"])
def test_a_write_that_breaks_off_leaves_the_folder_as_it_was(tmp_path, monkeypatch, step, before):
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    monkeypatch.setattr(os, step, failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new and longer")
    assert names(tmp_path) == ([] if before is None else ["file"])
    assert before is None or path.read_bytes() == before


@pytest.mark.parametrize("number", [errno.EPERM, errno.EBUSY, errno.EXDEV])
def test_what_cannot_be_replaced_is_written_in_place_only_where_that_is_asked(
    tmp_path, monkeypatch, number
):
    path = tmp_path / "file"
    path.write_bytes(b"old and longer")
    monkeypatch.setattr(os, "replace", failing(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old and longer"
    replace_file(path, b"new", in_place=True)
    assert path.read_bytes() == b"new" and names(tmp_path) == ["file"]


def test_content_is_synced_before_it_has_its_name_and_the_name_after(tmp_path, monkeypatch):
    steps = []
    fsync, replace = os.fsync, os.replace

    def spy_sync(handle):
        is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        steps.append("folder" if is_folder else os.pread(handle, 100, 0))
        fsync(handle)

    def spy_replace(source, target):
        steps.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_sync)
    monkeypatch.setattr(os, "replace", spy_replace)
    replace_file(tmp_path / "file", b"content")
    assert steps == [b"content", "rename", "folder"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_syncs_no_folder_is_no_error(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", failing(number))
    sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        sync_folder(tmp_path)


def test_the_mode_is_that_of_the_umask_or_the_one_asked_for(tmp_path):
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "new", b"")
        replace_file(tmp_path / "own", b"", mode=0o600)
    finally:
        assert os.umask(before) == 0o027
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new", "own")]
    assert modes == [0o640, 0o600]


def test_a_file_is_read_also_through_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "file") == read_file(tmp_path / "link") == b"content"
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")


def test_what_is_no_file_is_not_read_and_nobody_waits(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name, said in (("pipe", "Is a pipe"), ("device", "Is a device"), ("", "Is a directory")):
        with pytest.raises(OSError, match=f"{said}, must be a regular file"):
            read_file(tmp_path / name)


def test_a_pipe_that_comes_into_a_file_s_place_is_not_waited_for(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"content")
    os.mkfifo(tmp_path / "pipe")
    as_file = os.stat(tmp_path / "file")
    monkeypatch.setattr(os, "stat", lambda path: as_file)
    with pytest.raises(OSError, match="Is a pipe, must be a regular file"):
        read_file(tmp_path / "pipe")
