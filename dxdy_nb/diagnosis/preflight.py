"""``preflight``: six points on the reader's own model before a long run, each a gate for the next."""

import itertools
import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm.auto import tqdm

from dxdy_nb.autograd.copies import random_states
from dxdy_nb.diagnosis import curve, rebuilt
from dxdy_nb.diagnosis.diagnose import TIME as WATCHED
from dxdy_nb.diagnosis.diagnose import experiment_on, report_on
from dxdy_nb.diagnosis.page import Point, Preflight, State, nameless
from dxdy_nb.diagnosis.probes import Experiment, finite, set_lr, usual_loss
from dxdy_nb.diagnosis.ranks import logs_of, report_of
from dxdy_nb.diagnosis.report import Finding, Report, listed
from dxdy_nb.diagnosis.slope import hand_case, screen
from dxdy_nb.diagnosis.subject import made, preserved
from dxdy_nb.errors import DxdyError, in_a_line
from dxdy_nb.nested import tensors_in
from dxdy_nb.observe.observer import watch
from dxdy_nb.ranks.failure import RankError
from dxdy_nb.ranks.pool import cores_for, launch
from dxdy_nb.ranks.session import leave
from dxdy_nb.ranks.shipping import packed
from dxdy_nb.ranks.verify import verify_ranks
from dxdy_nb.runs.environment import attended
from dxdy_nb.runs.folder import RANKS, new_folder
from dxdy_nb.runs.record import Recorder, write_environment, write_text
from dxdy_nb.training.memory import Memory, Saving, measure, savings

TIME = 120.0  # seconds
STALL = 20.0  # seconds that ranks may wait for each other
BASELINE = 120  # steps at most
LOGGED = ("loss", "grad_norm", "lr")
# The findings of which stages belong to a point.
STAGES = {1: ("data", "forward"), 2: ("loss", "backward"), 3: ("update",), 5: ("comm",), 6: ("reproduce",)}
ALIKE = {"samples": "apart", "updates": "equal", "gradients": "equal", "parameters": "equal"}  # as ranks should be
STILL = 8  # batches whose losses say what no training would give
WORSE = 1.2  # times the largest of these
SMALL = 1e-6  # relative: two evaluations that differ by rounding

Make = Callable[[], Mapping[str, Any]]


def preflight(
    make: Make | Mapping[str, Any],
    world_size: int = 2,
    *,
    out: str | Path | None = None,
    time_limit: float = TIME,
    memory: bool = False,
) -> Preflight:
    """Return whether a training set-up is ready for a long run: six points in their order, each a gate for the next.

    1 inputs, outputs, device and types; 2 one gradient by hand, and all of them by finite differences; 3 training on
    one device is stable, and a baseline kept; 4 rate, effective batch and gradient norm are logged; 5 on several ranks
    no sample is read twice, and all make the same updates; 6 a checkpoint resumes bit for bit in another process, and
    validation is repeatable. Where one fails, those behind it are not reached. What was given is left as it was.

    Parameters
    ----------
    make : returns the keywords of ``dx.diagnose``; called here, and anew in other processes for points 5 and 6. Given
        the keywords themselves, as a dictionary, these two are not checked
    world_size : the number of ranks of point 5; 1: that point is not checked
    out : the run's folder, which keeps baseline and page; without it ``runs/<id>/`` under the current directory
    time_limit : seconds for the parts that take longer with a larger model; what they do not allow is said
    memory : whether what saves memory is tried, too

    Raises
    ------
    DxdyError
        ``make`` raises, returns something else, cannot be sent to another process, or gives no loader or a used-up one;
        more ranks than this machine can carry; the folder cannot be written or holds a run.

    Examples
    --------
    >>> model, loss_fn = torch.nn.Linear(2, 1), torch.nn.MSELoss()
    >>> batch = torch.ones(8, 2), torch.ones(8)  # the target lacks a dimension
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> given = dict(model=model, loss_fn=loss_fn, loader=[batch] * 4, optimizer=optimizer)
    >>> page = preflight(given, out=tmp_path / "preflight")
    >>> page.ok, page.failed.number
    (False, 1)
    """
    bare = isinstance(make, Mapping)
    if not bare and not callable(make):
        raise DxdyError(f"preflight: make is a function or a dictionary of keywords, got {type(make).__name__}.")
    cores_for(world_size)
    if isinstance(time_limit, bool) or not isinstance(time_limit, (int, float)) or not time_limit > 0:
        raise DxdyError(f"preflight: time_limit is a number of seconds above 0, got {time_limit!r}.")
    began = time.monotonic()
    name = "the given objects" if bare else f"{getattr(make, '__module__', '')}:{getattr(make, '__name__', 'make')}"
    with random_states():
        if not bare:
            packed({"make": make})  # before anything takes time
        given = dict(make) if isinstance(make, Mapping) else made(make)
        experiment = experiment_on(given, time_limit=min(WATCHED, time_limit / 3))
        if experiment.subject.loader is None:
            raise DxdyError("preflight: without a loader nothing can be trained. Give loader=, which a for loop reads.")
        folder = new_folder("preflight", out)
        flight = Flight(experiment, None if isinstance(make, Mapping) else make, world_size, folder, began + time_limit)
        with Recorder(folder, kind="preflight", target=name, metrics={}) as recorder:
            write_environment(folder, experiment.subject.model)
            points = tuple(flight.points())
            when, versions = time.strftime("%Y-%m-%d %H:%M"), f"torch {torch.__version__}"
            seen = flight.seen_memory(tried=memory) if not any(p.state == "failed" for p in points[:3]) else (None, ())
            page = Preflight(
                name, points, folder, when, versions, flight.curves, *seen, seconds=time.monotonic() - began
            )
            recorder.write(metrics={"ok": page.ok, **flight.metrics, "verdict": page.verdict})
            write_text(folder / "preflight.json", page.to_json() + "\n")
            page.save(folder / "preflight.html")
    return page


@dataclass
class Flight:
    """A set-up on its way through the points."""

    experiment: Experiment
    make: Make | None  # None: bare objects were given
    world_size: int
    folder: Path
    deadline: float  # of time.monotonic()
    report: Report = field(default_factory=lambda: Report(()))
    curves: dict[str, list[float]] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    batches: list[float] = field(default_factory=list)  # effective batch of each step

    def points(self) -> Iterator[Point]:
        """Yield the six points."""
        stopped = False
        bar = tqdm(POINTS.items(), desc="preflight", unit="point", disable=not attended(), leave=False)
        for number, (name, point) in enumerate(bar, start=1):
            if stopped:
                yield Point(number, name, "not reached", "")
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = point(self, number, name)
            except DxdyError as error:
                found = Point(number, name, "not checked", str(error))
            stopped = found.state == "failed"
            yield replace(found, evidence=nameless(found.evidence))

    def judged(self, number: int, name: str, evidence: str) -> Point:
        """Return a point by what diagnose has found in its stages."""
        mine = tuple(f for f in self.report.findings if f.stage in STAGES[number])
        return by_findings(number, name, evidence, mine)

    # ---- the points ----

    def inputs(self, number: int, name: str) -> Point:
        """Inputs, outputs, device and types."""
        with torch.inference_mode(False), torch.enable_grad():
            self.experiment.observe()
            with preserved(self.experiment.subject):
                self.report = report_on(self.experiment)
        parameters = self.experiment.subject.parameters.values()
        kinds = {f"{str(p.dtype).removeprefix('torch.')} on {p.device}" for p in parameters}
        saw = self.report.saw
        told = [f"{part} {saw[part]}" for part in ("input", "output", "target") if part in saw]
        told.append(f"parameters {listed(sorted(kinds))}")
        if self.report.unchecked:
            told.append(f"not judged: {listed(self.report.unchecked)}")
        evidence = "; ".join(told)
        point = self.judged(number, name, evidence)
        if point.state == "passed" and not self.experiment.seen.steps:
            return replace(point, state="failed", evidence="no step could be run: the loader gave no batch")
        return point

    def gradients(self, number: int, name: str) -> Point:
        """One gradient by hand, and all by finite differences."""
        point = self.judged(number, name, "")
        if point.state == "failed":
            return point
        began, told = time.monotonic(), []
        with torch.inference_mode(False), torch.enable_grad():
            try:
                case = hand_case(self.experiment)
            except Exception as error:
                case = None
                told.append(f"no case by hand: it raised {in_a_line(error)}")
            taken = time.monotonic() - began
            if case is not None:
                told.append(str(case))
            if case is not None and not case.passed:
                fix = "something between the loss and this weight changes the gradient: a hook, an autograd.Function"
                return replace(point, state="failed", evidence=told[0], fix=fix)
            self.experiment.deadline = self.deadline
            try:
                check = screen(self.experiment, taken)
            except Exception as error:
                why = str(error) if isinstance(error, DxdyError) else in_a_line(error)
                told.append(f"all gradients by finite differences: not checked ({why})")
                return replace(point, state="not checked", evidence="; ".join(told))
        told.append(f"all gradients by finite differences: {check}")
        worst = next(row for row in check.rows if row.name == check.worst)
        if check.verdict == "wrong" and math.isfinite(worst.numeric):
            fix = f"check the backward of what stands at {check.worst}: dx.check_gradients, lesson 02"
            return replace(point, state="failed", evidence="; ".join(told), fix=fix)
        if case is None:
            row = next((r for r in check.rows if math.isfinite(r.numeric)), None)
            if row is not None:
                told.insert(0, f"{row.name}: finite difference {row.numeric:.6g}, autograd {row.analytic:.6g}")
            seen = check.verdict not in ("wrong", "nondeterministic")
            return replace(point, state="passed" if seen else "not checked", evidence="; ".join(told))
        return replace(point, evidence="; ".join(told))

    def training(self, number: int, name: str) -> Point:
        """A short training on one device, recorded."""
        point = self.judged(number, name, "")
        if point.state == "failed":
            return point
        subject, until = self.experiment.subject, time.monotonic() + max(5.0, (self.deadline - time.monotonic()) / 6)
        raised = None
        with preserved(subject), watch(out=self.folder, budget=None) as w, torch.enable_grad():
            steps = rebuilt.Steps(self.experiment)
            try:
                while steps.index < BASELINE and (steps.index < 8 or time.monotonic() < until):
                    steps.take(1)
            except Exception as error:
                raised = error
        table = w.steps
        table[[*LOGGED, "effective_batch"]].to_csv(self.folder / "baseline.csv")
        self.curves = {name: table[name].astype(float).tolist() for name in LOGGED}
        self.batches = table["effective_batch"].astype(float).tolist()
        losses = np.array(self.curves["loss"])
        if raised is not None:
            return replace(point, state="failed", evidence=f"step {steps.index} raised {in_a_line(raised)}")
        if len(losses) < 2:
            return replace(point, state="not checked", evidence="no step was recorded: no model and no backward seen")
        third = max(1, len(losses) // 3)
        first, last = (float(np.median(part)) for part in (losses[:third], losses[-third:]))
        self.metrics = {"baseline_steps": len(losses), "baseline_first_loss": first, "baseline_last_loss": last}
        evidence = f"{len(losses)} steps, loss {first:.4g} → {last:.4g} (medians of the first and the last third)"
        bad = np.flatnonzero(~np.isfinite(losses))
        told = curve.report(self.folder / "baseline.csv") if np.isfinite(losses).sum() > 1 else Report(())
        findings = (*point.findings, *told.findings)
        if len(bad):
            evidence += f"; {losses[bad[0]]} at step {bad[0]}"
            fix = (
                "find the first value that is not finite in the steps before (lesson 07), or lower the rate (lesson 05)"
            )
            return replace(point, state="failed", evidence=evidence, fix=fix, findings=findings)
        still = self.untrained() if last > losses[0] else []
        if still and last > WORSE * max(still):
            hint = next((f for f in findings if f.stage == "update"), None)
            evidence += f"; without any training it is {min(still):.4g} to {max(still):.4g}: each step makes it worse"
            fix = hint.fix if hint is not None else "lower the rate, or warm it up (lesson 05)"
            return replace(point, state="failed", evidence=evidence, fix=fix, findings=findings)
        return replace(point, evidence=f"{evidence}; the record is the baseline", findings=findings)

    def untrained(self) -> list[float]:
        """Return the losses of some batches at a rate of 0; none where a loss need not fall: with an opponent."""
        subject = self.experiment.subject
        if len(subject.all_optimizers) != 1 or subject.loss_fn is None:
            return []
        try:
            return finite(self.experiment.again(STILL, prepare=set_lr(0.0)))
        except Exception:
            return []  # a step that cannot be run again: then nothing is claimed

    def logged(self, number: int, name: str) -> Point:
        """Rate, effective batch and gradient norm of every step."""
        lr, norms, sizes = self.curves["lr"], self.curves["grad_norm"], self.batches
        told = f"rate {_range(lr)}, effective batch {_range(sizes)}, gradient norm {_range(norms)} at {len(lr)} steps"
        subject = self.experiment.subject
        size, several = getattr(subject.loader, "batch_size", None), subject.accumulation_steps
        largest = max(filter(math.isfinite, sizes), default=math.nan)
        missing = {
            "rate": (lr, "let an optimizer of torch.optim make the step, whose param_groups hold the rate"),
            "effective batch": (sizes, "feed the batch through the model's own forward, samples along the first axis"),
            "gradient norm": (norms, "call loss.backward(), so that each parameter's .grad is there before the step"),
        }
        for what, (values, fix) in missing.items():
            if not all(math.isfinite(v) for v in values) or not any(values):
                seen = sum(math.isfinite(v) for v in values)
                why = "is 0 throughout" if seen == len(values) else f"is known at {seen} of {len(values)} steps"
                return Point(number, name, "failed", f"the {what} {why}: {told}", fix)
        if size and several > 1 and largest < size * several:
            evidence = (
                f"{largest:.0f} samples an update, where {size} × accumulation_steps {several} = {size * several}"
            )
            fix = "call optimizer.step() once in accumulation_steps batches, or correct what is declared (lesson 06)"
            return Point(number, name, "failed", f"{evidence}: {told}", fix)
        return Point(number, name, "passed", told)

    def ranks(self, number: int, name: str) -> Point:
        """The same on several ranks."""
        if self.make is None:
            return Point(number, name, "not checked", "objects were given", "give make, a function that builds them")
        if self.world_size < 2:
            return Point(number, name, "not checked", "world_size=1: one process", "world_size=2")
        why = rebuilt.cannot_be_shared(self.experiment.subject.loader)
        if why:
            return Point(number, name, "not checked", why)
        folder = self.folder.absolute() / RANKS  # ranks meet in a file, whose address has no relative form
        folder.mkdir()
        given = (self.make, str(folder))
        logs, _ = logs_of(rebuilt.train_on_a_rank, given, self.world_size, STALL, folder)
        (folder / "store").unlink(missing_ok=True)
        # The loss is read on each rank by the code here, not by the reader's.
        findings = tuple(f for f in report_of(logs).findings if f.cause != "local-loss-logged")
        point = by_findings(number, name, "", findings)
        if point.state == "failed" or logs.failures:
            return replace(point, state="failed", evidence=point.evidence or next(iter(logs.failures.values())))
        seen = verify_ranks(self.folder).to_dict("index")
        evidence = "; ".join(
            f"{check} {row['verdict']} ({row['seen']})" for check, row in seen.items() if check in ALIKE
        )
        odd = [check for check, wanted in ALIKE.items() if seen[check]["verdict"] != wanted]
        known = [json.loads((folder / f"samples{rank}.json").read_text()) for rank in range(self.world_size)]
        if any(one != known[0] for one in known):
            evidence = (
                f"make() built another data set on each rank (sizes {listed(size for size, _ in known)}): a sample of "
                "one rank's share is also in the other's"
            )
            fix = "split and shuffle with a seeded generator, or read the split from a file"
            return replace(point, state="failed", evidence=evidence, fix=fix)
        if odd:
            return replace(point, state="failed", evidence=evidence, fix=f"{listed(odd)}: lesson 08")
        return replace(point, evidence=evidence)

    def checkpoint(self, number: int, name: str) -> Point:
        """A checkpoint resumes in another process, and validation is repeatable."""
        point = self.judged(number, name, "")
        if point.state == "failed":
            return point
        if self.make is None:
            return Point(number, name, "not checked", "objects were given", "give make, a function that builds them")
        with tempfile.TemporaryDirectory(prefix="dxdy-preflight-") as folder:
            path = str(Path(folder) / "checkpoint.pt")
            ways: list[rebuilt.Way] = []
            for rank, way in enumerate((rebuilt.uninterrupted, rebuilt.resumed)):
                try:
                    ways.append(launch(_on, rank, way, self.make, path, world_size=2, stall=3 * STALL)[rank])
                except RankError as error:
                    words = nameless(" ".join(str(error).partition("\n")[0].removeprefix("launch: ").split()))
                    fix = (
                        "a checkpoint holds tensors, numbers, texts, lists and dictionaries only: state_dict() of each"
                    )
                    return replace(point, state="failed", evidence=words, fix=fix if way is rebuilt.resumed else "")
        whole, again = ways
        return compared(point, whole, again)

    # ---- memory ----

    def seen_memory(self, tried: bool) -> tuple[Memory | None, tuple[Saving, ...]]:
        """Return what held memory during one step, and what was tried to need less."""
        subject, batch = self.experiment.subject, self.experiment.batches[0]
        optimizers = subject.all_optimizers

        def step(part: Any, backward: bool = True) -> None:
            if backward:
                self.experiment.train(part, 0)
            elif subject.train_step is None:
                usual_loss(subject.model, subject.loss_fn, part)
            else:
                subject.model(*tensors_in(part)[:1])

        try:
            with preserved(subject), torch.enable_grad():
                self.experiment.train(batch, 0)
                memory = measure(lambda: step(batch), subject.model, optimizers, batch)
                return memory, tuple(savings(step, subject.model, optimizers, batch)) if tried else ()
        except Exception:
            return None, ()  # a picture is missing, and no point


def by_findings(number: int, name: str, evidence: str, findings: tuple[Finding, ...]) -> Point:
    """Return a point that failed where a finding is an error, and passed with the evidence else."""
    error = next((finding for finding in findings if finding.severity == "error"), None)
    if error is None:
        return Point(number, name, "passed", evidence, "", findings)
    seen = f"{error.cause}" + (f", {error.where}" if error.where else "") + f": {error.evidence}"
    return Point(number, name, "failed", seen, error.fix, findings)


def compared(point: Point, whole: rebuilt.Way, again: rebuilt.Way) -> Point:
    """Return point 6 by how a run went on, without a pause and from its checkpoint."""
    state: State = "failed"
    lost = [name for name in whole.at if again.at.get(name) != whole.at[name]]
    if lost:
        evidence = f"{len(lost)} of {len(whole.at)} tensors are others after loading: {listed(lost)}"
        return replace(point, state=state, evidence=evidence, fix="save and load the state_dict of the whole model")
    if whole.batch != again.batch:
        evidence = "the first batch after resuming is another than without a pause: the loader's order or its data"
        fix = "seed what make() shuffles, splits or draws: torch.Generator().manual_seed(...), or keep it in a file"
        return replace(point, state=state, evidence=evidence, fix=fix)
    other = [name for name in whole.after if again.after.get(name) != whole.after[name]]
    if other:
        evidence = (
            f"loaded as saved, yet {rebuilt.AFTER} steps later {len(other)} of {len(whole.after)} tensors differ from "
            f"the run without a pause: {listed(other)}"
        )
        fix = "something that the step uses is in no state_dict: a counter, an average, a generator, a plain attribute"
        return replace(point, state=state, evidence=evidence, fix=fix)
    told = (
        f"{len(whole.after)} tensors are bit-identical {rebuilt.AFTER} steps after the checkpoint, in another process"
    )
    if whole.evaluations is None:
        return replace(point, state="not checked", evidence=f"{told}; {whole.evaluated}", fix="give val_loader=")
    first, second = whole.evaluations
    apart = [
        (a, b) for a, b in itertools.zip_longest(first, second, fillvalue=math.nan)
        if not (a == b or abs(a - b) <= SMALL * max(abs(a), abs(b)) or (a != a and b != b))
    ]  # fmt: skip
    if apart:
        a, b = apart[0]
        evidence = f"{told}; but {whole.evaluated}: {a:.6g} the first time, {b:.6g} the second"
        fix = "model.eval() and torch.no_grad() around it, no augmentation, a fixed order, and no random numbers"
        return replace(point, state=state, evidence=evidence, fix=fix)
    return replace(point, evidence=f"{told}; {whole.evaluated}: equal at the second time")


def _on(wanted: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on one of the processes only, which then stands alone."""
    rank = dist.get_rank()
    dist.barrier()
    leave()
    return function(*args) if rank == wanted else None


def _range(values: list[float]) -> str:
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return "unknown"
    low, high = min(known), max(known)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


POINTS: dict[str, Callable[[Flight, int, str], Point]] = {
    "inputs, outputs, device, types": Flight.inputs,
    "gradients": Flight.gradients,
    "training on one device": Flight.training,
    "rate, batch, gradient norm logged": Flight.logged,
    "several ranks": Flight.ranks,
    "checkpoint and validation": Flight.checkpoint,
}
