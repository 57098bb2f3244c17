"""What this machine offers to training, as plain facts. Nothing is judged here, and nothing is changed.

Torch is imported late, since an import that fails is a fact too. ``nvcc`` is never asked: the toolkit that it belongs
to is not the one inside torch's wheel.
"""

import contextlib
import csv
import importlib.metadata
import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

JUPYTER = ("jupyterlab", "jupyter_server", "ipykernel", "ipywidgets", "jupyterlab_widgets")
VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PYTHONPATH"),
)
PATIENCE = 4.0  # seconds that nvidia-smi, or two ranks that meet, may take
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_PINS = Path(__file__).resolve().parents[2] / "constraints.txt"


def facts() -> dict[str, Any]:
    """Return what is known of this machine and its Python, as values that JSON can hold.

    Sizes are in bytes, the clock in seconds since 1970. What is not there is None, or empty.

    Examples
    --------
    >>> facts()["processors"]["threads"] >= 1
    True
    """
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "system": sys.platform,
        "container": _container(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "tested": _tested(),
        "torch": _torch(),
        "installed": _installed(),
        "driver": _driver(),
        "gpus": _gpus(),
        "memory": {"free": min(psutil.virtual_memory().available, _memory_limit())},
        "network": _network(),
        "processors": _processors(),
        "jupyter": _jupyter(),
        "disk": _disk(),
    }


def _container() -> str | None:
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    return "kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ else None


def _tested() -> dict[str, str]:
    """Return the versions that the workbook is tested with, where it lies beside the package."""
    pins = dict(line.split("==") for line in _text(_PINS).splitlines() if "==" in line)
    return {name: pins[name] for name in ("torch", *JUPYTER) if name in pins}


def _torch() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # an ImportError, an OSError from a library, whatever a broken install raises
        return {"error": _gist(error)}
    nccl = None
    with contextlib.suppress(Exception):
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    return {
        "error": None,
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "archs": torch.cuda.get_arch_list(),
        "cudnn": cudnn,
        "nccl": nccl,
    }


def _installed() -> dict[str, list[str]]:
    """Return the copies of torch that pip and conda each installed here, and NVIDIA's wheels."""
    found = {(one.name.lower(), one.version, _home(one)) for one in importlib.metadata.distributions() if one.name}
    names = re.compile(r"(pytorch|libtorch|pytorch-(cpu|gpu))-\d")
    conda = [path.stem for path in Path(sys.prefix, "conda-meta").glob("*torch*.json")]
    return {
        "pip torch": sorted(version for name, version, home in found if name == "torch" and home),
        "conda torch": sorted(name for name in conda if names.match(name)),
        "nvidia wheels": sorted({f"{name} {version}" for name, version, _ in found if name.startswith("nvidia-")}),
    }


def _home(distribution: importlib.metadata.Distribution) -> str:
    """Return the folder of what pip installed; empty for what conda did, which leaves a record for pip too."""
    by_conda = (distribution.read_text("INSTALLER") or "").strip() == "conda"
    return "" if by_conda else str(distribution.locate_file(""))


def _driver() -> dict[str, Any]:
    loaded = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _text(Path("/proc/driver/nvidia/version")))
    rows, error = _smi("--query-gpu=driver_version")
    return {
        "version": rows[0][0] if rows else loaded[1] if loaded else None,
        "error": error,
        "on the bus": any(_is_nvidia(one) for one in Path("/sys/bus/pci/devices").glob("*")),
        "device files": sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*")),
    }


def _is_nvidia(device: Path) -> bool:
    """Return whether a PCI device is a display or 3D controller of NVIDIA's."""
    return _text(device / "vendor").strip() == "0x10de" and _text(device / "class").startswith("0x03")


def _smi(query: str) -> tuple[list[list[str]], str | None]:
    """Return the rows that nvidia-smi answers, and what it says when it fails; where there is none: neither."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, errors="replace")
    except FileNotFoundError:
        return [], None
    except (OSError, subprocess.SubprocessError) as error:
        return [], _gist(error)
    if done.returncode:
        return [], " ".join((done.stdout + done.stderr).split())[:200]
    return [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if row], None


def _gpus() -> dict[str, Any]:
    """Return each GPU with a kernel and a convolution really run on it, and who else computes there."""
    nothing: dict[str, Any] = {"error": None, "devices": [], "processes": []}
    try:
        import torch

        if torch.version.cuda is None:
            return nothing
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            seen = torch.cuda.is_available()
        if not seen:
            said = [_gist(one.message) for one in told] or _raised(torch.cuda.init)
            return {**nothing, "error": said[0] if said else None}
        rows, _ = _smi("--query-compute-apps=pid,process_name,used_memory")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a capability that it lacks; it is judged from the facts
            devices = [_gpu(number) for number in range(torch.cuda.device_count())]
        others = [row for row in rows if row[0] != str(os.getpid())]
        return {"error": None, "devices": devices, "processes": [" ".join(row) + " MiB" for row in others]}
    except Exception as error:
        return {**nothing, "error": _gist(error)}


def _gpu(number: int) -> dict[str, Any]:
    import torch

    device = torch.device("cuda", number)
    free, total = torch.cuda.mem_get_info(device)  # before our own kernels take their part

    def step() -> None:
        x = torch.ones(8, 8, device=device, requires_grad=True)
        (x @ x).sum().backward()
        if x.grad is None or x.grad.sum().item() != 8 * 8 * 16:
            raise RuntimeError("a matrix product of ones has a wrong gradient")

    def convolution() -> None:
        torch.nn.functional.conv2d(torch.ones(1, 1, 8, 8, device=device), torch.ones(1, 1, 3, 3, device=device)).sum()
        torch.cuda.synchronize(device)

    kernel = _raised(step)
    return {
        "name": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "free": free,
        "total": total,
        "kernel error": kernel[0] if kernel else None,
        "convolution error": None if kernel else next(iter(_raised(convolution)), None),
    }


def _raised(function: Callable[[], object]) -> list[str]:
    """Return what a call raises, as one line; nothing if it does not."""
    try:
        function()
    except Exception as error:
        return [_gist(error)]
    return []


def _network() -> dict[str, Any]:
    """Return whether two ranks can meet over gloo on loopback, and what this machine's name means to it."""
    name, address = socket.gethostname(), None
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(name)
    return {
        "interfaces": sorted(psutil.net_if_addrs()),
        "host name": name,
        "address": address,
        "gloo error": next(iter(_raised(_meet)), None),
    }


def _meet() -> None:
    """Sum a tensor over two ranks that are threads of this process."""
    import torch
    from torch import distributed as dist

    from dxdy_nb.runs.environment import variable

    if not dist.is_available() or not dist.is_gloo_available():
        raise RuntimeError("this torch has no gloo")
    store, errors, sums = dist.HashStore(), list[str](), [0.0, 0.0]

    def rank(number: int) -> None:
        def add() -> None:
            group: Any = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=PATIENCE))
            tensor = torch.ones(1) * (number + 1)
            group.allreduce([tensor]).wait()
            sums[number] = tensor.item()

        errors.extend(_raised(add))

    with variable("GLOO_SOCKET_IFNAME", _LOOPBACK):
        threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors or sums != [3.0, 3.0]:
        raise RuntimeError(errors[0] if errors else f"1 + 2 over two ranks gave {sums}")


def _processors() -> dict[str, Any]:
    threads = 1
    with contextlib.suppress(Exception):
        import torch

        threads = torch.get_num_threads()
    shared = Path("/dev/shm")
    files = None
    with contextlib.suppress(ImportError):
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return {
        "start method": multiprocessing.get_context().get_start_method(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "quota": _quota(),
        "threads": threads,
        "shared memory": psutil.disk_usage(str(shared)).total if shared.is_dir() else None,
        "open files": files,
    }


def _quota() -> float | None:
    """Return how many cores the container may use; ``docker --cpus`` hides none of the others from Python."""
    limit, _, period = _cgroup("cpu.max").partition(" ")
    if not limit:
        limit, period = _cgroup("cpu/cpu.cfs_quota_us"), _cgroup("cpu/cpu.cfs_period_us")
    return int(limit) / int(period) if limit.isdecimal() and period.isdecimal() else None


def _memory_limit() -> int:
    """Return the bytes that the container may still take, a very large number where there is no limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        if _cgroup(limit).isdecimal() and _cgroup(used).isdecimal():
            return max(0, int(_cgroup(limit)) - int(_cgroup(used)))
    return sys.maxsize


def _cgroup(name: str) -> str:
    return _text(Path("/sys/fs/cgroup", name)).strip()


def _jupyter() -> dict[str, Any]:
    versions: dict[str, str | None] = {}
    for name in JUPYTER:
        versions[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    extension = Path(sys.prefix, "share/jupyter/labextensions/@jupyter-widgets/jupyterlab-manager/package.json")
    front_end = None
    with contextlib.suppress(OSError, ValueError, KeyError):
        front_end = json.loads(extension.read_text())["version"]
    kernel = None
    with contextlib.suppress(Exception):
        from jupyter_client.kernelspec import KernelSpecManager

        kernel = KernelSpecManager().get_kernel_spec("python3").argv[0]
    return {"versions": versions, "widgets in the browser": front_end, "kernel": kernel, "python": sys.executable}


def _disk() -> dict[str, Any]:
    """Return the free space where runs and temporary files go, and the clock beside that of the disk."""
    written = None
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=".") as file:  # has no name, and is gone at once
        file.write(b"0")
        file.flush()
        written = os.fstat(file.fileno()).st_mtime
    return {
        "here": psutil.disk_usage(".").free,
        "temporary": psutil.disk_usage(tempfile.gettempdir()).free,
        "clock": time.time(),
        "clock of the disk": written,
        "python installed": Path(importlib.metadata.__file__).stat().st_mtime,
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _gist(error: object) -> str:
    """Return the first line of an error, or two where the first says little."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines if len(lines[0]) < 20 else lines[:1])[:300]
