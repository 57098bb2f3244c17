"""How many faults are told by `dx.diagnose`, by torch's own aids, and by torchtest, torchtest2 and torch-audit.

    python benchmarks/diagnosis.py [--every 1] [--no-ranks]

Every tool gets each set-up anew, as its author built it, and by its own defaults. A fault counts as told apart where a
tool says something of it that it does not say of the right twin: what it says need not be the cause. A tool may say it
as an error or as a remark (a warning, a hint), and both are counted; on a right set-up whatever it says is false.

- `torch`: 24 steps of the set-up's own loop under `detect_anomaly`, then its validation and its resume, if it has them;
  what is raised is an error, a warning a remark. A loss of NaN says nothing by itself.
- `torchtest`: variables change, no NaN, no infinity, on one batch. `torchtest2`: `check_model` on one batch, without
  its `gradcheck`. Both write their own training step, so they can not see the set-up's.
- `torch-audit`: `autopatch` at every step of the same loop, with its checks of model and data before.

Three groups of faults: `public` are those of `tests/cases`, which dxdy's rules were written with; `unseen` were written
without sight of the rules, which have since been widened with them: neither is a fair exam for dxdy, the README has the
figures at first sight. Between two ranks `torch` is TORCH_DISTRIBUTED_DEBUG, at DETAIL where right ranks survive it and
else at INFO, with a limit of 60 s; told is an error there, and for dxdy the right cause.
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import itertools
import math
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import dxdy_nb as dx
from dxdy_nb.diagnosis.probes import Experiment
from dxdy_nb.diagnosis.subject import subject_of
from dxdy_nb.ranks.session import LOOPBACK

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import cases
import rank_workers
from cases import healthy
from report import summary

TESTS = Path(__file__).parents[1] / "tests"
STEPS, LIMIT = 24, 60.0  # seconds: a busy machine needs 20 for the imports of two ranks
Setup = dict[str, Any]
Said = tuple[set[str], set[str]]  # errors, remarks
Make = Callable[[], Setup]


def short(error: object) -> str:
    """Return a message without what differs from run to run."""
    return re.sub(r"[\d.]+|0x\w+", "#", f"{type(error).__name__}: {error}")[:100]


def steps(setup: Setup) -> Iterator[None]:
    """Train by the set-up's own loop."""
    experiment = Experiment(subject_of(setup), math.inf)
    step = 0
    while step < STEPS:
        before = step
        for batch in itertools.islice(setup["loader"], STEPS - step):
            experiment.train(batch, step)
            step += 1
            yield
        if step == before:  # nothing more comes
            break
        if step < STEPS and "on_epoch_end" in setup:
            setup["on_epoch_end"]()


def dxdy(setup: Setup) -> Said:
    """Return what our diagnosis says, each as stage/cause."""
    report = dx.diagnose(**setup)
    errors = {f"{f.stage}/{f.cause}" for f in report.errors}
    return errors, {f"{f.stage}/{f.cause}" for f in report.findings} - errors


def torchs(setup: Setup) -> Said:
    """Return what torch says by itself."""
    errors = set()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with torch.autograd.set_detect_anomaly(True):
                for _ in steps(setup):
                    pass
            if "validate" in setup:
                setup["validate"]()
            if "resume" in setup:
                setup["resume"](setup["save"]())
        except RuntimeError as error:
            if "returned nan values" not in str(error):  # detect_anomaly's own
                raise
            errors.add(short(error))
    remarks = {short(warning.message) for warning in told}
    return errors, {text for text in remarks if "Anomaly Detection has been enabled" not in text}


def first(setup: Setup) -> tuple[Any, Any]:
    """Return the first batch, as a pair."""
    x, y, *_ = next(iter(setup["loader"]))
    return x, y


def torchtest(setup: Setup) -> Said:
    """Return what torchtest says."""
    from torchtest import torchtest as peer

    try:
        peer.test_suite(
            setup["model"], setup["loss_fn"], setup["optimizer"], list(first(setup)),
            test_vars_change=True, test_nan_vals=True, test_inf_vals=True,
        )  # fmt: skip
    except Exception as error:
        if not type(error).__module__.startswith("torchtest"):
            raise
        return {short(error)}, set()
    return set(), set()


def torchtest2(setup: Setup) -> Said:
    """Return what torchtest2 says: the names of the checks that fail, and of those that warn."""
    import torchtest2 as peer

    report = peer.check_model(setup["model"], *first(setup), loss_fn=setup["loss_fn"], optimizer=setup["optimizer"])
    return {result.name for result in report.failures}, {result.name for result in report.warnings}


def torch_audit(setup: Setup) -> Said:
    """Return what torch-audit says: its rules, each with the place it names."""
    from torch_audit import autopatch
    from torch_audit.core import Severity

    auditor = autopatch(
        setup["model"], optimizer=setup.get("optimizer"), every_n_steps=1, run_static=True, run_init=True
    )
    for _ in steps(setup):
        pass
    auditor.unpatch()
    found: dict[Severity, set[str]] = {level: set() for level in Severity}
    for finding in auditor.finish().findings:
        found[finding.severity].add(f"{finding.rule_id} {finding.module_path or ''}")
    return found[Severity.ERROR] | found[Severity.FATAL], found[Severity.WARN]


TOOLS: dict[str, tuple[Callable[[Setup], Said], str]] = {  # and the package that it needs
    "dxdy": (dxdy, "dxdy_nb"),
    "torch": (torchs, "torch"),
    "torchtest": (torchtest, "torchtest"),
    "torchtest2": (torchtest2, "torchtest2"),
    "torch-audit": (torch_audit, "torch_audit"),
}


def told(tool: Callable[[Setup], Said], make: Make) -> Said | None:
    """Return what a tool says of a set-up, and None where something is raised, by the tool or by the set-up."""
    hidden = io.StringIO()
    with contextlib.redirect_stdout(hidden), contextlib.redirect_stderr(hidden), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        setup = make()
        try:
            return tool(setup)
        except Exception:
            return None


def table(heads: Iterable[str], rows: dict[str, Iterable[int]]) -> None:
    """Print numbers in columns."""
    print(" " * 12 + "".join(f"{head:>14s}" for head in heads))
    for name, numbers in rows.items():
        print(f"{name:12s}" + "".join(f"{number:14d}" for number in numbers))


def count(said: list[Said | None], kind: int) -> int:
    """Return of how many set-ups something was said, as an error (0) or a remark (1)."""
    return sum(bool(one and one[kind]) for one in said)


def unseen(path: Path, name: str) -> Setup:
    """Return the set-up that a function of a file makes; the file is loaded anew."""
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)()


def pairs() -> dict[str, list[tuple[Make, Make, Iterable[str]]]]:
    """Return the faults of each group: how to make it, and its twin, and the stages that may be named."""
    public = [
        (functools.partial(case.build, True), functools.partial(case.build, False), case.stages)
        for case in cases.CASES.values()
    ]
    written = []
    for path in sorted(p for folder in ("unseen", "unseen_second") for p in (TESTS / "cases" / folder).glob("*.py")):
        stages = re.search(r"^stage: (.*)$", path.read_text(), re.MULTILINE)[1].split(", ")
        written.append((functools.partial(unseen, path, "make"), functools.partial(unseen, path, "make_fixed"), stages))
    return {"public": public, "unseen": written}


def rights() -> list[Make]:
    """Return the right set-ups that look odd."""
    return [case.build for case in cases.HEALTHY.values()] + [
        functools.partial(healthy.make, name) for name in healthy.CASES
    ]


def counted(tools: dict[str, Callable[[Setup], Said]], every: int) -> None:
    """Print how many faults each tool tells apart, and how many right set-ups it accuses."""
    alarms: dict[str, list[Said | None]] = {name: [] for name in tools}
    for group, faults in pairs().items():
        chosen = faults[::every]
        result = {name: [0, 0] for name in tools}
        own: dict[str, list[Said | None]] = {name: [] for name in tools}
        staged, absent = 0, dict.fromkeys(tools, 0)
        for bug, twin, stages in tqdm(chosen, desc=f"{group} faults", disable=None):
            for name, tool in tools.items():
                seen, right = told(tool, bug), told(tool, twin)
                own[name].append(right)
                if right is None:
                    absent[name] += 1
                    continue
                result[name][0] += seen is None or bool(seen[0] - right[0])
                result[name][1] += seen is None or bool((seen[0] | seen[1]) - (right[0] | right[1]))
                if name == "dxdy" and seen is not None:
                    staged += any(error.partition("/")[0] in stages for error in seen[0])
        print(f"\n{len(chosen)} of {len(faults)} {group} faults, each beside its right twin")
        table(
            ("by an error", "by anything", "false error", "false remark", "can not run"),
            {n: (*result[n], count(own[n], 0), count(own[n], 1), absent[n]) for n in tools},
        )
        print(f"dxdy names the right stage, by an error, in {staged}; no other tool names one")
        summary(
            f"{group} faults not told apart, of {len(chosen)}", "", {n: len(chosen) - r[1] for n, r in result.items()}
        )
    made = rights()
    for make in tqdm(made[::every], desc="right set-ups", disable=None):
        for name, tool in tools.items():
            alarms[name].append(told(tool, make))
    total = len(made[::every])
    print(f"\n{total} of {len(made)} right set-ups that look odd")
    table(
        ("false error", "false remark", "can not run"),
        {name: (count(said, 0), count(said, 1), said.count(None)) for name, said in alarms.items()},
    )
    summary(
        f"right set-ups with a false error, of {total}",
        "",
        {name: count(said, 0) for name, said in alarms.items()},
    )


def rank(index: int, folder: str, fault: str) -> None:
    """Train on one rank of two, and write down torch's warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            rank_workers.train(index, 2, f"file://{folder}/store", fault=fault)
        finally:
            Path(folder, f"{index}.txt").write_text("\n".join(short(w.message) for w in seen))


def debugged(fault: str, level: str) -> str:
    """Return what torch says of two ranks: an error, a warning, `hangs`, or nothing."""
    os.environ |= {"TORCH_DISTRIBUTED_DEBUG": level, "GLOO_SOCKET_IFNAME": LOOPBACK}
    with tempfile.TemporaryDirectory() as folder:
        ranks = torch.multiprocessing.start_processes(rank, (folder, fault), nprocs=2, join=False)
        end, text = time.monotonic() + LIMIT, ""
        try:
            while not ranks.join(1):
                if time.monotonic() > end:
                    text = "hangs"
                    break
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            text = f"error: {lines[-1][:80]}"
        for process in ranks.processes:
            process.kill()
            process.join()
        seen = {line for file in Path(folder).glob("*.txt") for line in file.read_text().splitlines()}
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG")
    return text or ("; ".join(sorted(seen))[:80] if seen else "-")


def between() -> None:
    """Print what is said of each fault between two ranks."""
    faults = ["", *rank_workers.FAULTS]
    rows, level, crashed = [], "DETAIL", debugged("", "DETAIL")
    if crashed.startswith("error"):
        level = "INFO"
    for fault in tqdm(faults, desc="faults between ranks", disable=None):
        torchs_words = debugged(fault, level)
        report = dx.diagnose_ranks(functools.partial(rank_workers.train, fault=fault), time_limit=LIMIT)
        ours = report.errors[0].cause if report.errors else "-"
        rows.append((fault, torchs_words, ours))
    print(f"\n{'between ranks':14s} {'dxdy':24s} torch, {level}")
    if level == "INFO":
        print(f"at DETAIL torch says of right ranks: {crashed}")
    for fault, theirs, ours in rows:
        print(f"{fault or '(right)':14s} {ours:24s} {theirs}")
    summary(
        f"faults between two ranks not told, of {len(faults) - 1}",
        "",
        {
            "dxdy": sum(ours != rank_workers.FAULTS[fault] for fault, _, ours in rows if fault),
            "torch": sum(not theirs.startswith("error") for fault, theirs, _ in rows if fault),
        },
    )


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="take every so manieth set-up of each group")
    parser.add_argument("--no-ranks", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    missing = [name for name, (_, package) in TOOLS.items() if importlib.util.find_spec(package) is None]
    print(f"not installed, left out: {', '.join(missing)}" if missing else "all peers are installed")
    counted({name: tool for name, (tool, _) in TOOLS.items() if name not in missing}, args.every)
    if not args.no_ranks:
        between()


if __name__ == "__main__":
    main()
