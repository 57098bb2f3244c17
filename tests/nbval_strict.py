"""A pytest plugin: nbval sees what JupyterLab would have saved, and refuses a notebook that it could not compare.

nbval 0.11 ignores `clear_output` and `update_display_data`, prints what a trailing `;` silences, and passes a cell
that was never executed without comparing anything. Each of these is put right here.
"""

import json
from pathlib import Path
from typing import Any

import nbval.kernel
import pytest
from nbval.plugin import IPyNbCell, IPyNbFile

OUTPUTS = ("stream", "display_data", "execute_result", "error")


def pytest_collect_file(file_path: Path) -> None:
    """Refuse a notebook with cells that were not executed: it would pass whatever they print."""
    if file_path.suffix != ".ipynb":
        return
    cells = [
        c
        for c in json.loads(file_path.read_text())["cells"]
        if c["cell_type"] == "code" and "".join(c["source"]).strip()
    ]
    bare = [number for number, cell in enumerate(cells) if cell["execution_count"] is None]
    if bare:
        raise pytest.UsageError(
            f"{file_path.name}: code cells {bare} were not executed, so nothing would be compared. Run make notebooks."
        )


def _execute_cell_input(self: Any, cell_input: str, allow_stdin: bool | None = None) -> str:
    # With store_history=False the kernel does not see a trailing `;`.
    return self.kc.execute(cell_input, store_history=True, allow_stdin=allow_stdin, stop_on_error=False)


def _runtest(self: Any) -> None:
    self.parent.running_cell = self
    self.parent.clear_pending = False
    _original_runtest(self)


def _get_kernel_message(self: Any, timeout: float | None = None, stream: str = "iopub") -> dict[str, Any]:
    while True:
        message = _original_get(self, timeout=timeout, stream=stream)
        kind, content = message["msg_type"], message["content"]
        outputs = self.running_cell.test_outputs
        if kind == "clear_output":
            self.clear_pending = content.get("wait", False)
            if not self.clear_pending:
                _clear(self, outputs)
        elif kind == "update_display_data":
            for shown, place in self.__dict__.setdefault("displays", {}).get(content["transient"]["display_id"], []):
                shown[place]["data"], shown[place]["metadata"] = content["data"], content["metadata"]
        else:
            if kind in OUTPUTS and self.clear_pending:
                self.clear_pending = False
                _clear(self, outputs)
            display_id = content.get("transient", {}).get("display_id") if kind == "display_data" else None
            if display_id:
                self.__dict__.setdefault("displays", {}).setdefault(display_id, []).append((outputs, len(outputs)))
            return message


def _clear(file: Any, outputs: list[Any]) -> None:
    """Empty a cell's outputs, and forget the displays that stood in it."""
    outputs.clear()
    displays = file.__dict__.get("displays", {})
    for display_id, places in displays.items():
        displays[display_id] = [(shown, place) for shown, place in places if shown is not outputs]


_original_runtest = IPyNbCell.runtest
_original_get = IPyNbFile.get_kernel_message
nbval.kernel.RunningKernel.execute_cell_input = _execute_cell_input
IPyNbCell.runtest = _runtest
IPyNbFile.get_kernel_message = _get_kernel_message
