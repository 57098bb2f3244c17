"""What a file still tells when the run is over: a checkpoint, two of them, or a table of its loss."""

import time
from dataclasses import replace
from pathlib import Path

from dxdy_nb.diagnosis import checkpoint, curve
from dxdy_nb.diagnosis.report import Report
from dxdy_nb.errors import DxdyError

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
STARTS = (b"PK", b"\x80")  # of a zip file, of a pickle


def inspect(path: str | Path, later: str | Path | None = None) -> Report:
    """Return what a file still tells of a run that is over.

    Parameters
    ----------
    path : a checkpoint (what torch.save wrote, or safetensors), or a text table with a column for the loss
    later : a second checkpoint of the same model: tensors that are the same in both did not move

    Raises
    ------
    DxdyError
        The file cannot be read, holds anything else, or can only be read by running code that is in it.

    Examples
    --------
    >>> import torch
    >>> torch.save({"weight": torch.tensor([1.0, float("nan")])}, tmp_path / "last.pt")
    >>> inspect(tmp_path / "last.pt").errors[0].evidence
    'weight: 1 of 2 values, the first at [1]'
    """
    began, paths = time.monotonic(), [Path(path)] + ([Path(later)] if later is not None else [])
    if all(map(_is_checkpoint, paths)):
        report = checkpoint.report(*paths)
    elif later is None:
        report = curve.report(paths[0])
    else:
        raise DxdyError("inspect: two files are compared when both are checkpoints; give a table of losses alone.")
    return replace(report, seconds=time.monotonic() - began)


def _is_checkpoint(path: Path) -> bool:
    if path.exists() and not path.is_file():
        raise DxdyError(f"inspect: {path} is no file. A run's own folder is read by dx.Run.load(folder).")
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as error:
        raise DxdyError(f"inspect: {path} cannot be read: {error.strerror}.") from None
    if not start:
        raise DxdyError(f"inspect: {path} is empty: it was made, and nothing was written into it.")
    if path.suffix not in SUFFIXES and not start.startswith(STARTS) and b"\0" in start:
        raise DxdyError(f"inspect: {path} is neither a checkpoint nor a text table.")
    return path.suffix in SUFFIXES or start.startswith(STARTS)
