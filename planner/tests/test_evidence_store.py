"""A store loses nothing, changes nothing, and reads nothing that is not as it was written."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
import warnings

import pytest

from stream_attention.core import atomic_files
from stream_attention.planner import evidence_store
from stream_attention.planner.evidence_store import (
    INDEX,
    EvidenceStore,
    EvidenceStoreError,
    EvidenceStoreWarning,
)
from stream_attention.planner.evidence_testing import (
    COMMIT,
    good_cell,
    good_fingerprint,
    good_pair,
    good_row,
    lost_row,
)

SHORT = good_cell((64,))
FIRST = (good_row(), good_row(route="triton"), lost_row(), good_pair())
SECOND = (good_row(SHORT), good_pair(SHORT))


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", EvidenceStoreWarning)
        yield


@pytest.fixture
def store(tmp_path):
    """A store of two files."""
    store = EvidenceStore(tmp_path / "evidence")
    store.append(FIRST)
    store.append(SECOND)
    return store


def contents(folder):
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name != evidence_store.LOCK
    }


def names(store):
    return [name for name, _ in store.files()]


def fail(*args, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_is_appended_is_read_also_by_another(store):
    assert {row.id for row in store.rows()} == {row.id for row in (*FIRST, *SECOND)}
    assert set(EvidenceStore(store.path).rows()) == {*FIRST, *SECOND}


def test_a_file_is_named_after_its_content_and_the_index_has_its_whole_hash(tmp_path):
    store = EvidenceStore(tmp_path)
    name = store.append(FIRST)
    content = (tmp_path / name).read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    assert name == f"sm_90-{sha256[:16]}.jsonl" and content.count(b"\n") == len(FIRST)
    assert json.loads((tmp_path / INDEX).read_text()) == {
        "schema": "stream_attention.evidence_index/1",
        "files": {name: {"sha256": sha256, "rows": len(FIRST)}},
    }
    assert store.files() == ((name, sha256),)


def test_appending_changes_no_file_that_was_there(store):
    before = contents(store.path)
    store.append([good_row(route="torch")])
    after = contents(store.path)
    del before[INDEX]
    assert before.items() <= after.items() and len(after) == len(before) + 2


def test_the_same_rows_again_are_the_same_file_and_come_once(store):
    before = contents(store.path)
    assert store.append(FIRST) in before and contents(store.path) == before
    store.append([*FIRST, good_row(route="torch")])
    ids = [row.id for row in store.rows()]
    assert len(ids) == len(set(ids)) == len(FIRST) + len(SECOND) + 1


def test_rows_are_found_for_resuming(store):
    (row,) = store.find(SHORT.digest, "sm90_decode", good_fingerprint().digest, COMMIT)
    assert row == SECOND[0]
    pair = ("sm90_decode", "flashinfer_fa2_tensor_core")
    assert store.find(SHORT.digest, pair) == (SECOND[1],)
    assert store.find(good_cell().digest, "flashinfer_fa3") == (lost_row(),)
    assert store.find(SHORT.digest, "triton") == ()
    assert store.find(SHORT.digest, "sm90_decode", good_fingerprint("cpu").digest) == ()
    assert store.find(SHORT.digest, "sm90_decode", None, "f" * 40) == ()
    assert store.find(SHORT.digest, tuple(reversed(pair))) == ()
    EvidenceStore(store.path).append([good_row(SHORT, "triton")])  # by another process
    assert store.find(SHORT.digest, "triton") == (good_row(SHORT, "triton"),)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ((), "needs at least one row"),
        ((None,), "rows=None: must be EvidenceRow or PairRow"),
        ((good_row(), good_row(arch="cpu")), "'cpu', 'sm_90': must be of one architecture"),
        ((good_row(environment=good_fingerprint("../x")),), r"'\.\./x': must be of one arch"),
    ],
)
def test_rows_that_are_no_file_are_refused_and_nothing_is_made(tmp_path, rows, said):
    with pytest.raises(ValueError, match=said):
        EvidenceStore(tmp_path / "evidence").append(rows)
    assert list(tmp_path.iterdir()) == []


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def drop_line(path):
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))


def to_folder(path):
    path.unlink()
    path.mkdir()


def to_pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def to_socket(path):
    path.unlink(missing_ok=True)
    os.mknod(path, stat.S_IFSOCK | 0o600)


KINDS = [
    (to_pipe, "Is a pipe, must be a regular file"),
    (to_socket, "Is a socket, must be a regular file"),
    (lambda path: (path.unlink(missing_ok=True), path.mkdir()), "Is a directory, must be a regu"),
    (lambda path: (path.unlink(missing_ok=True), path.symlink_to("/dev/zero")), "Is a device, m"),
]


@pytest.mark.parametrize(("damage", "said"), KINDS)
@pytest.mark.parametrize("place", ["listed", "new", "index.json"])
def test_what_is_no_regular_file_is_refused_by_name_and_nobody_waits(store, damage, said, place):
    name = {"listed": names(store)[0], "new": f"sm_90-{'0' * 16}.jsonl"}.get(place, place)
    damage(store.path / name)
    with pytest.raises(EvidenceStoreError) as caught:
        EvidenceStore(store.path).rows()
    assert name in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize(("damage", "said"), KINDS)
def test_what_is_no_regular_file_is_not_written_over(store, tmp_path, damage, said):
    name = EvidenceStore(tmp_path / "other").append([good_row(route="torch")])
    damage(store.path / name)
    with pytest.raises(EvidenceStoreError, match=f"{name}.*{said}.*rows are not in the store"):
        store.append([good_row(route="torch")])


def test_a_file_named_after_another_architecture_is_not_adopted(store):
    name = names(store)[0]
    other = name.replace("sm_90", "sm_80")
    said = f"{other}: .*is named after 'sm_80', and has rows of 'sm_90'"
    (store.path / name).rename(store.path / other)
    with pytest.raises(EvidenceStoreError, match=said):
        store.rows()
    store.append([good_row(route="torch")])
    index = json.loads((store.path / INDEX).read_text())
    assert other not in index["files"]
    index["files"][other] = index["files"].pop(name)  # as a version that adopted it wrote
    (store.path / INDEX).write_text(json.dumps(index))
    with pytest.raises(EvidenceStoreError, match=said):
        store.files()


def test_a_row_without_a_text_is_refused_by_its_place(tmp_path):
    row = good_row(route="torch")
    for value in (10**400, 10**5000):
        for name in ("floor_us", "workspace_bytes"):
            made = dataclasses.replace(row)
            object.__setattr__(made, name, value)  # as no constructor lets it be
            with pytest.raises(ValueError, match=r"^(rows\[1\]: has no text|line 2: )"):
                EvidenceStore(tmp_path / "evidence").append([good_row(), made])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip, "was changed: its SHA-256 is"),
        (cut, "was changed"),
        (drop_line, "was changed"),
        (lambda path: path.write_bytes(b""), "was changed"),
        (lambda path: path.unlink(), "is in index.json, and not there"),
        (to_folder, "Is a directory"),
    ],
)
def test_a_damaged_file_is_refused_by_name_and_the_rest_can_be_added_to(store, damage, said):
    bad, good = names(store)
    damage(store.path / bad)
    for reader in (store, EvidenceStore(store.path)):
        with pytest.raises(EvidenceStoreError, match="cannot be trusted") as caught:
            reader.rows()
        assert f"{bad}: {said}" in str(caught.value) and good not in str(caught.value)
    name = store.append([good_row(route="torch")])  # what is new is not lost over it
    assert (store.path / name).exists()
    with pytest.raises(EvidenceStoreError, match=bad):
        store.find(SHORT.digest, "triton")


def test_every_damage_is_named_at_once(store):
    first, second = names(store)
    flip(store.path / first)
    (store.path / second).unlink()
    (store.path / "notes.jsonl").write_text("{}\n")
    with pytest.raises(EvidenceStoreError) as caught:
        store.rows()
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == sorted(
        [first, second, "notes.jsonl"]
    )


def test_a_file_that_is_not_in_the_index_and_not_named_after_itself_is_refused(store):
    bad = f"sm_90-{'0' * 16}.jsonl"
    (store.path / bad).write_bytes((store.path / names(store)[0]).read_bytes())
    with pytest.raises(EvidenceStoreError, match=f"{bad}: is not in index.json, and no file"):
        store.rows()


@pytest.mark.parametrize(
    "content",
    [b"", b"{}\n", b"[" * 100000 + b"\n", b"\xff\n", b"1" * 10000 + b"\n", b"null", b"\n"],
)
def test_a_file_of_no_rows_is_refused_also_where_it_is_named_after_its_content(store, content):
    name = f"sm_90-{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    (store.path / name).write_bytes(content)
    with pytest.raises(EvidenceStoreError, match=f"{name}: is not in index.json, and no file"):
        store.rows()


def test_a_row_that_is_not_in_its_canonical_text_is_refused(store):
    name = names(store)[0]
    lines = [json.loads(line) for line in (store.path / name).read_bytes().splitlines()]
    content = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    sha256 = hashlib.sha256(content).hexdigest()
    other = f"sm_90-{sha256[:16]}.jsonl"
    (store.path / other).write_bytes(content)
    index = json.loads((store.path / INDEX).read_text())
    index["files"][other] = {"sha256": sha256, "rows": len(lines)}
    (store.path / INDEX).write_text(json.dumps(index))
    with pytest.raises(EvidenceStoreError, match=f"{other}: line 1: must be the canonical text"):
        store.rows()


def edit(change):
    def damage(path):
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    return damage


def of_first(**changes):
    return edit(lambda index: index["files"][min(index["files"])].update(changes))


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        lambda path: path.write_text(""),
        lambda path: path.write_text("[" * 100000),
        lambda path: path.write_text("null"),
        edit(lambda index: index.update(schema="stream_attention.evidence_index/2")),
        edit(lambda index: index.update(more=1)),
        edit(lambda index: index.update(files=[])),
        edit(lambda index: index["files"].update({"../x.jsonl": {"sha256": "0" * 64, "rows": 1}})),
        of_first(sha256="0" * 64),
        of_first(sha256=None),
        of_first(rows=True),
        of_first(rows=0),
        of_first(more=1),
    ],
)
def test_a_broken_index_is_refused_and_what_is_appended_is_not_lost(store, damage):
    damage(store.path / INDEX)
    broken = (store.path / INDEX).read_bytes()
    with pytest.raises(EvidenceStoreError, match=r"index.json is broken .*; remove it"):
        store.rows()
    with pytest.raises(EvidenceStoreError, match=r"is written, index.json is not"):
        store.append([good_row(route="torch")])
    assert (store.path / INDEX).read_bytes() == broken
    (store.path / INDEX).unlink()
    with pytest.warns(EvidenceStoreWarning, match="adopted"):
        assert set(store.rows()) == {*FIRST, *SECOND, good_row(route="torch")}


def test_an_index_of_another_number_of_rows_is_refused(store):
    of_first(rows=9)(store.path / INDEX)
    with pytest.raises(EvidenceStoreError, match=r"rows, index.json has 9"):
        store.rows()


CRASH = """
import os, sys
from stream_attention.planner import evidence_store
from stream_attention.planner.evidence_testing import good_row
evidence_store.EvidenceStore._write_index = lambda *args: os._exit(9)
evidence_store.EvidenceStore(sys.argv[1]).append([good_row(route="torch")])
"""
WRITER = """
import sys
from stream_attention.planner.evidence_store import EvidenceStore
from stream_attention.planner.evidence_testing import good_row
store = EvidenceStore(sys.argv[1])
for number in range(int(sys.argv[3])):
    store.append([good_row(command=f"{sys.argv[2]} {number}")])
"""


def start(program, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], env=environment)


def test_a_file_of_a_writer_that_crashed_before_the_index_is_adopted_and_that_is_said(store):
    assert start(CRASH, str(store.path)).wait() == 9
    with pytest.warns(EvidenceStoreWarning, match=r"sm_90-\w+.jsonl not in index.json.*adopted"):
        assert good_row(route="torch") in store.rows()
    assert len(json.loads((store.path / INDEX).read_text())["files"]) == 2  # reading writes nothing
    with pytest.warns(EvidenceStoreWarning, match="adopted"):
        store.append([good_row(SHORT, "torch")])
    assert len(store.rows()) == len(FIRST) + len(SECOND) + 2  # without a warning


def test_two_processes_that_append_lose_nothing(tmp_path):
    store, count = EvidenceStore(tmp_path), 25
    writers = [start(WRITER, str(tmp_path), name, str(count)) for name in "ab"]
    while any(writer.poll() is None for writer in writers):
        with warnings.catch_warnings():  # between a file and the index it is to be adopted
            warnings.simplefilter("ignore", EvidenceStoreWarning)
            store.rows()  # nothing that is half written is ever seen
    assert [writer.wait() for writer in writers] == [0, 0]
    commands = {row.command for row in store.rows()}
    assert commands == {f"{name} {number}" for name in "ab" for number in range(count)}


def test_threads_of_one_store_lose_nothing(tmp_path):
    store = EvidenceStore(tmp_path)
    rows = [good_row(command=str(number)) for number in range(20)]
    threads = [threading.Thread(target=store.append, args=([row],)) for row in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(store.rows()) == set(rows)


def test_a_lock_that_is_held_is_waited_for_and_then_said(store):
    store.lock_timeout_s = 0.1
    before = contents(store.path)
    with (store.path / evidence_store.LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(EvidenceStoreError, match=r"held .lock for 0.1 s.*are not in the store"):
            store.append([good_row(route="torch")])
        assert contents(store.path) == before
        store.rows()  # readers wait for nobody
    store.append([good_row(route="torch")])


def test_a_lock_that_waits_gets_it(store):
    with (store.path / evidence_store.LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        threading.Timer(0.2, lambda: fcntl.flock(other, fcntl.LOCK_UN)).start()
        store.append([good_row(route="torch")])
    assert good_row(route="torch") in store.rows()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_said(store, monkeypatch, number):
    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(EvidenceStoreError, match=f"could not be locked.*{os.strerror(number)}"):
        store.append([good_row(route="torch")])


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_is_read_only_can_be_read_and_is_said(store, monkeypatch, number):
    real = os.open

    def read_only(path, flags, *args, **options):
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise OSError(number, os.strerror(number))
        return real(path, flags, *args, **options)

    before = contents(store.path)
    monkeypatch.setattr(os, "open", read_only)
    assert len(store.rows()) == len(FIRST) + len(SECOND)
    with pytest.raises(EvidenceStoreError, match=f"{os.strerror(number)}.*not in the store"):
        store.append([good_row(route="torch")])
    assert contents(store.path) == before


def test_a_folder_in_no_folder_is_said(tmp_path):
    store = EvidenceStore(tmp_path / "a" / "b")
    with pytest.raises(EvidenceStoreError, match=r"could not be locked.*No such file"):
        store.append(FIRST)
    with pytest.raises(EvidenceStoreError, match=r"could not be read .No such file"):
        store.rows()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["fsync", "replace", "fchmod"])
def test_a_disk_that_is_full_loses_nothing(store, monkeypatch, step):
    before = contents(store.path)
    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(EvidenceStoreError, match=r"No space left.*rows are not in the store"):
            store.append([good_row(route="torch")])
    assert contents(store.path) == before
    store.append([good_row(route="torch")])
    assert good_row(route="torch") in store.rows()


def test_a_disk_that_is_full_after_the_file_keeps_the_rows(store, monkeypatch):
    before, real = contents(store.path), atomic_files.replace_file

    def of_index_fails(path, content):
        return fail() if path.name == INDEX else real(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(evidence_store, "replace_file", of_index_fails)
        with pytest.raises(EvidenceStoreError, match=r"is written, index.json is not .No space"):
            store.append([good_row(route="torch")])
    assert before.items() <= contents(store.path).items()
    with pytest.warns(EvidenceStoreWarning, match="adopted"):
        assert good_row(route="torch") in store.rows()


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EXDEV, errno.EPERM])
def test_a_rename_that_a_network_loses_is_said_and_loses_nothing(store, monkeypatch, number, done):
    before, real = contents(store.path), os.replace

    def lossy(source, target):
        if done:
            real(source, target)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lossy)
        said = "is written, and may not" if done else "could not be written"
        with pytest.raises(EvidenceStoreError, match=f"{said}.*{os.strerror(number)}"):
            store.append([good_row(route="torch")])
    after = contents(store.path)
    assert before.items() <= after.items() and len(after) == len(before) + done
    if done:
        with pytest.warns(EvidenceStoreWarning, match="adopted"):
            assert good_row(route="torch") in store.rows()


def test_a_file_of_that_name_with_other_content_is_not_written_over(store, tmp_path):
    name = EvidenceStore(tmp_path / "other").append([good_row(route="torch")])
    (store.path / name).write_text("mine")
    with pytest.raises(EvidenceStoreError, match=f"{name} is there with other content"):
        store.append([good_row(route="torch")])
    assert (store.path / name).read_text() == "mine"


def test_a_file_that_was_lost_is_restored_by_its_rows(store):
    name = names(store)[0]
    rows = FIRST if store.append(FIRST) == name else SECOND
    (store.path / name).unlink()
    assert store.append(rows) == name
    assert len(store.rows()) == len(FIRST) + len(SECOND)


def test_other_files_of_the_folder_are_let_alone(store):
    (store.path / "README.md").write_text("notes")
    (store.path / ".stream_attention_x.part").write_text("a draft of a writer that crashed")
    store.append([good_row(route="torch")])
    assert len(store.rows()) == len(FIRST) + len(SECOND) + 1
    assert (store.path / "README.md").read_text() == "notes"
