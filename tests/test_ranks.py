"""The same function on several processes: what comes back, what is printed, and who is blamed."""

import importlib.util
import json
import os
import random
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import warnings

import ddp_worker
import nbclient
import nbformat
import numpy as np
import psutil
import pytest
import ranked
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import dxdy_nb as dx
from dxdy_nb.ranks import failure, pool, worker
from dxdy_nb.ranks.output import Output

pytestmark = pytest.mark.filterwarnings("ignore:launch. 3 ranks share:UserWarning")  # a machine of two cores


def pids():
    return os.getpid()


# What comes back


def test_a_warm_process_serves_one_call_after_another():
    first = dx.launch(pids)
    assert len(set(first)) == 2 and os.getpid() not in first
    assert dx.launch(pids) == first
    assert dx.launch(pids, world_size=1) == first[:1]
    assert dx.launch(pids, world_size=3)[:2] == first


@pytest.mark.slow
def test_processes_that_nobody_uses_end(monkeypatch):
    monkeypatch.setattr(pool, "IDLE", 0.2)
    idle = dx.launch(pids)
    wait_until_gone(idle)
    assert pool._POOL.workers == [] and not os.path.exists(pool._POOL.folder)


def test_a_session_knows_its_place():
    def place(total):
        with dx.session(device="cpu") as s:
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
            return s.rank, s.world_size, s.local_rank, s.mean(total * s.rank, 1), [os.environ[name] for name in names]

    assert dx.launch(place, 3.0) == [(0, 2, 0, 1.5, ["0", "0", "2", "2"]), (1, 2, 1, 1.5, ["1", "1", "2", "2"])]


def test_an_edited_function_takes_effect(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for value in (1, 22):
        exec(f"def answer(): return {value}", scope := {"__name__": "__main__"})
        (tmp_path / "edited_helper.py").write_text(f"value = {value}\n")

        def helped():
            import edited_helper

            return edited_helper.value

        assert dx.launch(scope["answer"]) == [value, value]
        assert dx.launch(helped) == [value, value]


def test_a_file_that_cannot_be_imported_goes_along(tmp_path):
    text = "class Point:\n    x = 1\ndef helper():\n    return Point()\ndef point():\n    return helper()\n"
    path = tmp_path / "elsewhere.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("loaded_by_its_path", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["loaded_by_its_path"] = module
    try:
        spec.loader.exec_module(module)
        results = dx.launch(module.point)
        assert [type(result) for result in results] == [module.Point, module.Point]
        assert [result.x for result in dx.launch(lambda: module.helper())] == [1, 1]  # the module itself goes along
    finally:
        del sys.modules["loaded_by_its_path"]


def test_each_call_finds_a_process_as_if_just_started(tmp_path, monkeypatch):
    def disturb():

        ranked.left_behind = True
        dist.all_reduce(torch.ones(3))
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        return torch.rand(1).item(), random.random(), np.random.rand()

    def look():

        flags = hasattr(ranked, "left_behind"), torch.are_deterministic_algorithms_enabled()
        return flags, str(torch.get_default_dtype()), os.environ.get("DXDY_TEST"), os.getcwd(), sys.argv, sys.path

    first, second = dx.launch(disturb), dx.launch(disturb)
    assert len({draw for result in (*first, *second) for draw in result}) == 12  # nobody has set a seed
    monkeypatch.setenv("DXDY_TEST", "set since")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("somewhere")
    expected = ((False, False), "torch.float32", "set since", str(tmp_path), sys.argv, sys.path)
    assert dx.launch(look) == [expected, expected]


def test_the_ranks_listen_on_loopback_only_and_meet_in_a_private_folder():
    def listens():
        dist.all_reduce(torch.ones(2))
        own, parent = (psutil.Process(pid).net_connections("inet") for pid in (os.getpid(), os.getppid()))
        return [(one.status, one.laddr.ip) for one in own], len(parent)

    before = len(psutil.Process().net_connections("inet"))
    results = dx.launch(listens)
    assert [parent for _, parent in results] == [before, before]  # this process opens nothing while they run
    seen = {connection for own, _ in results for connection in own}
    assert {address for _, address in seen} == {"127.0.0.1"}
    assert psutil.CONN_LISTEN in {status for status, _ in seen}
    assert stat.S_IMODE(os.stat(pool._POOL.folder).st_mode) == 0o700


def test_the_cores_are_shared(monkeypatch):
    cores = len(psutil.Process().cpu_affinity())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert dx.launch(torch.get_num_threads) == [max(1, cores // 2)] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert dx.launch(torch.get_num_threads) == [1, 1]


# What is printed


def test_what_a_rank_prints_bears_its_number(capsys):
    def speaks():
        rank = dist.get_rank()
        print(f"one\ntwo of {rank}")
        os.system("echo from a process")
        warnings.warn("careful", stacklevel=1)
        for _ in tqdm(range(3), desc="bar"):
            pass
        print("no end", end="")

    dx.launch(speaks)
    out, err = capsys.readouterr()
    for rank in (0, 1):
        said = [line for line in out.splitlines() if line.startswith(f"[rank {rank}]")]
        expected = ["one", f"two of {rank}", "from a process", "no end"]
        assert said == [f"[rank {rank}] {line}" for line in expected]
        warned, bar = (
            [line for line in err.splitlines() if line.startswith(f"[rank {rank}]") and text in line]
            for text in ("UserWarning: careful", "bar: 100%")
        )
        assert len(warned) == len(bar) == 1
    assert len(out.splitlines()) == 8 and "\r" not in err


def test_a_bar_moves_where_somebody_watches(capsys):
    output = Output(attended=True)
    output.hear(1, "stderr", b"\r1 of 9")
    output.hear(0, "stderr", b"\r2 of 9")
    output.hear(1, "stderr", b"\r3 of 9")  # rank 0 has the only line
    umlaut = "\u00fc\n".encode()
    output.hear(0, "stdout", b"h" + umlaut[:1])
    output.hear(0, "stdout", umlaut[1:] + b"e")
    output.hear(0, "stderr", b"\r9\n")
    output.end()
    out, err = capsys.readouterr()
    gone = "\r" + " " * len("[rank 0] 2 of 9") + "\r"
    assert err == f"\r[rank 1] 1 of 9\r[rank 0] 2 of 9{gone}[rank 0] 9\n[rank 1] 3 of 9\n"
    assert out == "[rank 0] h\u00fc\n[rank 0] e\n"


def test_who_waits_and_until_when_is_said_once_while_no_rank_moves(capsys, monkeypatch):
    monkeypatch.setattr(pool, "QUIET", 4 * worker.PULSE)
    monkeypatch.setattr(pool, "attended", lambda: True)  # else nothing is said: a lesson's outputs stay the same

    def waits():
        dist.barrier()
        time.sleep(12 * worker.PULSE if dist.get_rank() else 0)
        dist.barrier()

    dx.launch(waits)
    line = waits.__code__.co_firstlineno + 3
    said = rf"launch: no rank has moved for 1 s; rank 0 waits in barrier \(test_ranks\.py:{line}\)\. Given up at "
    assert re.fullmatch(said + r"\d\d:\d\d:\d\d at the latest\.\n", capsys.readouterr().err)


# What cannot be


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", 10_000])
def test_a_number_of_ranks_that_makes_no_sense(size):
    with pytest.raises(dx.DxdyError, match=r"expected world_size from 1 to \d+ on \d+ cores?, got "):
        dx.launch(pids, world_size=size)


@pytest.mark.parametrize("limits", [{"timeout": 0}, {"stall": -1.0}, {"timeout": float("nan")}])
def test_a_limit_that_makes_no_sense(limits):
    with pytest.raises(dx.DxdyError, match=f"expected {next(iter(limits))} in seconds, above 0, got"):
        dx.launch(pids, **limits)


def test_more_ranks_than_cores_is_said(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    with pytest.warns(UserWarning, match="2 ranks share 1 core: the results are the same, and no time is won"):
        assert len(dx.launch(pids)) == 2


def test_what_cannot_be_sent_is_named():
    view = {"figure": [threading.Lock()]}

    def draw():
        return view

    def train():
        return draw()

    with pytest.raises(dx.DxdyError, match=r"train → draw → view → figure → \[0\] → a lock cannot be sent"):
        dx.launch(train)
    with pytest.raises(dx.DxdyError, match=r"arguments → \[1\] → a generator cannot be sent .*'generator'"):
        dx.launch(print, 1, (x for x in ()))
    with pytest.raises(dx.DxdyError, match="expected a function, got a int"):
        dx.launch(3)


def test_two_launches_at_a_time_are_refused():
    with pool._POOL.lock, pytest.raises(dx.DxdyError, match="another launch of this process is still running"):
        dx.launch(pids)


# Who is blamed


def seen(summary="", *, died=False, waits="", steps=0, returned=False, at=0):
    told = failure.Failure(summary, at, died=died) if summary else None
    return failure.Seen(worker.Beat(steps, waits, "f", "file", 1), b"" if returned else None, told)


LOST, LATE = "RuntimeError: Connection closed by peer [127.0.0.1]:1", "RuntimeError: Timed out waiting 4000ms for recv"


@pytest.mark.parametrize(
    ("ranks", "cause", "text"),
    [
        ([seen(LOST), seen("ValueError: x", steps=1)], 1, "1 of 2 raised ValueError: x after 1 optimizer steps."),
        ([seen(LOST), seen("SIGKILL", died=True)], 1, "1 of 2 ended with SIGKILL. It was killed from outside"),
        ([seen("KeyError: z", at=2), seen("ValueError: y", at=1)], 1, "ValueError: y.\nrank 0 raised KeyError: z."),
        ([seen(LATE), seen(steps=3)], 1, "1 of 2 was in f, file:1 after 3 optimizer steps. The others still waited"),
        ([seen(LATE), seen(waits="barrier"), seen(steps=9)], 2, "2 of 3 was in f"),
        ([seen(LATE), seen(waits="barrier"), seen(waits="backward")], 2, "2 of 3 was waiting for the others in back"),
        ([seen(LATE), seen(returned=True, steps=2)], 1, "1 of 2 returned after 2 optimizer steps. The others still"),
        ([seen(LATE, at=2), seen(LOST, at=1)], 1, "1 of 2 raised RuntimeError: Connection closed"),
    ],
)
def test_the_cause_is_blamed_and_not_who_lost_it(ranks, cause, text):
    error = failure.blame(ranks, 60.0)
    assert error.rank == cause
    assert text in str(error)


def test_who_holds_all_up_is_blamed():
    error = failure.blame([seen(waits="barrier", steps=2), seen(steps=2), seen(steps=1)], 30.0)
    assert error.rank == 2
    assert str(error).splitlines()[0].startswith("launch: nothing has moved for 30 s; rank 2 of 3 was in f, file:1")
    assert "rank 0 was waiting for the others in barrier, in f" in str(error)


# Failures of real processes


def fails(name):
    with dx.session(device="cpu") as s:
        model = DistributedDataParallel(nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        time.sleep(2 * worker.PULSE)
        if s.rank == 1:
            WRONG[name]()
        if name != "hang":
            s.mean(1, 1)
        time.sleep(600 if name == "hang" else 0)


def raise_error():
    raise ValueError("boom")


WRONG = {
    "raise": raise_error,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(0),
    "sys.exit": lambda: sys.exit("bye"),
    "sleep": lambda: time.sleep(600),
    "hang": lambda: None,
    "leave": dist.destroy_process_group,
    "abort": lambda: dist.all_reduce(torch.ones(100)),
}
TEXTS = {
    "raise": "rank 1 of 2 raised ValueError: boom after 3 optimizer steps.",
    "kill": "rank 1 of 2 ended with SIGKILL after 3 optimizer steps. It was killed from outside",
    "exit": "rank 1 of 2 ended with exit code 0 after 3 optimizer steps. Something in the function ends the process",
    "sys.exit": "rank 1 of 2 raised SystemExit: bye",
    "sleep": "rank 1 of 2 was in <lambda>, {file}",
    "hang": "nothing has moved for 3 s; rank 0 of 2 was in fails, {file}",
    "leave": "rank 1 of 2 returned after 3 optimizer steps. The others still waited for it.",
    "abort": "ended with SIGABRT",
}


def alive(processes):
    return [one for one in processes if psutil.pid_exists(one)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n != "raise" else []) for n in TEXTS])
def test_the_rank_that_failed_is_named_and_the_next_call_runs(name):
    before = dx.launch(pids)
    stall = 3.0 if name == "hang" else 120.0
    with pytest.raises(failure.RankError) as caught:
        dx.launch(fails, name, timeout=3.0, stall=stall)
    assert TEXTS[name].format(file=__file__) in str(caught.value)
    if name != "abort":  # either rank's library may be the first to notice
        assert caught.value.rank == (name != "hang")
    assert alive(before) == []  # no orphan, and no zombie: its entry would be there
    if name == "raise":
        assert caught.value.traceback.splitlines()[-2:] == ['    raise ValueError("boom")', "ValueError: boom"]
        assert "rank 0 raised RuntimeError" in str(caught.value)
    after = dx.launch(pids)
    assert len({*before, *after}) == 4


@pytest.mark.slow
def test_torchs_own_words_pass():
    def build():
        DistributedDataParallel(nn.Linear(3 + dist.get_rank(), 3))

    with pytest.raises(failure.RankError, match=r"params\[0\] in this process with sizes \[3, 4\] appears"):
        dx.launch(build)
    with pytest.raises(failure.RankError, match="the result → a generator cannot be sent"):
        dx.launch(lambda: (x for x in ()))


# Programs that launch


SCRIPT = """
import dxdy_nb as dx, os, sys, time
print("begun", os.getpid(), flush=True)
def place(wait):
    with dx.session(device="cpu") as s:
        print(os.getpid(), flush=True)
        time.sleep(wait)
        return s.mean(s.rank, 1)
"""
STOPPED = (
    SCRIPT
    + """
try:
    dx.launch(place, 600.0)
except KeyboardInterrupt:
    print("stopped", dx.launch(place, 0.0), flush=True)
"""
)


def started(text, *command, cwd):
    """Start a program; it is read as it prints."""
    (cwd / "script.py").write_text(text)
    with (cwd / "script.py").open() as file:
        return subprocess.Popen(
            [sys.executable, *(command or ("script.py",))],
            stdin=file,
            stdout=subprocess.PIPE,
            text=True,
            cwd=cwd,
            start_new_session=True,
        )


def numbers(lines):
    return [int(line.split()[-1]) for line in lines]


def wait_until_gone(processes, seconds=30):
    end = time.monotonic() + seconds
    while alive(processes) and time.monotonic() < end:
        time.sleep(0.1)
    assert alive(processes) == []


@pytest.mark.slow
@pytest.mark.parametrize("command", [(), ("-",), ("-c", "import runpy; runpy.run_path('script.py')")])
def test_a_program_without_a_guard_runs_once(command, tmp_path):
    with started(SCRIPT + "print(dx.launch(place, 0.0))", *command, cwd=tmp_path) as process:
        lines = process.stdout.read().splitlines()
    assert process.returncode == 0
    assert len(lines) == 4 and lines[0].startswith("begun") and lines[-1] == "[0.5, 0.5]"
    assert sorted(line[:8] for line in lines[1:3]) == ["[rank 0]", "[rank 1]"]
    wait_until_gone(numbers(lines[1:3]))


@pytest.mark.slow
def test_stop_ends_the_ranks_and_the_next_call_runs(tmp_path):
    with started(STOPPED, cwd=tmp_path) as process:
        first = [process.stdout.readline() for _ in range(3)]
        os.killpg(process.pid, signal.SIGINT)  # as Jupyter does
        rest = process.stdout.read().splitlines()
    assert process.returncode == 0
    assert rest[-1] == "stopped [0.5, 0.5]"
    ranks = numbers(first[1:]) + numbers(rest[:2])
    assert len(set(ranks)) == 4
    wait_until_gone(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("terminated", [False, True])  # a kernel that is shut down terminates its children first
def test_the_ranks_end_with_a_parent_that_is_killed(terminated, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with started(SCRIPT + "dx.launch(place, 600.0)", cwd=tmp_path) as process:
        ranks = numbers([process.stdout.readline() for _ in range(3)][1:])
        assert len(alive(ranks)) == 2 and list(tmp_path.glob("dxdy-ranks-*"))
        if terminated:
            process.send_signal(signal.SIGSTOP)
            for rank in ranks:
                os.kill(rank, signal.SIGTERM)
            time.sleep(1)
        process.kill()
    wait_until_gone(ranks)
    assert list(tmp_path.glob("dxdy-ranks-*")) == []


CELLS = [
    "import dxdy_nb as dx, torch.distributed as dist\ndef f(): return dist.get_rank()\ndx.launch(f)",
    "def f():\n    raise ValueError(dist.get_rank() + 7)  # in a cell\ndx.launch(f)",
    "def f(): return get_ipython\ndx.launch(f)",
]


@pytest.mark.slow
def test_a_function_in_a_cell():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    nbclient.NotebookClient(notebook, timeout=300, allow_errors=True, kernel_name="python3").execute()
    outputs = [cell.outputs[-1] for cell in notebook.cells]
    assert outputs[0]["data"]["text/plain"] == "[0, 1]"
    assert "raise ValueError(dist.get_rank() + 7)  # in a cell" in outputs[1]["evalue"]
    assert "f → get_ipython" in outputs[2]["evalue"] and "cannot be sent to another process" in outputs[2]["evalue"]


@pytest.mark.slow
def test_what_a_rank_has_started_ends_with_it():
    def start():
        child = subprocess.Popen(["sleep", "600"])
        if dist.get_rank() == 1:
            raise ValueError(child.pid)
        time.sleep(600)

    with pytest.raises(failure.RankError) as caught:
        dx.launch(start)
    wait_until_gone([int(str(caught.value).partition("ValueError: ")[2].partition(".")[0])])


@pytest.mark.slow
def test_the_pool_gives_the_same_weights_as_spawn(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    torch.multiprocessing.spawn(ranked.spawned, (str(tmp_path), port), nprocs=2)
    expected = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert dx.launch(ranked.train) == expected
    assert dx.launch(ranked.train) == expected  # in the warm processes too
    assert dx.launch(ranked.train, world_size=1)[0]["place"] == ranked.train()["place"]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_two_ranks_with_half_the_batch_each_have_the_gradient_of_one_process(dtype, bound):
    one = ranked.descend(dtype)
    assert one.dtype == dtype and one.shape[0] == 50
    for gradients in dx.launch(ranked.descend, dtype):
        assert ((gradients - one).norm(dim=1) / one.norm(dim=1)).max() <= bound


@pytest.mark.slow
def test_the_worker_of_lesson_08_gives_the_same_weights_under_torchrun():
    def train():
        end = ddp_worker.train(dist.get_rank(), dist.get_world_size(), seed=0, batch_size=32)
        return end["weights"][-1].double().sum().item()

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", ddp_worker.__file__]
    told = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True).stdout
    # The ranks share one pipe, and a line's end may come behind the other's line.
    assert sorted(re.findall(r"rank \d of 2: the weights sum to \d+\.\d{6}", told)) == [
        f"rank {rank} of 2: the weights sum to {total:.6f}" for rank, total in enumerate(dx.launch(train))
    ]
