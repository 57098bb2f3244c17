"""What was observed, one fixed-size checksummed record a step: in memory, and on disk while it runs.

``trace.json`` holds names and shapes. ``trace.bin`` opens with 16 bytes (a magic word, and the first step that could
not be stored, or -1), then holds one record a step, appended by one write each: whatever ends the process, all that
was written before can be read.
"""

import contextlib
import json
import math
import os
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dxdy_nb.errors import DxdyError
from dxdy_nb.observe.statistics import COLUMNS as STATISTICS

if TYPE_CHECKING:
    import pandas as pd

MAGIC = b"dxdytrc1"
HEADER = len(MAGIC) + 8
GRADIENT_COLUMNS = (*STATISTICS, "update_ratio")
STEP_COLUMNS = (
    "loss",
    "lr",
    "grad_norm",
    "effective_batch",
    "step_time",
    "data_time",
    "forward_time",
    "backward_time",
    "update_time",
    "memory",
)
HEAD = ("step", *STEP_COLUMNS, "skipped", "bad_count")
MAX_BAD_SAMPLES = 64  # ids kept a step; a step that goes wrong as a whole needs no more of them


@dataclass(frozen=True)
class Layout:
    """The names and shapes of the parameters that a trace is about, and the record that follows from them."""

    parameters: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def record(self) -> np.dtype[np.void]:
        """The record of one step."""
        return np.dtype(
            [
                ("head", "<f8", len(HEAD)),  # float64 holds every step number that a run can reach
                ("bad_samples", "<i8", MAX_BAD_SAMPLES),
                ("gradients", "<f8", (len(self.parameters), len(GRADIENT_COLUMNS))),
                ("crc", "<u4"),
            ]
        )

    @property
    def sizes(self) -> dict[str, int]:
        """The number of elements of each parameter."""
        return {name: math.prod(shape) for name, shape in zip(self.parameters, self.shapes, strict=True)}


class TraceWriter:
    """Keeps records in memory, or appends them to ``folder`` while there is room on its disk.

    When the disk refuses, one warning says so, training goes on, and what follows is kept in memory.
    """

    def __init__(self, layout: Layout, folder: Path | None) -> None:
        self.layout = layout
        self.folder = folder
        self._kept: list[bytes] = []
        record = np.zeros(1, layout.record)  # filled anew at each step, and written as it lies
        self._head, self._bad_samples, self._crc = record["head"][0], record["bad_samples"][0], record["crc"]
        self._gradients, self._ratios = record["gradients"][0, :, :-1], record["gradients"][0, :, -1]
        self._bytes = record.view(np.uint8).data
        self._file: int | None = None
        if folder is not None:
            self._file = _create(layout, folder)
            self.folder = folder.absolute()  # the loop may go to another directory

    def append(
        self,
        step: int,
        values: Mapping[str, float],
        gradients: NDArray[np.float64],
        update_ratios: NDArray[np.float64] | None = None,
        *,
        skipped: bool = False,
        bad_samples: Sequence[int] = (),
    ) -> None:
        """Store one step; the call returns when the operating system has it."""
        self._head[:] = (step, *[values[name] for name in STEP_COLUMNS], skipped, len(bad_samples))
        if bad_samples:
            self._bad_samples[: len(bad_samples)] = bad_samples[:MAX_BAD_SAMPLES]
        self._gradients[:] = gradients
        self._ratios[:] = np.nan if update_ratios is None else update_ratios
        self._crc[0] = zlib.crc32(self._bytes[:-4])
        if self._file is None or not self._write(self._file, step):
            self._kept.append(bytes(self._bytes))

    def _write(self, file: int, step: int) -> bool:
        try:
            if os.write(file, self._bytes) == len(self._bytes):
                return True
            reason = "no space left"
        except OSError as error:
            reason = error.strerror or str(error)
        self._stop_writing(file, step, reason)
        return False

    def _stop_writing(self, file: int, step: int, reason: str) -> None:
        """Cut the torn record, note in the header (which needs no new space) what is missing, and say so once."""
        with contextlib.suppress(OSError):  # a disk may refuse even that: a reader finds a torn record by itself
            whole = (os.fstat(file).st_size - HEADER) // self.layout.record.itemsize
            os.ftruncate(file, HEADER + whole * self.layout.record.itemsize)
        with contextlib.suppress(OSError):
            os.pwrite(file, step.to_bytes(8, "little", signed=True), len(MAGIC))
        self.close()
        warnings.warn(
            f"{self.folder}/trace.bin: {reason}. Training goes on; from step {step} on the record is in memory only.",
            RuntimeWarning,
            stacklevel=2,
        )

    def read(self) -> "Trace":
        """Return all that was stored so far."""
        stored = read(self.folder) if self.folder is not None else Trace(self.layout, np.zeros(0, self.layout.record))
        kept = np.frombuffer(b"".join(self._kept), self.layout.record)
        return Trace(self.layout, np.concatenate([stored.records, kept]))

    def close(self) -> None:
        """Release the file; what is stored can still be read."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


@dataclass(frozen=True)
class Trace:
    """The records of a loop, finished or still running, and the tables made from them.

    ``missing_from`` is the first step that could not be stored (None: none is missing); ``torn_bytes`` counts what
    was cut from the end, where a process died in the middle of a write.
    """

    layout: Layout
    records: NDArray[np.void]
    missing_from: int | None = None
    torn_bytes: int = 0

    @property
    def steps(self) -> "pd.DataFrame":
        """One row a step, times in seconds, memory in bytes, index ``step``."""
        import pandas as pd

        head = self.records["head"]
        table = pd.DataFrame(head[:, 1 : 1 + len(STEP_COLUMNS)], columns=list(STEP_COLUMNS))
        table["effective_batch"] = table["effective_batch"].astype(int)
        table["skipped"] = head[:, -2].astype(bool)
        counts = head[:, -1].astype(int)
        table["bad_samples"] = [
            ids[:count].tolist() for ids, count in zip(self.records["bad_samples"], counts, strict=True)
        ]
        table.index = pd.Index(head[:, 0].astype(int), name="step")
        return table

    @property
    def gradients(self) -> "pd.DataFrame":
        """One row for each step and parameter, index ``(step, parameter)``."""
        import pandas as pd

        index = pd.MultiIndex.from_product(
            [self.records["head"][:, 0].astype(int), self.layout.parameters], names=["step", "parameter"]
        )
        flat = self.records["gradients"].reshape(-1, len(GRADIENT_COLUMNS))
        return pd.DataFrame(flat, index=index, columns=list(GRADIENT_COLUMNS))


def read(folder: str | Path) -> Trace:
    """Read a trace from a run's folder, also while it grows or after its process died.

    Raises
    ------
    DxdyError
        There is no trace, or it is not one of ours.
    """
    folder = Path(folder)
    layout = _read_layout(folder)
    try:
        data = (folder / "trace.bin").read_bytes()
    except OSError as error:
        raise DxdyError(f"{folder / 'trace.bin'}: cannot be read ({error.strerror}).") from None
    if data[: len(MAGIC)] != MAGIC:
        raise DxdyError(f"{folder / 'trace.bin'}: does not begin as a trace does. Is it another file, or damaged?")
    missing = int.from_bytes(data[len(MAGIC) : HEADER], "little", signed=True)
    body = memoryview(data)[HEADER:]
    size = layout.record.itemsize
    records = np.frombuffer(body[: len(body) // size * size], layout.record)
    whole = _whole(records)
    if whole < len(records):  # a torn write leaves less than a record
        warnings.warn(
            f"{folder / 'trace.bin'}: damaged. Of its {len(records)} records only the first {whole} can be trusted.",
            RuntimeWarning,
            stacklevel=2,
        )
    return Trace(layout, records[:whole], None if missing < 0 else missing, len(body) - whole * size)


def _whole(records: NDArray[np.void]) -> int:
    """Return how many records from the start carry a right checksum: a tail that does not was torn by a crash."""
    for place, record in enumerate(records):
        if zlib.crc32(record.tobytes()[:-4]) != int(record["crc"]):
            return place
    return len(records)


def _create(layout: Layout, folder: Path) -> int:
    description = {
        "version": 1,
        "parameters": [{"name": n, "shape": s} for n, s in zip(layout.parameters, layout.shapes, strict=True)],
        "step_columns": STEP_COLUMNS,
        "gradient_columns": GRADIENT_COLUMNS,
        "record_bytes": layout.record.itemsize,
    }
    file = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any((folder / name).exists() for name in ("trace.bin", "trace.json")):
            raise DxdyError(f"{folder}: already holds a trace. Give another folder; nothing recorded is overwritten.")
        # Not O_APPEND: under it Linux would append what is meant for the header.
        file = os.open(folder / "trace.bin", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(file, MAGIC + (-1).to_bytes(8, "little", signed=True))
        (folder / "trace.json").write_text(json.dumps(description, indent=1) + "\n")
    except (OSError, ValueError) as error:  # a ValueError: a path with a zero byte
        if file is not None:  # nothing is recorded yet: leave the folder as it was, for another try
            os.close(file)
            for name in ("trace.bin", "trace.json"):
                (folder / name).unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        raise DxdyError(f"{folder}: cannot be written ({reason}). Give a folder that can, as out=.") from None
    return file


def _read_layout(folder: Path) -> Layout:
    path = folder / "trace.json"
    try:
        described: dict[str, Any] = json.loads(path.read_text())
        names = tuple(entry["name"] for entry in described["parameters"])
        layout = Layout(names, tuple(tuple(entry["shape"]) for entry in described["parameters"]))
        if described["record_bytes"] != layout.record.itemsize:
            raise DxdyError(
                f"{path}: written by another version of this package (records of {described['record_bytes']} bytes)."
            )
    except OSError as error:
        raise DxdyError(f"{path}: cannot be read ({error.strerror}). Is {folder} a run's folder?") from None
    except (ValueError, KeyError, TypeError):
        raise DxdyError(f"{path}: does not describe a trace. Is it damaged?") from None
    return layout
