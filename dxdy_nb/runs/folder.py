"""A run's folder: made for one run, and never for a second one. Nothing here imports torch."""

import secrets
import time
from pathlib import Path
from typing import Any

from dxdy_nb.errors import DxdyError

FILES = (
    *("config.yaml", "environment.json", "diff.patch", "result.json", "trace.json", "trace.bin"),
    *("checkpoints", "notebook.ipynb"),
)

PRIVATE = 0o700
RANKS = "ranks"  # in a run's folder: a log of each rank, and the folders of all ranks but the first


def new_folder(name: str, out: str | Path | None = None) -> Path:
    """Make and return a run's folder: ``out``, or ``runs/<id>/`` under the current directory.

    Only its owner may enter it: a record holds code, samples and paths. A folder that is there already keeps its mode,
    and ``chmod`` opens a run to others.

    Raises
    ------
    DxdyError
        The folder cannot be made, or already holds a run (or a file that would be overwritten).
    """
    if out is None:
        out = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{secrets.token_hex(2)}"
    folder = folder_of(out, "out")
    try:
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        taken = [name for name in FILES if (folder / name).exists()]
    except (OSError, ValueError) as error:  # a ValueError: a path with a zero byte
        raise not_writable(folder, error) from None
    if taken:
        raise held(folder, *taken)
    return folder


def folder_of(run: Any, asked: str) -> Path:
    """Return the folder of a run, or of a path to it.

    Raises
    ------
    DxdyError
        It is something else; ``asked`` says by whom.
    """
    found = getattr(run, "folder", run)
    if not isinstance(found, (str, Path)) or found == "":  # a shell's unset variable is not the current folder
        got = "nothing" if isinstance(found, str) else type(run).__name__
        raise DxdyError(f"{asked}: expected a run's folder, or a run where one is asked for; got {got}.")
    return Path(found)


def held(folder: Path, *names: str) -> DxdyError:
    """Return the error that a folder holds a run already."""
    return DxdyError(
        f"{folder}: already holds a run ({', '.join(names)}). Give another folder; nothing is overwritten."
    )


def not_writable(folder: Path, error: Exception) -> DxdyError:
    """Return the error that a folder cannot be written."""
    reason = getattr(error, "strerror", None) or error
    return DxdyError(f"{folder}: cannot be written ({reason}). Give a folder that can be.")
