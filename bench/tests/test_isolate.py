"""Isolated workers: whatever a contender does to its process costs its row and nobody else's."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest
import torch

from stream_attention.bench import isolate
from stream_attention.bench.campaign import Campaign, run_campaign
from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.channel import Channel, Garbled
from stream_attention.bench.contenders import Contender
from stream_attention.bench.floor import ReadCurve, ReadPoint
from stream_attention.bench.isolate import Isolation, Workers
from stream_attention.bench.lengths import uniform
from stream_attention.bench.pairs import Pairing
from stream_attention.bench.runner import Settings
from stream_attention.bench.worker_process import MODULE, WorkerEnded

CPU = torch.device("cpu")
CURVE = ReadCurve((ReadPoint(1, 1e-3, "sum"),), "cpu_cold")
SETTINGS = Settings(replays=3, cold=False, max_seconds=0.2, pairs=6)
CASES = tuple(
    AttentionCase(
        batch=1,
        lengths=uniform(tokens),
        dtype="float32",
        num_qo_heads=2,
        num_kv_heads=1,
        head_dim=16,
    )
    for tokens in (8, 24)
)
# What misbehaves does so on the first case, told by its 8 tokens, and serves the second.
PEERS = """
import atexit, os, signal, subprocess, sys, time
from stream_attention.bench.contenders import Work, peer
from stream_attention.bench.peers.sdpa import build_gather

def at_first(act):
    def build(case, pools, device):
        if case.kv_lens[0] == 8:
            act()
        return build_gather(case, pools, device)
    return build

def garbage():
    os.write(1, b"{not json\\n\\x00" * 5000)
    print("more", flush=True)
    os.write(2, b"\\xff" * 100)

def leave_a_child():
    child = subprocess.Popen(["sleep", "300"], start_new_session=True, close_fds=False)
    open(os.environ["CHILD_FILE"], "w").write(str(child.pid))

def exit_hangs():
    atexit.register(time.sleep, 300)
    sys.exit("gave up")

for name, act in {
    "good": lambda: None,
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": lambda: time.sleep(300),
    "garbage": garbage,
    "leaves": lambda: (leave_a_child(), os._exit(0)),
    "exits": exit_hangs,
    "quits": lambda: (os.write(2, b"out of luck\\n"), os._exit(7)),
}.items():
    peer(name)(at_first(act))

@peer("old_library")
def build_old(case, pools, device):
    import clashing
    assert clashing.VERSION == 1, clashing.VERSION
    return build_gather(case, pools, device)

@peer("new_library")
def build_new(case, pools, device):
    import clashing
    assert clashing.VERSION == 2, clashing.VERSION
    return build_gather(case, pools, device)
"""


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """A module of contenders that misbehave, which workers import and this process does not."""
    (tmp_path / "isolated_peers.py").write_text(PEERS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def named(name):
    return Contender(name, "peer", lambda case, pools, device: [])


def run(names, pairing=Pairing(), **options):  # noqa: B008
    options = {"case_seconds": 20.0, "warm_up": False, **options}
    isolation = Isolation(modules=("isolated_peers",), **options)
    entries = [named(name) for name in names]
    campaign = Campaign(CASES, entries, {e.name: e for e in entries}, CPU, SETTINGS, CURVE, pairing)
    with Workers(isolation, CPU, SETTINGS, CURVE) as workers:
        workers.start(names, CASES)
        *_, last = run_campaign(campaign, workers)
    return last


def table(state):
    return {
        row.contender: [c.rows[i] for c in state.cases] for i, row in enumerate(state.cases[0].rows)
    }


def outcomes(state):
    return {name: [row.outcome for row in rows] for name, rows in table(state).items()}


def gone(pid):
    for _ in range(100):  # the kernel takes a moment
        try:
            stat = pathlib.Path("/proc", str(pid), "stat").read_text()
        except OSError:
            return True
        if stat.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(scope="module")
def one_run(tmp_path_factory):
    """All of `PEERS` on both cases, with two pairs a case; the state at the end, and a folder."""
    folder = tmp_path_factory.mktemp("peers")
    (folder / "isolated_peers.py").write_text(PEERS)
    for version in (1, 2):
        installed = folder / f"v{version}"
        (installed / "extra").mkdir(parents=True)
        (installed / "extra.pth").write_text("extra\n")  # as an installed package has it
        (installed / "extra" / "clashing.py").write_text(f"VERSION = {version}\n")
    paths = {"old": (str(folder / "v1"),), "new_library": (str(folder / "v2"),)}
    names = ["crash", "good", "quits", "garbage", "exits", "hang", "leaves"]
    names += ["old_library", "new_library"]
    pairing = Pairing((("good", "new_library"), ("good", "crash")))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("CHILD_FILE", str(folder / "child"))
        return run(names, pairing, paths=paths, case_seconds=8.0), folder


def test_what_a_contender_does_to_its_process_costs_one_row(one_run):
    state, _ = one_run
    lost, served = ["failed", "ok"], ["ok", "ok"]
    assert outcomes(state) == {
        "crash": lost,
        "good": served,
        "quits": lost,
        "garbage": served,
        "exits": lost,
        "hang": lost,
        "leaves": lost,
        "old_library": served,
        "new_library": served,
    }
    reasons = {name: rows[0].reasons for name, rows in table(state).items() if rows[0].reasons}
    assert reasons == {
        "crash": ("the worker was killed by SIGSEGV, at: run",),
        "quits": ("the worker ended with status 7, at: run: out of luck",),
        "exits": ("SystemExit: gave up",),
        "hang": ("the worker gave no result within 8 s, at: run",),
        "leaves": ("the worker ended with status 0, at: run",),
    }


def test_a_row_says_what_ran_and_how_long_it_took(one_run):
    rows = [row for rows in table(one_run[0]).values() for row in rows]
    assert all(row.seconds > 0 for row in rows)
    good = table(one_run[0])["good"][0]
    assert good.resolved == "good" and good.check.ok and good.timing.n == 3
    assert good.timed_allocations is None and good.workspace_bytes is None


def test_what_a_worker_started_ends_with_it_also_from_a_session_of_its_own(one_run):
    assert gone(int((one_run[1] / "child").read_text()))


def test_libraries_that_clash_live_in_folders_that_one_worker_sees(one_run):
    # Which of two versions each has imported, the contenders assert themselves.
    found = outcomes(one_run[0])
    assert found["old_library"] == found["new_library"] == ["ok", "ok"]
    assert "clashing" not in sys.modules and "isolated_peers" not in sys.modules


def test_pairs_run_in_the_worker_of_the_second_and_a_crash_costs_one(one_run):
    state, _ = one_run
    found = {(pair.case, pair.second): pair for pair in state.pairs}
    assert [pair.outcome for pair in found.values()] == ["ok", "failed", "ok", "ok"]
    (reason,) = found[CASES[0], "crash"].reasons
    assert reason == "the worker was killed by SIGSEGV, at: run"
    pair = found[CASES[0], "new_library"]
    assert pair.timing.n == 6 and pair.resolved == ("good", "new_library")
    assert all(check.ok for check in pair.checks) and pair.seconds > 0


def test_a_worker_that_dies_at_import_is_begun_once_more_and_then_no_more(peers):
    count = peers / "imports"
    (peers / "isolated_peers.py").write_text(
        f"import os; open({str(count)!r}, 'a').write('x'); os.abort()"
    )
    state = run(["good"])
    assert outcomes(state) == {"good": ["failed", "failed"]}
    assert count.read_text() == "xx"
    for row in table(state)["good"]:
        (reason,) = row.reasons
        assert reason.startswith("its worker did not start: the worker was killed by SIGABRT, at: ")


def test_a_contender_that_is_not_there_is_not_looked_for_again(peers):
    begun = []

    def command(read_fd, write_fd):
        begun.append(read_fd)
        return isolate.worker_command(read_fd, write_fd)

    state = run(["absent"], command=command)
    assert len(begun) == 1 and outcomes(state) == {"absent": ["failed", "failed"]}
    (reason,) = table(state)["absent"][1].reasons
    assert "did not start: LookupError: absent is no contender here" in reason


def test_a_warm_up_runs_every_distinct_tiny_case_and_its_crash_costs_no_row(peers):
    seen = peers / "seen"
    (peers / "isolated_peers.py").write_text(
        "import os\n"
        "from stream_attention.bench.contenders import peer\n"
        "from stream_attention.bench.peers.sdpa import build_gather\n"
        "@peer('good')\n"
        "def build(case, pools, device):\n"
        f"    print(case.name, file=open({str(seen)!r}, 'a'))\n"
        "    return build_gather(case, pools, device)\n"
        "@peer('crash')\n"
        "def build_crash(case, pools, device):\n"
        f"    os.path.exists({str(peers / 'once')!r}) or (open({str(peers / 'once')!r}, 'w'), "
        "os.abort())\n"
        "    return build_gather(case, pools, device)\n"
    )
    state = run(["good", "crash"], warm_up=True)
    assert outcomes(state) == {"good": ["ok", "ok"], "crash": ["ok", "ok"]}
    tiny = list(dict.fromkeys(case.tiny().name for case in CASES))
    assert seen.read_text().splitlines()[: len(tiny)] == tiny


SLOW_WARM_UP = """
import os, time
from stream_attention.bench.contenders import peer
from stream_attention.bench.peers.sdpa import build_gather

seen = []

def slow(seconds):
    def build(case, pools, device):
        if case.name not in seen:
            seen.append(case.name)
            time.sleep(seconds)
        return build_gather(case, pools, device)
    return build

@peer("hang")
def hang(case, pools, device):
    if not os.path.exists("FOLDER/hung"):
        open("FOLDER/hung", "w").close()
        time.sleep(300)
    return build_gather(case, pools, device)

peer("steady")(slow(1.5))
"""


def warmed(peers, name, cases=CASES, **options):
    """The seconds of a warm-up of one peer, and the first worker's state after it."""
    (peers / "isolated_peers.py").write_text(SLOW_WARM_UP.replace("FOLDER", str(peers)))
    isolation = Isolation(modules=("isolated_peers",), **options)
    with Workers(isolation, CPU, SETTINGS, CURVE) as workers:
        workers.start([name], cases)
        alive = workers._slot(name).process is not None
        return workers.spent.seconds["warm-up"], alive


def test_a_peer_that_hangs_in_its_warm_up_costs_the_limit_on_one_case_of_it(peers):
    seconds, alive = warmed(peers, "hang", warm_up_seconds=3.0)
    assert 3 <= seconds < 20 and not alive
    state = run(["hang"], warm_up=True, warm_up_seconds=3.0)  # it hangs no more
    assert outcomes(state) == {"hang": ["ok", "ok"]}


def test_a_warm_up_that_goes_on_is_not_cut_short(peers):
    three = tuple(dataclasses.replace(CASES[0], num_qo_heads=heads) for heads in (1, 2, 4))
    seconds, alive = warmed(peers, "steady", three, warm_up_seconds=4.0)
    assert seconds > 4.5 and alive


@pytest.mark.parametrize(("moves", "limit"), [(True, 0.6), (False, 0.2)])
def test_a_request_is_limited_as_a_whole_and_by_its_steps(monkeypatch, moves, limit):
    class Process:
        channel = exit_fd = None
        stepped = time.monotonic()

        def reply(self, seconds):
            self.stepped = time.monotonic() if moves else self.stepped

        def timed_out(self, seconds):
            return WorkerEnded(f"after {seconds}")

    ended = []
    monkeypatch.setattr(isolate, "wait_for_any", lambda processes, seconds: time.sleep(0.01))
    with Workers(Isolation(), CPU, SETTINGS, CURVE) as workers:
        slot = workers._slot("a")

        def begin(slot):
            slot.process = Process()

        def done(slot, reply, reason):
            ended.append(reason)
            slot.process = None

        workers._together([slot], begin, done, 0.6, 0.2)
    assert ended == [f"after {limit}"]


def test_no_more_workers_start_at_once_than_there_are_cpus(peers, monkeypatch):
    monkeypatch.setattr(isolate.os, "cpu_count", lambda: 2)
    isolation = Isolation(modules=(), warm_up=False)
    running, most = set(), []
    with Workers(isolation, CPU, SETTINGS, CURVE) as workers:

        class Process:
            channel = exit_fd = None
            stepped = 0.0

            def reply(self, seconds):
                return {} if len(running) >= 2 or not waiting else None

        def begin(slot):
            waiting.remove(slot.name)
            running.add(slot.name)
            most.append(len(running))
            slot.process = Process()

        monkeypatch.setattr(isolate, "wait_for_any", lambda processes, seconds: None)
        slots = [workers._slot(name) for name in "abcde"]
        waiting = [slot.name for slot in slots]
        workers._together(slots, begin, lambda slot, *reply: running.remove(slot.name), 5.0)
        for slot in slots:
            slot.process = None
    assert max(most) == 2 and not waiting


@pytest.mark.parametrize("line", [b"[" * 10**5, b'{"a":' * 10**5, b"3", b"{", b"\xff"])
def test_a_line_that_is_no_message_is_garbled_whatever_it_is(line):
    read_fd, write_fd = os.pipe()
    channel = Channel(read_fd, write_fd)
    writer = threading.Thread(target=os.write, args=(write_fd, line + b"\n"))
    writer.start()
    with pytest.raises(Garbled, match="not a message"):
        channel.receive(5.0)
    writer.join()
    channel.close()


def test_a_worker_whose_parent_has_gone_does_not_begin():
    child = subprocess.run(
        [sys.executable, "-m", MODULE, str(2**30), "0", "1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
    )
    assert (child.returncode, child.stderr) == (137, b"")
