"""Is this environment fit for training? Facts in, one line a check out: state, evidence, next command."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dxdy_nb.runs import machine

Facts = Mapping[str, Any]
OK, WARNING, PROBLEM, NOT_APPLICABLE = "ok", "warning", "problem", "not applicable"
GIB = 2**30

# The oldest driver that runs a build of each CUDA major version: NVIDIA, CUDA Compatibility, Minor Version
# Compatibility, table 1. The builds of torch 2.13: 12.6 has kernels for capabilities 5.0 to 9.0, 13.0 for 7.5 to 12.0
# (PyTorch's RELEASE.md, CUDA support matrix).
DRIVERS = {11: 450, 12: 525, 13: 580}
OLD_BUILD, NEW_BUILD, TURING = "12.6", "13.0", (7, 5)
# These wheels write into one folder whatever CUDA they are for: the last one installed wins.
SHARED_FOLDER = ("nvidia-cudnn", "nvidia-nccl", "nvidia-nvshmem", "nvidia-cusparselt")
WIDGETS = {"8": ("3", "5"), "7": ("1", "3")}  # ipywidgets: jupyterlab_widgets, its part in the browser

GET = "pytorch.org/get-started/locally"
ANEW = "make clean, then make lab: a fresh .venv"
GPU_FLAG = (
    "on the host: nvidia-smi, then start the container with --gpus all (needs the NVIDIA Container Toolkit there)"
)

# What CUDA's and the driver's own messages mean: a part of the message, in what words we say it, and what to do.
MESSAGES = (
    ("Driver/library version mismatch", "the driver was updated under a loaded kernel module", "reboot"),
    ("Error 803", "the driver was updated under a loaded kernel module", "reboot"),
    ("Unknown Error", "this container has lost its GPUs", "end this container and start it again with --gpus all"),
    (
        "Error 802",
        "the GPUs of an NVSwitch machine wait for the fabric manager",
        "systemctl status nvidia-fabricmanager: it must run, in the driver's own version",
    ),
    (
        "Error 804",
        "a CUDA compatibility library stands before the driver, on a GPU that it does not support",
        "take the cuda-compat folder off LD_LIBRARY_PATH, or update the driver on the host",
    ),
    (
        "CUDA unknown error",
        "the driver's memory module is in a bad state, as after a suspend",
        "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm; else reboot",
    ),
)


@dataclass(frozen=True)
class Line:
    """One check: its state (ok, warning, problem, not applicable), what was seen, and what to do next."""

    check: str
    state: str
    evidence: str
    next: str = ""


def examine() -> tuple[Facts, list[Line]]:
    """Return the facts of this machine and what is to be said of them, a line a check, in the order to read them.

    Examples
    --------
    >>> facts, lines = examine()
    >>> [line.check for line in lines][:3]
    ['torch build', 'driver', 'kernels']
    """
    facts = machine.facts()
    return facts, judge(facts)


def judge(facts: Facts) -> list[Line]:
    """Return a line for each check; of what is wrong in a check, the worst, and of equals the one to mend first."""
    lines = []
    for name, check in CHECKS.items():
        said = [Line(name, *one) for one in check(facts)]
        lines.append(min(said, key=lambda line: (PROBLEM, WARNING, NOT_APPLICABLE, OK).index(line.state)))
    return lines


def fit(lines: Sequence[Line]) -> bool:
    """Return whether no line is a problem."""
    return all(line.state != PROBLEM for line in lines)


def text(lines: Sequence[Line]) -> str:
    """Return lines for people, the next command below what it mends."""
    width = max(len(line.check) for line in lines)
    told = []
    for line in lines:
        told.append(f"{line.state:<14}  {line.check:<{width}}  {line.evidence}")
        if line.next:
            told.append(f"{'':<14}  {'':<{width}}  next: {line.next}")
    return "\n".join(told)


def as_json(facts: Facts, lines: Sequence[Line]) -> dict[str, Any]:
    """Return all as plain values: whether it is fit, the lines, and the facts behind them."""
    return {"fit": fit(lines), "lines": [asdict(line) for line in lines], "facts": facts}


Said = Iterator[tuple[str, ...]]  # state, evidence, next command


def _torch_build(facts: Facts) -> Said:
    torch, installed, tested = facts["torch"], facts["installed"], facts["tested"].get("torch")
    copies, conda = installed["pip torch"], installed["conda torch"]
    if copies and conda:
        yield (
            PROBLEM,
            f"two installers put torch here: pip {copies[0]}, conda {conda[0]}",
            ("conda env create -f environment.yml: a new environment, torch from pip alone"),
        )
    if len(copies) > 1:
        yield PROBLEM, f"torch is installed {len(copies)} times on this Python's path: {', '.join(copies)}", ANEW
    if torch["error"]:
        twice = "".join(f"; {wheel} is installed" for wheel in _twice(installed["nvidia wheels"]))
        yield PROBLEM, f"import torch fails: {torch['error']}{twice}", ANEW
        return
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "CPU"
    seen = f"torch {torch['version']}, built for {build}"
    if build == "CPU" and _has_gpu(facts):
        yield PROBLEM, f"{seen} only; this machine has an NVIDIA GPU", _other_build(facts)
    version = torch["version"].partition("+")[0]
    if tested and version != tested:
        yield WARNING, f"{seen}; the workbook is tested with {tested}", ANEW
    yield OK, seen


def _driver(facts: Facts) -> Said:
    torch, driver, gpus = facts["torch"], facts["driver"], facts["gpus"]
    if torch["error"]:
        yield NOT_APPLICABLE, "torch cannot be imported"
        return
    if not torch["cuda"]:
        yield NOT_APPLICABLE, "this build of torch asks for no NVIDIA driver"
        return
    build, version, container = torch["cuda"], driver["version"], facts["container"]
    for message, meaning, mend in MESSAGES:
        for said in (driver["error"], gpus["error"]):
            if said and message in said:
                yield PROBLEM, f"{meaning} ({said})", mend
    need, cuda = DRIVERS.get(int(build.partition(".")[0]), 0), _driver_cuda(facts)
    if cuda and cuda < int(build.partition(".")[0]):
        older = f", or install torch for CUDA {OLD_BUILD}: {GET}" if cuda == int(OLD_BUILD.partition(".")[0]) else ""
        knows = f"driver {version}" if version else f"the driver is one for CUDA {cuda}"
        yield PROBLEM, f"{knows}; torch's CUDA {build} needs {need} or newer", f"update the driver to {need}{older}"
    if gpus["devices"]:
        yield OK, f"driver {version or 'of unknown version'} runs {len(gpus['devices'])} GPU(s) for CUDA {build}"
    elif container and not driver["device files"]:  # the host's driver may be seen in /proc all the same
        state = PROBLEM if _has_gpu(facts) else WARNING
        yield state, f"in a container ({container}) that was given no GPU", GPU_FLAG
    elif _has_gpu(facts) and "CUDA_VISIBLE_DEVICES" in facts["variables"]:
        hidden = facts["variables"]["CUDA_VISIBLE_DEVICES"]
        yield (
            PROBLEM,
            f"CUDA_VISIBLE_DEVICES={hidden!r} shows torch no GPU",
            ("unset CUDA_VISIBLE_DEVICES, before Python starts"),
        )
    elif version or driver["error"]:
        yield PROBLEM, f"driver {version}; torch finds no GPU: {gpus['error'] or driver['error']}", "nvidia-smi"
    elif driver["on the bus"]:
        yield (
            PROBLEM,
            "an NVIDIA GPU is built in, and no driver of NVIDIA's is loaded",
            (f"install your system's NVIDIA driver, {need} or newer, and reboot; then nvidia-smi"),
        )
    else:
        yield NOT_APPLICABLE, "no NVIDIA GPU here; this build of torch runs on the CPU too"


def _kernels(facts: Facts) -> Said:
    devices = facts["gpus"]["devices"]
    if not devices:
        yield NOT_APPLICABLE, "no GPU in use"
    for number, device in enumerate(devices):
        seen = f"GPU {number}, {device['name']}, capability {device['capability']}"
        listed = _listed(device["capability"], facts["torch"]["archs"])
        archs = " ".join(facts["torch"]["archs"])
        if device["kernel error"] and not listed:
            yield PROBLEM, f"{seen}: this build has kernels for {archs} only", _other_build(facts)
        elif device["kernel error"]:
            yield PROBLEM, f"{seen}: a small training step fails: {device['kernel error']}", "nvidia-smi -q"
        else:
            yield OK, f"{seen}: a small training step gives the right gradient"


def _libraries(facts: Facts) -> Said:
    torch, devices, wheels = facts["torch"], facts["gpus"]["devices"], facts["installed"]["nvidia wheels"]
    twice = _twice(wheels)
    for number, device in enumerate(devices):
        if device["convolution error"]:
            other = "MISMATCH" in device["convolution error"] or "version" in device["convolution error"]
            mend = "ldconfig -p | grep libcudnn, echo $LD_LIBRARY_PATH: take another cuDNN off the loader's path"
            mend = mend if other and not twice else ANEW
            extra = f"; installed for two CUDA versions: {', '.join(twice)}" if twice else ""
            yield PROBLEM, f"a convolution on GPU {number} fails: {device['convolution error']}{extra}", mend
    if twice:
        yield WARNING, f"one folder, wheels for two CUDA versions: {', '.join(twice)}", ANEW
    if not torch.get("cuda"):
        yield NOT_APPLICABLE, "cuDNN and NCCL come with the CUDA builds of torch"
        return
    seen = f"cuDNN {torch['cudnn']}, NCCL {torch['nccl']}"
    if not torch["nccl"] and facts["system"] == "linux":
        yield WARNING, f"{seen}: ranks on GPUs have only gloo, which is slower", ANEW
    if devices:
        yield OK, f"{seen}; a convolution runs"
    else:
        yield OK, f"{seen}; not tried, since no GPU is in use"


def _memory(facts: Facts) -> Said:
    devices, free = facts["gpus"]["devices"], facts["memory"]["free"]
    for number, device in enumerate(devices):
        seen = f"GPU {number}: {device['free'] / GIB:.1f} of {device['total'] / GIB:.1f} GiB free"
        others = facts["gpus"]["processes"]
        if device["free"] < 0.5 * device["total"]:
            held = f", held by {'; '.join(others)}" if others else ", held by processes that are not visible from here"
            yield WARNING, seen + held, "nvidia-smi; end what is yours, or choose another GPU (CUDA_VISIBLE_DEVICES)"
    if free < 2 * GIB:
        yield WARNING, f"{free / GIB:.1f} GiB of main memory free", "end other programs, or raise the container's limit"
    gpus = "".join(f"; GPU {n} {one['free'] / GIB:.1f} GiB" for n, one in enumerate(devices))
    yield OK, f"free: main memory {free / GIB:.1f} GiB{gpus}"


def _ranks(facts: Facts) -> Said:
    network = facts["network"]
    if network["gloo error"]:
        yield (
            PROBLEM,
            f"two ranks do not meet over gloo on loopback: {network['gloo error']}",
            ("ip address show lo: it must be UP with 127.0.0.1"),
        )
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = facts["variables"].get(name)
        pattern = name.startswith("NCCL")  # NCCL takes beginnings and exclusions too; gloo takes names only
        unknown = [one for one in (wanted or "").split(",") if one and one not in network["interfaces"]]
        if unknown and not pattern:
            there = ", ".join(network["interfaces"])
            yield PROBLEM, f"{name}={wanted}: no such network interface; there are {there}", f"unset {name}"
    if network["address"] is None:
        yield (
            WARNING,
            f"this machine's name, {network['host name']}, has no address: plain gloo guesses",
            ("export GLOO_SOCKET_IFNAME=lo (dx.launch sets it by itself)"),
        )
    yield OK, "two ranks met over gloo on loopback and added a tensor"


def _processes(facts: Facts) -> Said:
    processors, container = facts["processors"], facts["container"]
    usable = max(1, int(min(processors["cores"], processors["quota"] or processors["cores"])))
    shared, files, threads = processors["shared memory"], processors["open files"], processors["threads"]
    if shared is not None and shared < GIB / 4:
        mend = "docker run --shm-size=2g, or --ipc=host" if container else "mount -o remount,size=2G /dev/shm"
        yield PROBLEM, f"/dev/shm has {shared // 2**20} MiB: DataLoader workers end with a bus error", mend
    if threads > usable:
        cores = f"{usable} of {processors['cores']} cores are ours" if processors["quota"] else f"{usable} core(s)"
        yield WARNING, f"torch takes {threads} threads; {cores}", f"export OMP_NUM_THREADS={usable}"
    if files is not None and 0 < files < 1024:
        yield WARNING, f"{files} open files allowed: many workers need more", "ulimit -n 4096"
    method = processors["start method"]
    fork = ", which needs that no GPU is in use before" if method == "fork" else ""
    yield OK, f"{threads} thread(s), {usable} core(s); workers start by {method}{fork}"


def _notebook(facts: Facts) -> Said:
    jupyter, tested = facts["jupyter"], facts["tested"]
    versions, front_end = jupyter["versions"], jupyter["widgets in the browser"]
    if missing := [name for name, version in versions.items() if version is None]:
        yield PROBLEM, f"not installed: {', '.join(missing)}", ANEW
        return
    kernel, python = jupyter["kernel"], jupyter["python"]
    if kernel and "/" in kernel and kernel.rpartition("/")[0] != python.rpartition("/")[0]:
        yield (
            PROBLEM,
            f"the kernel python3 starts {kernel}, not {python}",
            (f"{python} -m ipykernel install --sys-prefix"),
        )
    major = versions["ipywidgets"].partition(".")[0]
    package, browser = WIDGETS.get(major, ("", ""))
    seen = f"ipywidgets {versions['ipywidgets']}, jupyterlab_widgets {versions['jupyterlab_widgets']}"
    if package and versions["jupyterlab_widgets"].partition(".")[0] != package:
        yield PROBLEM, f"{seen}: no widget shows; {major} needs jupyterlab_widgets {package}", ANEW
    if front_end is None:
        yield PROBLEM, f"{seen}: its part for the browser is not in this environment, no widget shows", ANEW
    elif browser and front_end.partition(".")[0] != browser:
        yield PROBLEM, f"{seen}: its part for the browser is {front_end}, an older one; no widget shows", ANEW
    odd = [n for n in ("ipykernel", "ipywidgets", "jupyterlab") if n in tested and versions[n] != tested[n]]
    if odd:
        told = ", ".join(f"{name} {versions[name]} (tested: {tested[name]})" for name in odd)
        yield WARNING, f"{told}: whether widgets act while a cell runs depends on them", ANEW
    yield OK, f"{seen}, ipykernel {versions['ipykernel']}, jupyterlab {versions['jupyterlab']}"


def _disk_and_clock(facts: Facts) -> Said:
    disk = facts["disk"]
    here, temporary = disk["here"], disk["temporary"]
    if disk["clock of the disk"] is None:
        yield PROBLEM, "this folder cannot be written, and runs are kept under it", "cd to a folder of your own"
    elif abs(skew := disk["clock of the disk"] - disk["clock"]) > 5:
        yield WARNING, f"the disk's clock is {skew:+.0f} s off this machine's: newest is not always last", "timedatectl"
    if disk["clock"] < disk["python installed"]:
        yield PROBLEM, "the clock is behind the day that Python was installed: certificates fail", "timedatectl"
    for name, free in (("this folder", here), ("temporary files", temporary)):
        if free < GIB:
            state = PROBLEM if free < GIB / 10 else WARNING
            yield (
                state,
                f"{free / GIB:.2f} GiB free for {name}",
                "df -h, then remove what is old",
            )
    yield OK, f"free: {here / GIB:.1f} GiB in this folder, {temporary / GIB:.1f} GiB for temporary files; clock right"


CHECKS = {
    "torch build": _torch_build,
    "driver": _driver,
    "kernels": _kernels,
    "cuDNN and NCCL": _libraries,
    "memory": _memory,
    "ranks": _ranks,
    "processes": _processes,
    "notebook": _notebook,
    "disk and clock": _disk_and_clock,
}


def _has_gpu(facts: Facts) -> bool:
    driver = facts["driver"]
    return bool(driver["version"] or driver["on the bus"] or driver["device files"])


def _listed(capability: str, archs: Sequence[str]) -> bool:
    """Return whether a build has code for a GPU: of its major version and no newer, or as PTX of an older one."""
    major, minor = map(int, capability.split("."))
    for kind, high, low in re.findall(r"(sm|compute)_(\d+)(\d)\b", " ".join(archs)):
        built = (int(high), int(low))
        if built <= (major, minor) and (kind == "compute" or built[0] == major):
            return True
    return False


def _driver_cuda(facts: Facts) -> int:
    """Return the newest major version of CUDA that the driver runs, 0 if that is not known."""
    version, told = facts["driver"]["version"], facts["gpus"]["error"] or ""
    if version:
        return max((cuda for cuda, need in DRIVERS.items() if int(version.partition(".")[0]) >= need), default=10)
    found = re.search(r"too old \(found version (\d+)\)", told)  # torch's own words; 12080 is CUDA 12.8
    return int(found[1]) // 1000 if found else 0


def _other_build(facts: Facts) -> str:
    """Return which build of torch fits the GPUs and the driver that are here."""
    old = 0 < _driver_cuda(facts) < int(NEW_BUILD.partition(".")[0])
    old |= any(tuple(map(int, one["capability"].split("."))) < TURING for one in facts["gpus"]["devices"])
    tested = facts["tested"].get("torch", "")
    return f"install torch {tested} for CUDA {OLD_BUILD if old else NEW_BUILD}: {GET}"


def _twice(wheels: Sequence[str]) -> list[str]:
    """Return NVIDIA's wheels that share a folder and are installed for more than one CUDA version."""
    found: dict[str, list[str]] = {}
    for wheel in wheels:
        found.setdefault(re.sub(r"-cu\d+$", "", wheel.partition(" ")[0]), []).append(wheel)
    return [wheel for base, same in found.items() if base in SHARED_FOLDER and len(same) > 1 for wheel in same]
