"""What was observed, one fixed-size checksummed record a step: in memory, and on disk while it runs.

``trace.bin`` opens with 16 bytes (a magic word, and the first step that could not be stored, or -1), then holds one
record a step, appended by one write each: whatever ends the process, all that was written before can be read. Where
the set of parameters changes, ``trace.1.bin`` goes on, and so forth; ``trace.json`` has the names and shapes of each
of these segments, and is replaced as a whole before the first record of a new one.
"""

import contextlib
import errno
import json
import math
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dxdy_nb.errors import DxdyError, counted
from dxdy_nb.observe.statistics import COLUMNS as STATISTICS

if TYPE_CHECKING:
    import pandas as pd

VERSION = 2
MAGIC = b"dxdytrc2"
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
HEAD = ("step", *STEP_COLUMNS, "skipped", "full", "bad_count")
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

    Parameters
    ----------
    layout : the parameters of the first records; it may be empty, and it may change (``relayout``)
    folder : a run's folder, made where there is none; None keeps all in memory
    first : the step from which a trace that is there already goes on; later records of it are cut off

    Raises
    ------
    DxdyError
        The folder cannot be written, or already holds a trace (without ``first``).

    Examples
    --------
    >>> writer = TraceWriter(Layout((), ()), folder=None)
    >>> writer.relayout(Layout(("weight",), ((2, 3),)))
    >>> writer.append(0, dict.fromkeys(STEP_COLUMNS, 1.0), np.ones((1, 6)))
    >>> writer.read().gradients.loc[(0, "weight"), "norm"]
    np.float64(1.0)
    """

    def __init__(self, layout: Layout, folder: Path | None, first: int | None = None) -> None:
        self.layout = layout
        self.folder = folder
        self._begun: Layout | None = None  # the layout of the records that are being written
        self._on_disk: list[Layout] = []  # those of all segments
        self._in_memory: list[_Kept] = []
        self._file: int | None = None
        if folder is not None:
            if first is not None and (folder / "trace.json").exists():
                self._on_disk, self._file = _cut(folder, first)
            else:
                self._on_disk = [layout] if layout.parameters else []
                self._file = _create(folder, self._on_disk, new=first is None)
            self.folder = folder.absolute()  # the loop may go to another directory

    def relayout(self, layout: Layout) -> None:
        """Say that the records from here on are about other parameters."""
        self.layout = layout

    def append(
        self,
        step: int,
        values: Mapping[str, float],
        gradients: NDArray[np.float64],
        update_ratios: NDArray[np.float64] | None = None,
        *,
        skipped: bool = False,
        bad_samples: Sequence[int] = (),
        full: bool = True,
    ) -> None:
        """Store one step; the call returns when the operating system has it.

        Parameters
        ----------
        values : a number for each of ``STEP_COLUMNS``
        gradients : shape (parameters, 6), in the order of ``statistics.COLUMNS``
        update_ratios : shape (parameters,); None where they were not measured
        skipped : whether no update followed
        bad_samples : ids of the samples in a batch that went wrong
        full : whether all statistics were measured
        """
        if self.layout != self._begun:
            self._begin(step)
        self._head[:] = (step, *[values[name] for name in STEP_COLUMNS], skipped, full, len(bad_samples))
        if bad_samples:
            self._bad_samples[: len(bad_samples)] = bad_samples[:MAX_BAD_SAMPLES]
        self._gradients[:] = gradients
        self._ratios[:] = np.nan if update_ratios is None else update_ratios
        self._crc[0] = zlib.crc32(self._bytes[:-4])
        if not self._write(step):
            self._keep()

    def _begin(self, step: int) -> None:
        """Make the record that is filled anew at each step and written as it lies, and the file it goes to."""
        ready = self._begun is None and self._on_disk[-1:] == [self.layout]  # since the start
        layout = self._begun = self.layout
        record = np.zeros(1, layout.record)
        self._head, self._bad_samples, self._crc = record["head"][0], record["bad_samples"][0], record["crc"]
        self._gradients, self._ratios = record["gradients"][0, :, :-1], record["gradients"][0, :, -1]
        self._bytes = record.view(np.uint8).data
        if self._file is not None and not ready:
            try:
                self._open_segment(layout)
            except OSError as error:
                self._stop_writing(step, error.strerror or str(error))

    def _open_segment(self, layout: Layout) -> None:
        assert self.folder is not None
        if self._on_disk:  # else no reader knows of parameters for the file that was made at the start
            file = _open(self.folder / _file_name(len(self._on_disk)))
            self.close()
            self._file = file
        self._on_disk.append(layout)
        _describe(self.folder, self._on_disk)

    def _write(self, step: int) -> bool:
        if self._file is None:
            return False
        try:
            if os.write(self._file, self._bytes) == len(self._bytes):
                return True
            reason = "no space left"
        except OSError as error:
            reason = error.strerror or str(error)
        with contextlib.suppress(OSError):  # a disk may refuse even that: a reader finds a torn record by itself
            whole = (os.fstat(self._file).st_size - HEADER) // len(self._bytes)
            os.ftruncate(self._file, HEADER + whole * len(self._bytes))
        self._stop_writing(step, reason)
        return False

    def _stop_writing(self, step: int, reason: str) -> None:
        """Note in the header (which needs no new space) what is missing, and say so once."""
        assert self.folder is not None
        with contextlib.suppress(OSError):
            _note_missing(self.folder, step)
        self.close()
        warnings.warn(
            f"{self.folder}/trace.bin: {reason}. Training goes on; from step {step} on the record is in memory only.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _keep(self) -> None:
        assert self._begun is not None
        if not self._in_memory or self._in_memory[-1].layout != self._begun:
            self._in_memory.append(_Kept(self._begun))
        self._in_memory[-1].append(self._bytes)

    def read(self) -> "Trace":
        """Return all that was stored so far."""
        stored = Trace() if self.folder is None else read(self.folder)
        return replace(stored, segments=(*stored.segments, *[kept.segment() for kept in self._in_memory]))

    def close(self) -> None:
        """Release the file; what is stored can still be read."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class _Kept:
    """The records of one layout in memory, in an array that doubles when it is full."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._count = 0
        self._records = np.empty(16, layout.record)

    def append(self, record: memoryview) -> None:
        if self._count == len(self._records):
            grown = np.empty(2 * self._count, self.layout.record)
            grown[: self._count] = self._records
            self._records = grown
        start = self._count * len(record)
        self._records.view(np.uint8).data[start : start + len(record)] = record
        self._count += 1

    def segment(self) -> "Segment":
        return Segment(self.layout, self._records[: self._count])


@dataclass(frozen=True)
class Segment:
    """Records about one set of parameters."""

    layout: Layout
    records: NDArray[np.void]


@dataclass(frozen=True)
class Trace:
    """The records of a loop, finished or still running, and the tables made from them.

    ``missing_from`` is the first step that could not be stored (None: none is missing); ``torn_bytes`` counts what
    was cut from the end, where a process died in the middle of a write.
    """

    segments: tuple[Segment, ...] = ()
    missing_from: int | None = None
    torn_bytes: int = 0

    def since(self, step: int) -> "Trace":
        """Return the records from a step on; nothing is copied."""
        starts = [int(np.searchsorted(segment.records["head"][:, 0], step)) for segment in self.segments]
        parts = [Segment(s.layout, s.records[start:]) for s, start in zip(self.segments, starts, strict=True)]
        return replace(self, segments=tuple(parts))

    @property
    def sizes(self) -> dict[str, int]:
        """The number of elements of each parameter that there was."""
        return {name: size for segment in self.segments for name, size in segment.layout.sizes.items()}

    @property
    def steps(self) -> "pd.DataFrame":
        """One row a step, times in seconds, memory in bytes, index ``step``."""
        import pandas as pd

        head = self._column("head", len(HEAD), float)
        table = pd.DataFrame(head[:, 1 : 1 + len(STEP_COLUMNS)], columns=list(STEP_COLUMNS))
        table["effective_batch"] = table["effective_batch"].astype(int)
        table["skipped"] = head[:, -3].astype(bool)
        counts = head[:, -1].astype(int)
        ids = self._column("bad_samples", MAX_BAD_SAMPLES, int)
        table["bad_samples"] = [row[:count].tolist() for row, count in zip(ids, counts, strict=True)]
        table["full"] = head[:, -2].astype(bool)
        table.index = pd.Index(head[:, 0].astype(int), name="step")
        return table

    def _column(self, name: str, width: int, kind: type) -> NDArray[Any]:
        empty: NDArray[Any] = np.zeros((0, width), kind)
        return np.concatenate([empty, *[segment.records[name] for segment in self.segments]])

    @property
    def gradients(self) -> "pd.DataFrame":
        """One row for each step and parameter that there was then, index ``(step, parameter)``."""
        import pandas as pd

        names = ["step", "parameter"]
        tables = []
        for segment in self.segments:
            steps = segment.records["head"][:, 0].astype(int)
            index = pd.MultiIndex.from_product([steps, segment.layout.parameters], names=names)
            flat = segment.records["gradients"].reshape(-1, len(GRADIENT_COLUMNS))
            tables.append(pd.DataFrame(flat, index=index, columns=list(GRADIENT_COLUMNS)))
        filled = [table for table in tables if len(table)]
        if not filled:
            index = pd.MultiIndex.from_product([np.zeros(0, int), np.zeros(0, str)], names=names)
            return pd.DataFrame(columns=list(GRADIENT_COLUMNS), index=index, dtype=float)
        return pd.concat(filled) if len(filled) > 1 else filled[0]

    def to_tensorboard(self, folder: str | Path) -> None:
        """Write loss, times and so on of each step, and norm and update ratio of each parameter, for TensorBoard.

        Raises
        ------
        DxdyError
            The package ``tensorboard`` is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise DxdyError("to_tensorboard: needs the package tensorboard. Run `pip install tensorboard`.") from None
        with SummaryWriter(str(folder)) as writer:
            steps = self.steps
            for name in STEP_COLUMNS:
                for step, value in steps[name].items():
                    writer.add_scalar(f"steps/{name}", value, step)
            for segment in self.segments:
                for record in segment.records:
                    for parameter, row in zip(segment.layout.parameters, record["gradients"], strict=True):
                        for name in ("norm", "update_ratio"):
                            value = row[GRADIENT_COLUMNS.index(name)]
                            if not math.isnan(value):
                                writer.add_scalar(f"{name}/{parameter}", value, int(record["head"][0]))


class Reader:
    """Follows a trace that is still being written, perhaps by another process.

    Raises
    ------
    DxdyError
        There is no trace, or it is not one of ours.

    Examples
    --------
    >>> writer = TraceWriter(Layout(("weight",), ((2, 3),)), tmp_path)
    >>> reader = Reader(tmp_path)
    >>> for step in range(3):
    ...     writer.append(step, dict.fromkeys(STEP_COLUMNS, 1.0), np.ones((1, 6)))
    >>> len(reader.update().steps), len(reader.update().steps)
    (3, 0)
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._layouts: list[Layout] = []
        self._described: tuple[int, ...] = ()  # what tells one version of trace.json from another
        self._segment = 0  # the one that grows
        self._position = HEADER  # where in its file that goes on which was not read yet
        self._describe()

    def update(self) -> Trace:
        """Return what was written since the last call; only that is read."""
        self._describe()
        with _reading(self.folder / _file_name(0)) as (_, missing):
            pass
        segments, torn = [], 0
        for number in range(self._segment, len(self._layouts)):
            if number > self._segment:
                self._segment, self._position = number, HEADER
            records, rest = _records(self.folder / _file_name(number), self._position, self._layouts[number])
            self._position += records.nbytes
            torn += rest
            segments.append(Segment(self._layouts[number], records))
        return Trace(tuple(segments), None if missing < 0 else missing, torn)

    def _describe(self) -> None:
        path = self.folder / "trace.json"
        try:
            found = path.stat()
        except OSError as error:
            raise DxdyError(f"{path}: cannot be read ({error.strerror}). Is {path.parent} a run's folder?") from None
        described = found.st_ino, found.st_mtime_ns, found.st_size
        if described != self._described:
            self._layouts, self._described = _read_layouts(path), described


def read(folder: str | Path) -> Trace:
    """Read a trace from a run's folder, also while it grows or after its process died.

    Raises
    ------
    DxdyError
        There is no trace, or it is not one of ours.
    """
    return Reader(folder).update()


def check(folder: Path, first: int) -> None:
    """Refuse a trace that would lose records from before a step if it went on from there: what lies behind a damage.

    A file that only ends too early has nothing left to lose: a warning says which steps are missing.

    Raises
    ------
    DxdyError
        A file is missing or damaged.
    """
    described, path = folder / "trace.json", folder / _file_name(0)
    last, known = -1, -1  # the last step of all segments; the first that was not stored, as the header says
    if not described.exists():
        if path.exists() and path.stat().st_size > HEADER:
            raise DxdyError(f"{described}: is missing, and {path.name} cannot be read without it.")
        return
    for number, layout in enumerate(_read_layouts(described)):
        path = folder / _file_name(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            records, rest = _records(path, HEADER, layout)
        last = int(records["head"][-1, 0]) if len(records) else last
        with _reading(path) as (_, missing):
            known = max(known, missing)
        if rest >= layout.record.itemsize and last < first - 1:
            raise DxdyError(f"{path}: is damaged behind step {last}." if len(records) else f"{path}: is damaged.")
    if last < first - 1 and known < 0:  # a machine that lost its power may keep a checkpoint, and not the steps before
        lost = f"step {last + 1}" if last == first - 2 else f"steps {last + 1} to {first - 1}"
        warnings.warn(f"{path}: ends too early. The record of {lost} is lost.", RuntimeWarning, stacklevel=2)


def glance(folder: Path) -> Trace:
    """Return a trace of which only what is asked for is read: for the steps of many runs, or of a long one.

    Its records are not compared with their checksums, and cannot be written.

    Raises
    ------
    DxdyError
        There is no trace, or it is not one of ours.
    """
    segments = []
    for number, layout in enumerate(_read_layouts(folder / "trace.json")):
        path = folder / _file_name(number)
        with _reading(path) as (file, _):
            count = (os.fstat(file.fileno()).st_size - HEADER) // layout.record.itemsize
        records = np.memmap(path, layout.record, "r", HEADER, (count,)) if count else np.zeros(0, layout.record)
        segments.append(Segment(layout, records))
    return Trace(tuple(segments))


def _file_name(segment: int) -> str:
    return f"trace.{segment}.bin" if segment else "trace.bin"


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[tuple[BufferedReader, int]]:
    """Give the file behind its header, and the first step that is missing (-1: none)."""
    try:
        with open(path, "rb") as file:
            header = file.read(HEADER)
            if len(header) < HEADER or header[: len(MAGIC)] != MAGIC:
                raise DxdyError(f"{path}: does not begin as a trace does. Is it another file, or damaged?")
            yield file, int.from_bytes(header[len(MAGIC) :], "little", signed=True)
    except OSError as error:
        raise DxdyError(f"{path}: cannot be read ({error.strerror}).") from None


def _records(path: Path, position: int, layout: Layout) -> tuple[NDArray[np.void], int]:
    """Return the whole records of a file from a position on, and the number of bytes that follow them."""
    with _reading(path) as (file, _):
        file.seek(position)
        data = memoryview(file.read())
    size = layout.record.itemsize
    count = len(data) // size
    whole = 0  # records from the start with a right checksum
    while whole < count and _sound(data[whole * size : (whole + 1) * size]):
        whole += 1
    if whole < count:  # a torn write leaves less than a record
        warnings.warn(
            f"{path}: damaged. Of its {counted(count, 'record')} only the first {whole} can be trusted.",
            RuntimeWarning,
            stacklevel=2,
        )
    return np.frombuffer(data[: whole * size], layout.record), len(data) - whole * size


def _sound(record: memoryview) -> bool:
    return zlib.crc32(record[:-4]) == int.from_bytes(record[-4:], "little")


def _cut(folder: Path, first: int) -> tuple[list[Layout], int]:
    """Cut off the records from a step on; return the layouts of the segments that are left, and the last one's file."""
    trace = read(folder)
    keep = [int(np.searchsorted(segment.records["head"][:, 0], first)) for segment in trace.segments]
    while len(keep) > 1 and not keep[-1]:
        keep.pop()
        (folder / _file_name(len(keep))).unlink()
    layouts = [segment.layout for segment in trace.segments[: len(keep)]]
    try:
        _describe(folder, layouts)
        if trace.missing_from is not None and trace.missing_from >= first:
            _note_missing(folder, -1)
        file = os.open(folder / _file_name(max(len(keep) - 1, 0)), os.O_RDWR)
        os.ftruncate(file, HEADER + (keep[-1] * layouts[-1].record.itemsize if keep else 0))
        os.lseek(file, 0, os.SEEK_END)
    except OSError as error:
        raise _not_writable(folder, error) from None
    return layouts, file


def _note_missing(folder: Path, step: int) -> None:
    """Write into the header, which needs no new space, from which step on records are missing (-1: none is)."""
    first = os.open(folder / _file_name(0), os.O_WRONLY)
    os.pwrite(first, step.to_bytes(8, "little", signed=True), len(MAGIC))
    os.close(first)


def _create(folder: Path, layouts: Sequence[Layout], new: bool = True) -> int:
    """Make the folder with a trace without records, and return the file of its first segment."""
    file = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # a record is its owner's
        if not new:  # a process died between the two files
            (folder / _file_name(0)).unlink(missing_ok=True)
        if any((folder / name).exists() for name in ("trace.bin", "trace.json")):
            raise DxdyError(f"{folder}: already holds a trace. Give another folder; nothing recorded is overwritten.")
        file = _open(folder / _file_name(0))
        _describe(folder, layouts)
    except (OSError, ValueError) as error:  # a ValueError: a path with a zero byte
        if file is not None:  # nothing is recorded yet: leave the folder as it was, for another try
            os.close(file)
            (folder / _file_name(0)).unlink(missing_ok=True)
        raise _not_writable(folder, error) from None
    return file


def _not_writable(folder: Path, error: Exception) -> DxdyError:
    reason = getattr(error, "strerror", None) or error
    return DxdyError(f"{folder}: cannot be written ({reason}). Give a folder that can, as out=.")


def _open(path: Path) -> int:
    """Make a segment's file without a record."""
    # Not O_APPEND: under it Linux would append what is meant for the header.
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        header = MAGIC + (-1).to_bytes(8, "little", signed=True)
        if os.write(file, header) < len(header):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return file


def _describe(folder: Path, layouts: Sequence[Layout]) -> None:
    """Replace ``trace.json``: a reader sees the old or the new one."""
    description = {
        "version": VERSION,
        "step_columns": STEP_COLUMNS,
        "gradient_columns": GRADIENT_COLUMNS,
        "segments": [
            {
                "file": _file_name(number),
                "record_bytes": layout.record.itemsize,
                "parameters": [{"name": n, "shape": s} for n, s in zip(layout.parameters, layout.shapes, strict=True)],
            }
            for number, layout in enumerate(layouts)
        ],
    }
    temporary = folder / f".trace.json.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, folder / "trace.json")
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _read_layouts(path: Path) -> list[Layout]:
    try:
        described: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = described["version"]
        if version != VERSION:
            raise DxdyError(f"{path}: written in version {version} of this format; here version {VERSION} is read.")
        layouts = []
        for segment in described["segments"]:
            named = segment["parameters"]
            layout = Layout(tuple(p["name"] for p in named), tuple(tuple(p["shape"]) for p in named))
            if segment["record_bytes"] != layout.record.itemsize:
                raise DxdyError(
                    f"{path}: written by another version of this package (records of {segment['record_bytes']} bytes)."
                )
            layouts.append(layout)
    except OSError as error:
        raise DxdyError(f"{path}: cannot be read ({error.strerror}). Is {path.parent} a run's folder?") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DxdyError(f"{path}: does not describe a trace. Is it damaged?") from None
    return layouts
