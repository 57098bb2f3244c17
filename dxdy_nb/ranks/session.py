"""What a training function sees of its launcher, which is the same alone, in a pool, and under any other launcher."""

import contextlib
import itertools
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dxdy_nb.errors import DxdyError

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # the network interface that nobody else can reach
_held: list[dist.ProcessGroup | None] = []  # groups whose end is never waited for


@dataclass(frozen=True)
class Session:
    """One process of those that train together."""

    rank: int  # 0 .. world_size - 1
    world_size: int
    local_rank: int  # on this machine
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the one that prints and saves."""
        return self.rank == 0

    def mean(self, total: float | Tensor, count: float | Tensor) -> float:
        """Return the sum of ``total`` over all ranks by the sum of ``count``; all ranks must call it.

        A mean of the ranks' means would be wrong where the ranks have unequal counts. NaN where nothing was counted.

        Examples
        --------
        >>> with session() as s:
        ...     s.mean(total=6.0, count=4)
        1.5
        """
        sums = torch.stack([torch.as_tensor(one, dtype=torch.float64, device="cpu").detach() for one in (total, count)])
        if dist.is_initialized():
            sums = sums.to("cpu" if "gloo" in dist.get_backend_config() else self.device)
            dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()


@contextlib.contextmanager
def session(*, device: str = "auto", timeout: float = 60.0) -> Iterator[Session]:
    """Join the processes that train together, whoever started them, and leave them at the end.

    In ``dx.launch``, or where the caller made a process group, that group is used and left as it is. Else a group is
    made from what the launcher tells: ``torchrun``, and all that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    (``torch.multiprocessing.spawn`` with these in ``os.environ``), or ``srun``. Without any launcher there is one rank
    and no group. Where MASTER_ADDR is this machine's loopback, all that this process opens itself listens there only;
    ``torchrun``'s own store listens on every interface. Neither GPUs nor a SLURM cluster has seen this code yet.

    Parameters
    ----------
    device : ``auto`` (each rank its own GPU where there are GPUs), ``cpu`` or ``cuda``
    timeout : seconds that a rank waits for the others in a collective, for a group that is made here

    Raises
    ------
    DxdyError
        A launcher's variables are incomplete, or there are more ranks than GPUs on a machine.

    Examples
    --------
    >>> with session(device="cpu") as s:
    ...     print(s.rank, s.world_size, s.device, s.is_main)
    0 1 cpu True
    """
    if dist.is_initialized():
        rank = dist.get_rank()
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        yield Session(rank, dist.get_world_size(), local_rank, pick_device(device, local_rank))
        return
    place = _place(os.environ)
    if place is None:
        yield Session(0, 1, 0, pick_device(device, 0))
        return
    own = pick_device(device, place.local_rank)
    _join(place, timedelta(seconds=timeout))
    try:
        yield Session(*place[:3], own)
    except BaseException:
        hold()
        raise
    finally:
        leave()


def hold() -> None:
    """Keep the process group's object as long as this process: its end might wait for ranks, or threads, for ever."""
    if dist.is_initialized():
        _held.append(dist.group.WORLD)


def leave() -> None:
    """End the process group, if there is one.

    A group's end waits for gloo's threads, and these may need the interpreter's lock to drop their last tensors. The
    Python object of a group gives the lock away meanwhile; a DDP model that still holds the group then does not, and
    both would wait for ever. So the threads get the lock first, and this object goes last where it can.
    """
    if dist.is_initialized():
        group = dist.group.WORLD
        dist.destroy_process_group()
        time.sleep(0.1)
        del group


class _Place(NamedTuple):
    """What a launcher tells a process."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int


# With the number of the next session there; kept as long as this process: others may still be in the session before.
_stores: dict[_Place, tuple[dist.TCPStore, Iterator[int]]] = {}
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "MASTER_ADDR", "MASTER_PORT")


def _place(env: Mapping[str, str]) -> _Place | None:
    """Return where this process stands among others, or None where nobody has launched it as one of many."""
    if "RANK" in env:
        names, told = _TORCHRUN, {"LOCAL_RANK": env["RANK"], **env}  # whoever leaves it out has one machine
    elif env.get("SLURM_STEP_NUM_TASKS", "1") != "1":  # a batch script's own shell is no step of srun
        number = int(env.get("SLURM_JOB_ID", 0)) + int(env.get("SLURM_STEP_ID", 0))
        first = re.sub(r"\[(\w+).*", r"\1", env.get("SLURM_STEP_NODELIST", "")).split(",")[0]  # gpu03 of gpu[03-05,9]
        names, told = _SRUN, {"MASTER_ADDR": first, "MASTER_PORT": str(20_000 + number % 10_000), **env}
    else:
        return None
    rank, world_size, local_rank, address, port = values = [told.get(name, "") for name in names]
    with contextlib.suppress(ValueError):
        place = _Place(int(rank), int(world_size), int(local_rank), address, int(port))
        if address and 0 <= place.rank < place.world_size:
            return place
    seen = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
    raise DxdyError(
        f"session: {seen}: expected all five, and a rank below the number of ranks. Alone: unset {names[0]}."
    )


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Return this rank's device, and make a GPU the current one; ``auto`` is a GPU where there is one.

    Raises
    ------
    DxdyError
        ``cuda`` is asked for and not there; there are more ranks than GPUs on this machine.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise DxdyError(f"device: expected 'auto', 'cpu' or 'cuda', got {name!r}.")
    gpus = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if gpus == 0 and name != "cuda":
        return torch.device("cpu")
    if gpus == 0:
        raise DxdyError("device: 'cuda' is asked for, but torch sees no GPU here. Use device='auto' or 'cpu'.")
    number = 0 if gpus == 1 and "SLURM_LOCALID" in os.environ else local_rank  # srun may show each task its GPU alone
    if number >= gpus:
        raise DxdyError(
            f"session: rank {local_rank} of this machine has no GPU of its own; torch sees {gpus}. "
            "Start as many ranks as there are GPUs, or use dx.session(device='cpu')."
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _join(place: _Place, timeout: timedelta) -> None:
    """Make the process group that a launcher has told of."""
    if place.address in ("localhost", "127.0.0.1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
    if place not in _stores:
        _stores[place] = _store(place, timeout), itertools.count()
    store, sessions = _stores[place]
    store.set_timeout(timeout)
    # The store outlives a restart, and a session: without a name of their own, ranks would read old addresses.
    name = f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}, session {next(sessions)}"
    backend = None if torch.cuda.is_available() else "gloo"  # None: gloo for the CPU's tensors, nccl for a GPU's
    own = dist.PrefixStore(name, store)
    dist.init_process_group(backend, store=own, rank=place.rank, world_size=place.world_size, timeout=timeout)


def _store(place: _Place, timeout: timedelta) -> dist.TCPStore:
    """Return where the ranks tell each other their addresses."""
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # then torchrun holds the store
    serves = place.rank == 0 and not agents
    listener = None
    if serves and place.address in ("localhost", "127.0.0.1"):
        # Torch would listen on every interface, and ask nobody for a password.
        listener = socket.create_server(("127.0.0.1", place.port)).detach()
    # Within the process shared with a group that the caller makes from the same variables.
    return dist.TCPStore(
        place.address, place.port, place.world_size, serves, timeout, multi_tenant=True, master_listen_fd=listener
    )
