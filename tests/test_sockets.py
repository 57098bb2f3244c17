"""The watch over sockets can fail: it sees what a child of a child opens."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import sockets

LISTEN = "import socket, sys; s = socket.create_server((sys.argv[1], 0)); print('open', flush=True); sys.stdin.read()"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LISTEN!r}, *sys.argv[1:]])"


def listen(address: str, seen: set[tuple[str, str]]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "open\n"
        deadline = time.monotonic() + 60
        while not seen and time.monotonic() < deadline:
            time.sleep(0.05)
        child.stdin.close()


def test_a_socket_on_loopback_is_seen_and_is_right() -> None:
    with sockets.watched() as seen:
        listen("127.0.0.1", seen)
    ((address, command),) = seen
    assert address.startswith("127.0.0.1:")
    assert "create_server" in command


def test_a_socket_that_a_childs_child_opens_to_the_network_fails() -> None:
    with pytest.raises(AssertionError, match=r"open to the network: \[\('0\.0\.0\.0:"), sockets.watched() as seen:
        listen("0.0.0.0", seen)


def test_an_exception_is_named_by_its_command_line() -> None:
    with sockets.watched(allowed=["create_server"]) as seen:
        listen("0.0.0.0", seen)
    assert len(seen) == 1


@pytest.mark.parametrize("ip", ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"])
def test_what_only_this_machine_reaches(ip: str) -> None:
    assert not sockets.is_open(f"{ip}:1")


@pytest.mark.parametrize("ip", ["0.0.0.0", "::", "192.0.2.2", "fe80::1%eth0"])
def test_what_others_reach(ip: str) -> None:
    assert sockets.is_open(f"{ip}:1")


TRAIN = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")  # as under torchrun
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_of_a_watched_script_listen_on_loopback_alone(here: Path) -> None:
    (here / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "dxdy_nb.cli", "watch", "--nproc-per-node", "2", "train.py"]
    with sockets.watched() as seen:
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    assert len({address for address, _ in seen}) >= 2  # gloo listens on each rank
