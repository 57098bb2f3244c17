"""One training function, whoever starts its processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ranked
import torch
import torch.distributed as dist

import dxdy_nb as dx
from dxdy_nb.ranks import session as session_module

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PROGRAM = str(Path(ranked.__file__))


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in [name for name in os.environ if name in LAUNCHERS or name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def kept(folder, world_size=2):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def torchrun(folder, *options, program=PROGRAM):
    """Run a program on two ranks of one machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
    subprocess.run([*command, program, str(folder)], check=True, timeout=300, capture_output=True)
    return kept(folder)


def processes(folder, *environments):
    """Run the program once in each environment, all at a time, and return the results."""
    running = [
        subprocess.Popen([sys.executable, PROGRAM, str(folder)], env=os.environ | environment)
        for environment in environments
    ]
    assert [process.wait(timeout=300) for process in running] == [0] * len(running)
    return kept(folder, len(environments))


def test_alone_there_is_one_rank_and_no_group():
    with dx.session(device="cpu") as s:
        assert (s.rank, s.world_size, s.local_rank, s.device, s.is_main) == (0, 1, 0, torch.device("cpu"), True)
        assert not dist.is_initialized()
        assert s.mean(torch.tensor(3.0, requires_grad=True), 2) == 1.5
        assert s.mean(0, 0) != s.mean(0, 0)  # nan


def test_a_group_that_is_there_is_used_and_left():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with dx.session(device="cpu") as s:
            assert (s.rank, s.world_size, s.mean(3, 2)) == (0, 1, 1.5)
        assert dist.is_initialized()
    finally:
        session_module.leave()
    assert not dist.is_initialized()


def test_a_group_that_is_made_is_ended(monkeypatch):
    place = dict(zip(LAUNCHERS, ("0", "1", "0", "127.0.0.1", str(free_port())), strict=True))
    monkeypatch.setattr(os, "environ", os.environ | place)
    with dx.session(device="cpu"):
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), dx.session(device="cpu"):
        _ = 1 / 0
    assert not dist.is_initialized()


def test_processes_with_their_place_in_the_environment(tmp_path):
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    results = processes(tmp_path, {"RANK": "0"} | common, {"RANK": "1", "LOCAL_RANK": "5"} | common)
    assert [result["place"] for result in results] == [[0, 2, 0, "cpu", True], [1, 2, 5, "cpu", False]]
    total, count = (sum(result["local"][i] for result in results) for i in (0, 1))
    assert results[0]["mean"] == results[1]["mean"] == pytest.approx(total / count, rel=1e-12)
    assert results[0]["weights"] == results[1]["weights"]
    assert results[0]["local"] != results[1]["local"]


@pytest.mark.slow
def test_torchrun_spawn_and_srun_give_the_same_weights(tmp_path):
    folders = {name: tmp_path / name for name in ("spawn", "torchrun", "srun")}
    for folder in folders.values():
        folder.mkdir()
    torch.multiprocessing.spawn(ranked.spawned, (str(folders["spawn"]), free_port()), nprocs=2)
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid())}
    ranks = [{"SLURM_PROCID": rank, "SLURM_LOCALID": rank} | step for rank in ("0", "1")]
    expected = kept(folders["spawn"])
    assert torchrun(folders["torchrun"]) == expected
    assert processes(folders["srun"], *ranks) == expected


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is an address of Linux's loopback only")
def test_two_agents_on_two_addresses_give_the_weights_of_one_with_two_ranks(tmp_path):
    folders = {name: tmp_path / name for name in ("one", "two")}
    for folder in folders.values():
        folder.mkdir()
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=test"]
    agents = [
        [*meeting, f"--rdzv-conf=is_host={host}", f"--local-addr=127.0.0.{node}", "--nproc-per-node=1"]
        for host, node in ((1, 1), (0, 2))
    ]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, PROGRAM, str(folders["two"])],
            stderr=subprocess.DEVNULL,
        )
        for options in agents
    ]
    assert [process.wait(timeout=300) for process in running] == [0, 0]
    found, expected = kept(folders["two"]), torchrun(folders["one"])
    for rank, result in enumerate(found):
        assert result.pop("place")[:3] == [rank, 2, 0]  # each is the first of its machine
        assert expected[rank].pop("place")[:3] == [rank, 2, rank]
    assert found == expected


KILLED_ONCE = """
import os, signal, sys
import dxdy_nb as dx
import ranked

first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
with dx.session(timeout=20) as s:
    s.mean(1, 1)
    if first and s.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    s.mean(1, 1)
assert not first
ranked.Path(sys.argv[1], f"{s.rank}.json").write_text(ranked.json.dumps(s.rank))
"""


@pytest.mark.slow
def test_a_killed_rank_comes_back_at_the_first_restart(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path(PROGRAM).parent), os.environ.get("PYTHONPATH", ""))))
    (tmp_path / "killed.py").write_text(KILLED_ONCE)
    assert torchrun(tmp_path, "--max-restarts=1", program=str(tmp_path / "killed.py")) == [0, 1]


def test_srun_tells_the_place(monkeypatch):
    place = session_module._place
    step = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456"}
    found = place(step | {"SLURM_STEP_NODELIST": "gpu[03-05,9],login1"})
    assert (found.rank, found.world_size, found.local_rank, found.address, found.port) == (3, 8, 1, "gpu03", 23_456)
    assert place(step | {"SLURM_STEP_NODELIST": "a-1,a-2"}).address == "a-1"
    assert place(step | {"SLURM_STEP_NODELIST": "x,n[1-2]"}).address == "x"
    assert place(step | {"SLURM_STEP_NODELIST": "n", "MASTER_ADDR": "10.0.0.1"}).address == "10.0.0.1"
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}
    assert place(batch) is None
    launched = dict(zip(LAUNCHERS, ("1", "4", "1", "h", "1"), strict=True))
    assert place(step | launched).rank == 1  # srun torchrun: the inner launcher counts


@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ({"RANK": "0"}, "RANK='0', WORLD_SIZE=''"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK='2', WORLD_SIZE='2'"),
        ({"RANK": "one", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK='one'"),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_LOCALID='', MASTER_ADDR=''"),
    ],
)
def test_an_incomplete_place_is_an_error(env, seen, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(dx.DxdyError, match=seen), dx.session():
        pass


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch):
    with pytest.raises(dx.DxdyError, match="expected 'auto', 'cpu' or 'cuda', got 'gpu'"):
        session_module.pick_device("gpu", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert session_module.pick_device("auto", 1) == torch.device("cuda", 1)
    assert session_module.pick_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(dx.DxdyError, match="rank 2 of this machine has no GPU of its own; torch sees 2"):
        session_module.pick_device("auto", 2)
    assert chosen == [1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert session_module.pick_device("auto", 3) == torch.device("cuda", 0)


TWICE = """
import os, sys, time
import torch
import torch.distributed as dist
import dxdy_nb as dx

rank, late = int(os.environ["RANK"]), int(sys.argv[1])
for number in range(2):
    with dx.session(device="cpu", timeout=15) as s:
        assert s.mean(rank + number, 1) == 0.5 + number
        time.sleep(0.5 * (rank == late))
dist.init_process_group("gloo")  # the caller's own, from the same variables
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2
"""


@pytest.mark.parametrize("late", [0, 1])
def test_a_second_session_does_not_meet_the_first(tmp_path, late):
    (tmp_path / "twice.py").write_text(TWICE)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(tmp_path / "twice.py"), str(late)]
    running = [subprocess.Popen(command, env=os.environ | place | {"RANK": str(rank)}) for rank in range(2)]
    assert [process.wait(timeout=120) for process in running] == [0, 0]


@pytest.mark.slow
def test_a_second_session_under_torchrun(tmp_path):
    (tmp_path / "twice.py").write_text(TWICE.partition("dist.init")[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*command, str(tmp_path / "twice.py"), "1"], check=True, timeout=120, capture_output=True)
