"""Somebody's script under watch: recorded in a run's folder, summed up at its end, replayed where it went wrong.

Torch, and all that imports it, is imported when the script has imported it, and not before.
"""

import contextlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dxdy_nb.errors import DxdyError
from dxdy_nb.observe.script import Script, as_main, before_os_exit, exit_code, run, when_imported
from dxdy_nb.runs.folder import new_folder

if TYPE_CHECKING:
    from dxdy_nb.diagnosis.report import Report
    from dxdy_nb.observe.blackbox import BlackBox, Replay
    from dxdy_nb.observe.observer import Watch
    from dxdy_nb.observe.summary import Summary
    from dxdy_nb.runs.record import Recorder


def watch(script: Script, *, out: Path | None = None, steps: int | None = None, json_file: Path | None = None) -> int:
    """Run a script under watch, record, sum up and judge it on stderr; return its exit code, or 1 for an error found.

    Parameters
    ----------
    out : the run's folder (default ``runs/<id>/`` under the current directory)
    steps : end it after so many optimizer steps, with exit code 0
    json_file : where the summary is written as JSON, too

    Raises
    ------
    DxdyError
        Before the script starts: there is no such script, or a place to write to cannot be written.
    """
    with as_main(script) as program:
        to = writable(json_file) if json_file else None
        name = script.name.rpartition(".")[2] if script.is_module else Path(script.name).stem
        recording = _Recording(script, new_folder(name, out), steps, to)
        with when_imported("torch", recording.begin), before_os_exit(lambda code: recording.end(SystemExit(code))):
            error = run(program)
            recording.end(error)
    return exit_code(error) or int(recording.report is not None and not recording.report.healthy)


class _Recording:
    """The record of one script: begun when torch has arrived, ended once, by whatever ends the script."""

    def __init__(self, script: Script, folder: Path, steps: int | None, json_file: Path | None) -> None:
        self._script, self._folder, self._steps, self._json_file = script, folder.absolute(), steps, json_file
        self._directory, self._process, self._stderr = os.getcwd(), os.getpid(), sys.stderr
        self._shown = folder
        self._stack = contextlib.ExitStack()
        self._arrived = False  # whether torch was imported
        self._recorder: Recorder | None = None
        self._watch: Watch | None = None
        self._box: BlackBox | None = None
        self._summary: Summary | None = None
        self.report: Report | None = None

    def begin(self) -> None:
        """Begin to watch; what goes wrong here is ours, and no reason for the script not to run."""
        try:
            self._begin()
        except Exception as error:
            self._say(f"{self._script} goes on unwatched: {error}")

    def _begin(self) -> None:
        self._arrived = True
        from dxdy_nb.observe.blackbox import BlackBox
        from dxdy_nb.observe.observer import Watch
        from dxdy_nb.runs.record import Recorder, write_environment

        facts = {"kind": "script", "script": {**asdict(self._script), "directory": self._directory}, "metrics": {}}
        self._recorder = self._stack.enter_context(Recorder(self._folder, **facts))
        write_environment(self._folder)
        self._stack.callback(self._sum_up)  # after the watch has ended, and before the record has
        self._box = BlackBox(self._folder)
        watch = Watch(out=self._folder, blackbox=self._box, stop_after=self._steps, witness=True)
        self._watch = self._stack.enter_context(watch)

    def end(self, error: BaseException | None) -> None:
        """End the record, and tell what was seen; do nothing in a process that was forked from this one."""
        if os.getpid() != self._process:
            return
        with contextlib.suppress(Exception):  # what the script printed comes first
            sys.stdout.flush()
        code = exit_code(error)
        try:
            self._stack.__exit__(*_of(error if code else None))
        except Exception as ours:  # the script's exit code is not to change for this
            self._say(f"the record is not complete: {ours}")
        told = {"script": str(self._script), "arguments": self._script.arguments, "exit_code": code, "steps": 0}
        if not self._arrived:
            with contextlib.suppress(OSError):
                self._folder.rmdir()  # nothing came into it
            self._say(f"{self._script} did not import torch: there was nothing to watch.")
        elif self._recorder is not None and self._summary is not None:
            told |= self._tell(self._recorder, self._summary, code)
        if self._json_file is not None:
            known = json.loads(json.dumps(told), parse_constant=lambda _: None)  # JSON has no NaN
            try:
                self._json_file.write_text(json.dumps(known, indent=1) + "\n")
            except OSError as ours:
                self._say(f"{self._json_file}: not written: {ours.strerror}")

    def _sum_up(self) -> None:
        from dxdy_nb.observe.summary import summary

        assert self._recorder is not None
        if self._watch is None:
            return
        try:
            self._summary = summary(self._watch)
            self._recorder.result["metrics"] = self._summary.to_dict()
        except Exception as error:
            self._say(f"no summary: {type(error).__name__}: {error}")
        try:
            self.report = self._watch.diagnose()
            self._recorder.result["report"] = str(self.report)
            wrong = "; ".join(f"{one.stage}: {one.cause}" for one in self.report.errors)
            self._recorder.result["metrics"]["found"] = wrong or ("no error" if self.report.saw else "not judged")
        except Exception as error:
            self._say(f"no report: {type(error).__name__}: {error}")

    def _tell(self, recorder: "Recorder", seen: "Summary", code: int) -> dict[str, Any]:
        """Say what was seen, and return it for programs."""
        status, seconds = recorder.result["status"], recorder.result["seconds"]
        text = f"{self._script}: {status} after {seconds:.1f} s, exit code {code}\n{seen}  record     {self._shown}"
        kept = [one for one in (self._box.incidents if self._box else ()) if one.path]
        if kept:
            text += f"\n  kept       {'; '.join(one.sentence for one in kept)}: dxdy replay {self._shown}"
        self._say(text)
        if self.report is not None:
            print(f"\n{self.report}", file=self._stderr)
        judged = json.loads(self.report.to_json()) if self.report is not None else None
        wrong = [{"kind": one.kind, "step": one.step, "sentence": one.sentence} for one in kept]
        return {
            "status": status,
            "seconds": seconds,
            "record": str(self._folder),
            **seen.to_dict(),
            "kept": wrong,
            "report": judged,
        }

    def _say(self, text: str) -> None:
        _say(f"dxdy watch: {text}", self._stderr)


def replay(folder: Path) -> int:
    """Run the recorded steps that went wrong again, in the script that they were recorded in, started anew.

    Returns 0 where the loss and the gradient norm of each step are those recorded, bit for bit, and 1 where not; stderr
    says which.

    Raises
    ------
    DxdyError
        The folder holds no run of a script, or no step that went wrong.
    """
    folder, stderr = folder.absolute(), sys.stderr
    script, directory = _recorded(folder)
    try:
        os.chdir(directory)
    except OSError as no:
        raise DxdyError(f"{directory}: {no.strerror}. The script was recorded there.") from None
    begun: list[Replay] = []
    refused: list[DxdyError] = []
    with contextlib.ExitStack() as stack:

        def begin() -> None:
            from dxdy_nb.observe import blackbox, observer

            try:
                again = blackbox.Replay(folder)
            except DxdyError as no:
                refused.append(no)
                raise SystemExit(2) from None
            # In full at every step: such a norm is compared with one that was recorded in full.
            stack.enter_context(observer.Watch(budget=None, replay=again))
            begun.append(again)

        with as_main(script) as program, when_imported("torch", begin):
            error = run(program)
            stack.__exit__(*_of(error))
    if refused:
        raise refused[0]
    if isinstance(error, KeyboardInterrupt):
        raise error
    if not begun:
        raise DxdyError(f"{script}: did not import torch this time. Is it the script that was recorded?")
    verdict = begun[0].verdict
    _say(f"dxdy replay: {verdict.sentence}", stderr)
    return 0 if verdict.same else 1


def _recorded(folder: Path) -> tuple[Script, str]:
    """Return the script that a run's folder tells of, and the directory that it was started in."""
    path = folder / "result.json"
    try:
        told = json.loads(path.read_text())["script"]
        return Script(told["name"], tuple(told["arguments"]), told["is_module"]), told["directory"]
    except OSError as error:
        raise DxdyError(f"{path}: cannot be read ({error.strerror}). Is {folder} a run's folder?") from None
    except (ValueError, KeyError, TypeError):
        raise DxdyError(f"{folder}: holds no run of a script. Record one: dxdy watch --out DIR train.py") from None


def _of(error: BaseException | None) -> Any:
    """Return an error as the end of a `with` block is told of it."""
    return (type(error), error, error.__traceback__) if error else (None, None, None)


def writable(path: Path) -> Path:
    """Return where a summary is to be written, wherever the script goes meanwhile.

    Raises
    ------
    DxdyError
        It cannot be written.
    """
    path = path.absolute()
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise DxdyError(f"{path}: cannot be written. Give a file in a folder that is there, as --json.")
    return path


def _say(text: str, stderr: Any) -> None:
    """Print to what was stderr at the start, which the script may have closed, or its reader left."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=stderr, flush=True)
