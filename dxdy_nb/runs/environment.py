"""Where a run took place: versions, code, device, and whether anybody is watching."""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

LARGEST_DIFF = 1_000_000  # characters: a diff is kept to be read
MOST_FILES = 100


def describe(model: torch.nn.Module | None = None, data: Any = None) -> dict[str, Any]:
    """Return versions, commit, changed files, threads, precision and deterministic flags as plain values."""
    commit = _git("rev-parse", "HEAD")
    top = _git("rev-parse", "--show-toplevel")
    root = Path(top.strip() if top else Path.cwd()).resolve()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,  # with the build, which the installed package's own version leaves out
        "numpy": np.__version__,
        "dxdy_nb": importlib.metadata.version("dxdy_nb"),
        "project": root.name,
        "commit": commit.strip() if commit else None,
        "uncommitted_changes": bool(_git("status", "--porcelain")) if commit else None,
        "files": _digests(root, tracked=commit is not None),
        "model": class_name(model),
        "data": class_name(data),
        "cuda": torch.version.cuda,
        "gpus": [_gpu(i) for i in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
    }


def _digests(root: Path, *, tracked: bool) -> dict[str, str]:
    """Return a digest of each code file that the commit does not hold as it is, the script that runs among them."""
    names = [str(path.relative_to(root)) for path in sorted(root.glob("*.py"))]  # without git: those beside each other
    if tracked:
        changed = _git("-C", str(root), "diff", "--name-only", "-z", "HEAD") or ""
        others = _git("-C", str(root), "ls-files", "-z", "--others", "--exclude-standard", "*.py", "*.ipynb") or ""
        names = [name for name in f"{changed}\0{others}".split("\0") if name]
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    paths = [*(root / name for name in names[:MOST_FILES]), *([Path(script).resolve()] if script else [])]
    found = [path for path in paths if path.is_file() and os.access(path, os.R_OK)]
    return {(str(p.relative_to(root)) if p.is_relative_to(root) else p.name): digest([p.read_bytes()]) for p in found}


def digest(parts: Iterable[bytes | memoryview | torch.Tensor]) -> str:
    """Return 16 hex digits of the sha256 over texts or tensors; types and shapes of tensors count.

    Examples
    --------
    >>> digest([torch.zeros(2)]) == digest([torch.zeros(2)]), digest([torch.zeros(2)]) == digest([torch.zeros(1, 2)])
    (True, False)
    """
    sha = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            sha.update(f"{part.dtype}{tuple(part.shape)}".encode())
            part = part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        sha.update(part)
    return sha.hexdigest()[:16]


def _gpu(number: int) -> str:
    """Return a GPU's name; to ask for it would take a GPU into use, and a program that forks later would break."""
    return torch.cuda.get_device_name(number) if torch.cuda.is_initialized() else "not in use yet"


def uncommitted_diff() -> str:
    """Return what differs from the last commit, cut where nobody would read on; empty outside a repository."""
    return (_git("diff", "HEAD") or "")[:LARGEST_DIFF]


def class_name(thing: Any) -> str | None:
    """Return ``module.Class`` of an object."""
    return None if thing is None else f"{type(thing).__module__}.{type(thing).__qualname__}"


def attended() -> bool:
    """Return whether somebody is watching: a live notebook, or a terminal."""
    return in_live_notebook() if _kernel_shell() else sys.stderr.isatty()


def in_live_notebook() -> bool:
    """Return whether this is a cell that a person runs, in a front end that shows widgets.

    JupyterLab offers standard input to the kernel with each cell; papermill, nbval and nbconvert do not.
    """
    shell = _kernel_shell()
    return bool(shell and shell.get_parent().get("content", {}).get("allow_stdin"))


def _kernel_shell() -> Any:
    """Return IPython's shell inside a kernel, else None; IPython is asked only where it is loaded already."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell if hasattr(shell, "get_parent") else None


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the time of a block; processes that start inside inherit it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _git(*arguments: str) -> str | None:
    """Return what git says, or None where it is missing, slow, or this is no repository."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=10, check=True, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
