"""What a diagnosis says: findings in the order of the stages, and what was seen and not seen on the way."""

import functools
import html
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any, Literal

from dxdy_nb.errors import DxdyError, counted

Stage = Literal["data", "forward", "loss", "backward", "update", "comm", "reproduce"]
Severity = Literal["error", "hint"]
STAGES: tuple[Stage, ...] = ("data", "forward", "loss", "backward", "update", "comm", "reproduce")


@dataclass(frozen=True)
class Trial:
    """A fix that was tried on the spot: what was measured without it and with it, and whether that confirms it."""

    tried: str
    before: str
    after: str
    confirmed: bool

    def __repr__(self) -> str:
        return f"{self.tried}: {self.before} → {self.after} ({'confirmed' if self.confirmed else 'not confirmed'})"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong (an error: a rule or a counterfactual broke) or that deserves a look (a hint).

    ``where`` names a parameter, module, sample or source line; ``evidence`` holds the numbers; ``fix`` says in a line
    what to change; ``check`` is plain torch that shows the evidence without this package, given the names of
    ``diagnose``'s arguments, a ``batch`` (with its ``x`` and ``y``) and ``train_step``, the reader's own or the usual
    one; ``lesson`` is where it is explained.
    """

    stage: Stage
    cause: str
    severity: Severity
    where: str
    evidence: str
    fix: str
    check: str = ""
    lesson: str = ""
    trial: Callable[[], Trial] | None = field(default=None, repr=False, compare=False)

    def try_fix(self) -> Trial:
        """Try the fix for some steps, undo it bit by bit, and return the evidence without it and with it.

        Set-up and weights are those of the diagnosis, even where the reader's own have been trained on since. Confirmed
        means that the rule which found the cause finds it no more, and that the loss of one batch falls.

        Raises
        ------
        DxdyError
            The fix is the reader's decision, or in code that cannot be changed from here: there is nothing to try.
        """
        if self.trial is None:
            raise DxdyError(f"{self.cause}: this fix cannot be tried from here. Change it as it says: {self.fix}")
        return self.trial()

    def __str__(self) -> str:
        lines = [f"{self.severity} · {self.stage} · {self.cause}" + (f" · {self.where}" if self.where else "")]
        lines += [f"  seen   {self.evidence}", f"  fix    {self.fix}"]
        lines += [
            f"  {'check' if not place else '     '}  {line}" for place, line in enumerate(self.check.splitlines())
        ]
        return "\n".join(lines + ([f"  lesson {self.lesson}"] if self.lesson else []))


def listed(names: Iterable[object], most: int = 3) -> str:
    """Return names in a line, the first few of many.

    Examples
    --------
    >>> listed("abcde")
    'a, b, c and 2 more'
    """
    words = [str(name) for name in names]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


@functools.cache
def causes() -> dict[str, dict[str, str]]:
    """Return every cause that can be named, with its stage, lesson, fix and check."""
    return tomllib.loads(Path(__file__).with_name("causes.toml").read_text())


def found(
    cause: str,
    where: str,
    evidence: str,
    *,
    severity: Severity = "error",
    trial: Callable[[], Trial] | None = None,
    **values: object,
) -> Finding:
    """Return a finding of a known cause; ``values`` stand for the names in its fix and its check."""
    known = causes()[cause]
    fix, check = (Template(known[part]).substitute(values) for part in ("fix", "check"))
    stage: Stage = known["stage"]  # type: ignore[assignment]
    return Finding(stage, cause, severity, where, evidence, fix, check, known["lesson"], trial)


@dataclass(frozen=True)
class Report:
    """The findings of a diagnosis, errors before hints, the earliest stage first.

    ``saw`` holds what was read from the set-up, by name; ``unchecked`` says what could not be judged, and why.
    """

    findings: tuple[Finding, ...]
    saw: Mapping[str, str] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ()
    seconds: float = 0.0
    repro: Callable[[Path], None] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        order = sorted(self.findings, key=lambda f: (f.severity != "error", STAGES.index(f.stage)))
        object.__setattr__(self, "findings", tuple(order))

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of severity error."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def healthy(self) -> bool:
        """Whether there is no error; hints do not count."""
        return not self.errors

    @property
    def stage(self) -> Stage | None:
        """The earliest stage with an error, or None."""
        return self.errors[0].stage if self.errors else None

    def to_json(self) -> str:
        """Return the report as JSON: healthy, stage, findings, saw, unchecked, seconds."""
        findings = [
            {k: v for k, v in vars(finding).items() if k != "trial"} | {"can_try": finding.trial is not None}
            for finding in self.findings
        ]
        state = {"healthy": self.healthy, "stage": self.stage, "findings": findings, "saw": dict(self.saw)}
        return json.dumps(state | {"unchecked": self.unchecked, "seconds": round(self.seconds, 1)}, indent=1)

    def save_repro(self, path: str | Path) -> Path:
        """Write a script that reproduces the first error, and two files beside it; return the script's path.

        The script prints the evidence and runs the step. Batches, weights and optimizer state are in a .pt file, the
        objects themselves, as they are now, in a pickle.

        Raises
        ------
        DxdyError
            There is no error; the step cannot be run again; something cannot be pickled, or the place not be written.
        """
        if not self.errors:
            raise DxdyError("save_repro: the report has no error, so there is nothing to reproduce.")
        if self.repro is None:
            raise DxdyError("save_repro: the step itself was not kept. Diagnose with dx.diagnose(model=..., ...).")
        self.repro(path := Path(path))
        return path

    def __str__(self) -> str:
        head = [" → ".join(f"[{stage}]" if stage == self.stage else stage for stage in STAGES), self._verdict()]
        saw = [f"  {name:<10} {value}" for name, value in self.saw.items()]
        parts = ["\n".join(head), *(["\n".join(["seen", *saw])] if saw else []), *map(str, self.findings)]
        if self.unchecked:
            parts.append("\n".join(["not checked", *(f"  {line}" for line in self.unchecked)]))
        return "\n\n".join(parts)

    __repr__ = __str__

    def _verdict(self) -> str:
        hints = len(self.findings) - len(self.errors)
        tail = f" ({counted(hints, 'hint')})" if hints else ""
        if self.healthy:
            return f"no error found{tail}"
        return f"{counted(len(self.errors), 'error')}, first in {self.stage}{tail}"

    def _repr_html_(self) -> str:
        strip = " → ".join(
            f"<b style='background:#D55E00;color:white;padding:1px 6px'>{stage}</b>" if stage == self.stage else stage
            for stage in STAGES
        )
        rows = "".join(_html(finding) for finding in self.findings)
        saw = _table([("<i>" + html.escape(name) + "</i>", html.escape(value)) for name, value in self.saw.items()])
        left = "".join(f"<li>{html.escape(line)}</li>" for line in self.unchecked)
        left = f"<details><summary>not checked</summary><ul>{left}</ul></details>" if left else ""
        seen = f"<details><summary>what was seen</summary>{saw}</details>"
        return f"<div><p>{strip}<br>{html.escape(self._verdict())}</p>{rows}{seen}{left}</div>"


def _html(finding: Finding) -> str:
    colour = "#D55E00" if finding.severity == "error" else "#0072B2"
    title = f"{finding.severity} · {finding.stage} · {finding.cause}" + (f" · {finding.where}" * bool(finding.where))
    code = f"<pre>{html.escape(finding.check)}</pre>" if finding.check else ""
    rows = [("seen", html.escape(finding.evidence)), ("fix", html.escape(finding.fix))]
    rows += [("check", code)] * bool(code) + [("lesson", html.escape(finding.lesson))] * bool(finding.lesson)
    return (
        f"<details open style='border-left:4px solid {colour};padding-left:8px;margin:6px 0'>"
        f"<summary><b>{html.escape(title)}</b></summary>{_table(rows)}</details>"
    )


def _table(rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(f"<tr><td>{name}</td><td style='text-align:left'>{value}</td></tr>" for name, value in rows)
    return f"<table>{body}</table>"


# What is heard again later, and what it is then the echo of.
ECHOES = {
    "zero-gradient": {"dead-relu"},
    "vanishing-gradients": {"dead-relu"},
    "exploding-gradients": {"nan-in-inputs", "nan-in-targets", "nonfinite-activation", "log-of-zero", "all-ignored"},
    "exploding-init": {"nonfinite-activation"},
    "missing-activation": {"nan-in-inputs", "nan-in-targets"},
    "weight-decay-crushing": {"lr-too-large"},  # of which it is a multiple
}


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings without echoes of others among them, and each cause once."""
    seen: set[tuple[Any, ...]] = set()
    kept = []
    errors = {finding.cause for finding in findings if finding.severity == "error"}
    for finding in findings:
        if ECHOES.get(finding.cause, set()) & errors:
            continue
        key = finding.stage, finding.cause, finding.where
        if key not in seen:
            seen.add(key)
            kept.append(finding)
    return kept
