"""The command ``dxdy``."""

import argparse
import contextlib
import importlib
import importlib.metadata
import io
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dxdy_nb.config import parse_assignments
from dxdy_nb.errors import DxdyError, counted, in_a_line, suggestion

if TYPE_CHECKING:
    from dxdy_nb.runs import lessons

DESCRIPTION = "How gradients flow through PyTorch training, and what is wrong with yours."
FINE, PROBLEM, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 fine, 1 a failed run, 2 bad input, 130 interrupted."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may have bytes that are no text
    try:
        return options.command(options)
    except DxdyError as error:
        print(f"dxdy: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("dxdy: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dxdy", description=DESCRIPTION)
    parser.add_argument("--version", action=_Version, nargs=0, help="say which dxdy_nb and which torch this is")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    lab = _command(commands, "lab", _lab, "open the workbook in JupyterLab", "dxdy lab --no-browser")
    lab.add_argument("--no-browser", action="store_true", help="only print the address")
    lab.add_argument("--port", type=_port, default=8888, help="the first port to try (default %(default)s)")
    lab.allow_abbrev = False  # or --o would be so many words
    lab.add_argument("--ip", default="127.0.0.1", help="where to listen (default: on this machine only)")
    lab.add_argument("--host", action="append", default=[], help="a name to answer to, beside localhost; repeatable")
    lab.add_argument(
        "--open-to-the-network-without-a-password",
        dest="unlocked",
        action="store_true",
        help="with --ip: the token alone keeps others out",
    )

    run = _command(
        commands,
        "run",
        _run,
        "run a lesson with parameters, or all lessons",
        "dxdy run 03_baseline_run -p lr=0.1 -p seed=1",
    )
    run.add_argument("lesson", nargs="?", help="a lesson's name or number")
    run.add_argument("-p", "--parameter", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    run.add_argument("--all", action="store_true", help="every lesson, one after another")
    run.add_argument("--out", type=_path, help="the run's folder (default runs/<id>/ under the current directory)")
    run.add_argument("--json", action="store_true", help="print the results as JSON")

    watch = _command(
        commands,
        "watch",
        _watch,
        "run a training script unchanged, record it, and tell what was seen; options after the script are its own",
        "dxdy watch --steps 100 train.py --lr 0.1",
    )
    watch.add_argument("--steps", type=_count, metavar="N", help="end it after N optimizer steps")
    watch.add_argument("--out", type=_path, metavar="DIR", help="the run's folder (default runs/<id>/)")
    watch.add_argument("--json", type=_path, metavar="FILE", help="write the summary as JSON, too")
    watch.add_argument(
        "--nproc-per-node", type=_count, default=1, metavar="N", help="on N ranks of this machine, and compare them"
    )
    rest = argparse.REMAINDER
    watch.add_argument("-m", dest="module", nargs=rest, metavar="MODULE", help="a module instead of a script")
    watch.add_argument("script", nargs=rest, metavar="SCRIPT ...", help="the script and its arguments")

    check = _command(
        commands,
        "check",
        _check,
        "diagnose what a function of yours returns: a dictionary of dx.diagnose's keywords",
        "dxdy check package.module:make",
    )
    check.add_argument("target", metavar="MODULE:FUNCTION", help="looked for in the current directory first")
    check.add_argument("--json", action="store_true", help="print the report as JSON")

    preflight = _command(
        commands,
        "preflight",
        _preflight,
        "the six points before a long run, on what a function of yours returns, as one page",
        "dxdy preflight package.module:make --out preflight.html",
    )
    preflight.add_argument("target", metavar="MODULE:FUNCTION", help="looked for in the current directory first")
    preflight.add_argument("--world-size", type=_count, default=2, metavar="N", help="ranks of point 5 (default 2)")
    preflight.add_argument("--memory", action="store_true", help="try what saves memory, too")
    preflight.add_argument("--json", action="store_true", help="print the page as JSON")
    preflight.add_argument("--out", type=_path, metavar="FILE.html", help="write the page here, too")

    _add_sweep(commands)

    replay = _command(
        commands,
        "replay",
        _replay,
        "run the recorded steps that went wrong again, bit for bit",
        "dxdy replay runs/20261130-120000-train-1f2e",
    )
    replay.add_argument("run", type=_path, metavar="RUN", help="the run's folder")

    inspect = _command(
        commands,
        "inspect",
        _inspect,
        "say what a checkpoint, or a table (CSV) of a loss, still tells when the run is over",
        "dxdy inspect last.pt, dxdy inspect epoch1.pt epoch2.pt, dxdy inspect loss.csv",
    )
    inspect.add_argument("file", type=_path, metavar="FILE", help="a checkpoint, or a table with a loss")
    inspect.add_argument("later", type=_path, nargs="?", metavar="LATER", help="a later checkpoint: what did not move?")
    inspect.add_argument("--json", action="store_true", help="print the report as JSON")
    _add_runs(commands)

    env = _command(
        commands,
        "env",
        _env,
        "say whether this environment is fit for training: a line a check, with what to do next; changes nothing",
        "dxdy env, dxdy env --json > env.json",
    )
    env.add_argument("--json", action="store_true", help="print the lines, and the facts behind them, as JSON")
    return parser


class _Version(argparse.Action):
    """Tells the versions when it is asked, without waiting for torch."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("dxdy_nb", "torch")))
        parser.exit()


def _add_sweep(commands: Any) -> None:
    sweep = _command(
        commands,
        "sweep",
        _sweep,
        "run a lesson or a configuration with all combinations of some values; failures are kept, and what is done "
        "already in the folder is not run again",
        "dxdy sweep 03_baseline_run -g lr=1e-3,1e-2 -g seed=0,1,2 --out runs/rates",
    )
    sweep.add_argument("target", help="a lesson's name or number, or a configuration (.yaml)")
    repeated: dict[str, Any] = {"action": "append", "default": []}
    sweep.add_argument("-g", "--grid", metavar="NAME=VALUE,VALUE", help="what varies; may be repeated", **repeated)
    sweep.add_argument("-p", "--parameter", metavar="NAME=VALUE", help="what all have; may be repeated", **repeated)
    sweep.add_argument("--jobs", type=_count, default=1, metavar="N", help="runs at once (default %(default)s)")
    sweep.add_argument("--time-limit", type=float, metavar="SECONDS", help="of each run, from its start")
    sweep.add_argument("--memory-limit", type=float, metavar="MB", help="of each run's processes together")
    sweep.add_argument("--out", type=_path, metavar="DIR", help="the folder of the runs (default runs/<id>/)")
    sweep.add_argument("--json", action="store_true", help="print the results as JSON")


def _add_runs(commands: Any) -> None:
    runs = _command(
        commands,
        "runs",
        _runs,
        "list the recorded runs, failed ones too; show one; compare two; part of an ID that only one run has is enough",
        "dxdy runs --status failed --status killed, dxdy runs --where optimizer=adam --sort=-test_accuracy, "
        "dxdy runs show 1f2e, dxdy runs compare 1f2e 77b0",
    )
    runs.add_argument("--in", dest="parent", type=_path, default=Path("runs"), metavar="DIR", help="default runs/")
    runs.add_argument("--json", action="store_true", help="print as JSON")
    runs.add_argument("--all", action="store_true", help="those too that were made inside a lesson's run")
    runs.add_argument("--status", action="append", metavar="STATUS", help="only runs that ended so; may be repeated")
    runs.add_argument("--where", action="append", default=[], metavar="NAME=VALUE", help="only runs with this value")
    runs.add_argument(
        "--sort", metavar="NAME", help="by a field, a result or a figure; --sort=-NAME: the largest first"
    )
    kinds = runs.add_subparsers(metavar="show | compare | export", title="about one run, or two")
    show = _command(kinds, "show", _runs_show, "all that a run's folder tells", "dxdy runs show 1f2e")
    compare = _command(kinds, "compare", _runs_compare, "what differs between two runs", "dxdy runs compare 1f2e 77b0")
    export = _command(kinds, "export", _runs_export, "for TensorBoard", "dxdy runs export 1f2e --tensorboard events")
    for parser, names in ((show, ["ID"]), (compare, ["A", "B"]), (export, ["ID"])):
        for name in names:
            parser.add_argument(name.lower(), metavar=name, help="a run's ID, part of it, or its folder")
        default = argparse.SUPPRESS  # what stands before the word holds where nothing stands after it
        parser.add_argument("--in", dest="parent", type=_path, default=default, metavar="DIR", help="default runs/")
        parser.add_argument("--json", action="store_true", default=default, help="print as JSON")
    export.add_argument("--tensorboard", type=_path, required=True, metavar="DIR", help="where the events go")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def _path(text: str) -> Path:
    if not text:  # a shell's variable that is not set: it would be the current folder
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 65535, got {text!r}")
    return int(text)


def _command(commands: Any, name: str, function: Any, help_text: str, example: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help_text, description=help_text, epilog=f"example: {example}")
    parser.set_defaults(command=function)
    return parser


def _lab(options: argparse.Namespace) -> NoReturn:
    """Start JupyterLab on the first lesson."""
    from dxdy_nb.runs import lab

    command = lab.command(
        port=options.port,
        browser=not options.no_browser,
        ip=options.ip,
        hosts=options.host,
        unlocked=options.unlocked,
    )
    os.execve(sys.executable, command, lab.environment())  # this process becomes Jupyter: signals and exit code too


def _run(options: argparse.Namespace) -> int:
    from dxdy_nb.runs import lessons  # torch comes with it, for seconds: Ctrl-C should find `main` already waiting

    if options.all == bool(options.lesson):
        raise DxdyError("run: name one lesson, or --all. Lessons: " + ", ".join(lessons.names()))
    if options.all and (options.parameter or options.out):
        raise DxdyError("run --all: takes no -p and no --out, since lessons have different parameters.")
    given = parse_assignments(options.parameter)
    done, refused = [], False
    for lesson in lessons.names() if options.all else [options.lesson]:
        try:
            done.append(lessons.run(lesson, given, options.out))
        except DxdyError as error:
            if not options.all:
                raise
            print(f"dxdy: {error}", file=sys.stderr)  # the other lessons may be all right
            refused = True
            continue
        if done[-1].failure:  # at once: nobody should wait for the other lessons to learn of it
            print(f"{done[-1].lesson}: {done[-1].failure}\n", file=sys.stderr)
    if options.json:
        print(json.dumps([{**asdict(one), "notebook": str(one.notebook)} for one in done], indent=1))
    else:
        print(_table(done))
    if refused or any(one.bad_input for one in done):
        return BAD_INPUT
    return FINE if all(one.status == "completed" for one in done) else PROBLEM


def _sweep(options: argparse.Namespace) -> int:
    from dxdy_nb.runs.folder import new_folder
    from dxdy_nb.training import sweep

    limits = sweep.Limits(options.time_limit, options.memory_limit)
    planned = sweep.plan(options.target, sweep.parse_grid(options.grid), parse_assignments(options.parameter))
    out = new_folder(f"{Path(options.target).stem}-sweep", options.out)
    print(
        f"dxdy sweep: {counted(len(planned), 'run')} in {out}; "
        f"the same command with --out {shlex.quote(str(out))} goes on",
        file=sys.stderr,
    )
    done = sweep.run_all(planned, out, jobs=options.jobs, limits=limits, log=sys.stderr)
    lost = [one for one in done if one.result["status"] != "completed"]
    if options.json:
        told = [{"folder": str(one.folder), "changed": dict(one.planned.changed), **one.result} for one in done]
        print(json.dumps(told, indent=1))
    else:
        print(sweep.table(done).to_string(na_rep="", line_width=shutil.get_terminal_size((200, 24)).columns))
        for one in lost:
            print(f"\n{one.folder}: {one.result['status']}: {one.result['reason']}", file=sys.stderr)
        print(f"\n{len(done) - len(lost)} of {len(done)} completed")
    return PROBLEM if lost else FINE


def _watch(options: argparse.Namespace) -> int:
    from dxdy_nb.observe.script import Script
    from dxdy_nb.runs import script

    given = options.script[1:] if options.script[:1] == ["--"] else options.script
    name, *arguments = options.module or given or [""]
    if not name:
        raise DxdyError("watch: name a script, like train.py, or a module after -m.")
    if options.nproc_per_node > 1:
        return _watch_ranks(options, name, arguments)
    return script.watch(
        Script(name, tuple(arguments), is_module=options.module is not None),
        out=options.out,
        steps=options.steps,
        json_file=options.json,
    )


def _watch_ranks(options: argparse.Namespace, name: str, arguments: Sequence[str]) -> int:
    from dxdy_nb.diagnosis.ranks import diagnose_script
    from dxdy_nb.runs.script import writable

    if options.out or options.steps:
        raise DxdyError("watch --nproc-per-node: takes no --out and no --steps: it compares ranks, and keeps no run.")
    if options.module is None and not Path(name).is_file():
        raise DxdyError(f"watch: {name}: no such script.")
    to = writable(options.json) if options.json else None
    report, code = diagnose_script(name, arguments, options.nproc_per_node, module=options.module is not None)
    print(report, file=sys.stderr)
    if to:
        to.write_text(report.to_json() + "\n")
    return code or (FINE if report.healthy else PROBLEM)


def _check(options: argparse.Namespace) -> int:
    with contextlib.redirect_stdout(sys.stderr):  # what the module prints is not the report
        make = _function(options.target, "check")
        from dxdy_nb.diagnosis.diagnose import diagnose
        from dxdy_nb.diagnosis.subject import made

        report = diagnose(**made(make))
    print(report.to_json() if options.json else report)
    return FINE if report.healthy else PROBLEM


def _preflight(options: argparse.Namespace) -> int:
    if options.out and (options.out.suffix not in (".html", ".htm") or not options.out.parent.is_dir()):
        raise DxdyError(f"preflight: {options.out}: expected a page's name in a folder that is there, like page.html.")
    with contextlib.redirect_stdout(sys.stderr):  # what the module prints is not the page
        make = _function(options.target, "preflight")
        from dxdy_nb.diagnosis.preflight import preflight

        page = replace(preflight(make, options.world_size, memory=options.memory), target=options.target)
    print(page.to_json() if options.json else page)
    if options.out:
        page.save(options.out)
    print(f"page: {options.out or page.folder / 'preflight.html'}; kept in {page.folder}", file=sys.stderr)
    return FINE if page.ok else PROBLEM


def _inspect(options: argparse.Namespace) -> int:
    from dxdy_nb.diagnosis.inspect import inspect

    report = inspect(options.file, options.later)
    print(report.to_json() if options.json else report)
    return FINE if report.healthy else PROBLEM


def _env(options: argparse.Namespace) -> int:
    from dxdy_nb.runs import doctor

    facts, lines = doctor.examine()
    print(json.dumps(doctor.as_json(facts, lines), indent=1) if options.json else doctor.text(lines))
    return FINE if doctor.fit(lines) else PROBLEM


def _function(target: str, command: str) -> Callable[[], Any]:
    """Return the function that a target like ``package.module:make`` names."""
    module, _, name = target.partition(":")
    if not name or module.endswith(".py") or not all(part.isidentifier() for part in module.split(".")):
        raise DxdyError(f"{command}: expected a module and a function of it, like package.module:make; got {target!r}.")
    sys.path.insert(0, os.getcwd())
    try:
        found = vars(importlib.import_module(module))
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            raise DxdyError(
                f"{command}: no module {missing!r} here. Start it where Python can import {module}."
            ) from None
        raise DxdyError(f"{command}: importing {module} raised {in_a_line(error)}") from None
    if not callable(make := found.get(name)):
        names = [n for n, thing in found.items() if callable(thing) and not n.startswith("_")]
        raise DxdyError(f"{command}: {module} has no function {name!r}.{suggestion(name, names) if names else ''}")
    return make


def _replay(options: argparse.Namespace) -> int:
    from dxdy_nb.runs import script

    return script.replay(options.run)


def _runs(options: argparse.Namespace) -> int:
    from dxdy_nb.runs import compare, entries, listing, record

    wanted = parse_assignments(options.where)
    for status in options.status or ():
        if status not in record.STATUSES:
            raise DxdyError(f"runs --status: no status is called {status!r}.{suggestion(status, record.STATUSES)}")
    if options.status:
        wanted["status"] = options.status
    found = entries.entries(options.parent)
    shown = found if options.all else entries.outermost(found)
    table = compare.table(shown, wanted, options.sort)
    if len(shown) < len(found):
        told = f"{counted(len(found) - len(shown), 'run')} made inside a lesson's run: not listed without --all"
        print(f"dxdy runs: {told}", file=sys.stderr)
    _tell(
        table.reset_index().to_json(orient="records", indent=1, double_precision=15)
        if options.json
        else listing.listing(table)
    )
    return FINE


def _runs_show(options: argparse.Namespace) -> int:
    from dxdy_nb.runs import entries, listing

    found = entries.find(options.parent, options.id)
    told = {"id": found.id, **vars(found), "folder": str(found.folder)}
    _tell(json.dumps(told, indent=1, default=str) if options.json else listing.story(found))
    return FINE


def _runs_compare(options: argparse.Namespace) -> int:
    from dxdy_nb.runs import compare, entries

    found = compare.compare(*(entries.find(options.parent, name).folder for name in (options.a, options.b)))
    _tell(found.to_json() if options.json else found)
    return FINE


def _tell(text: Any) -> None:
    """Print what may be longer than its reader wants to see: ``dxdy runs | head``."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _runs_export(options: argparse.Namespace) -> int:
    from dxdy_nb.observe import trace
    from dxdy_nb.runs import entries

    trace.read(entries.find(options.parent, options.id).folder).to_tensorboard(options.tensorboard)
    print(f"{options.tensorboard}: written. Look at it: tensorboard --logdir {options.tensorboard}")
    return FINE


def _table(done: "Sequence[lessons.LessonRun]") -> str:
    from dxdy_nb.runs.listing import columns

    rows = [("lesson", "status", "seconds", "executed copy")]
    rows += [(one.lesson, one.status, f"{one.seconds:.1f}", str(one.notebook)) for one in done]
    lines = columns(rows)
    if len(done) == 1 and done[0].metrics:
        lines += ["", *(f"{name} = {value}" for name, value in done[0].metrics.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
