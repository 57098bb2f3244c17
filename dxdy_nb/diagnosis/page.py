"""What a preflight says: six points in their order, as a table, as JSON, and as one page that can be sent."""

import html
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Literal

from dxdy_nb.diagnosis.report import Finding
from dxdy_nb.errors import DxdyError
from dxdy_nb.training.memory import Memory, Saving, in_bytes

State = Literal["passed", "failed", "not checked", "not reached"]
MARKS = {"passed": "✓", "failed": "✗", "not checked": "?", "not reached": "·"}
PATHS = re.compile(r"(?<![\w:/.])(?:~|/[^\s/'\",:;()\[\]]+)?(?:/[^\s/'\",:;()\[\]]+)+(?=/)/")


@dataclass(frozen=True)
class Point:
    """One of the six points: its state, the evidence for it, and what to do next where something is left to do."""

    number: int
    name: str
    state: State
    evidence: str
    fix: str = ""
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, repr=False)
class Preflight:
    """The six points on a reader's set-up; ``folder`` is the run's, which keeps this page and the baseline.

    ``curves`` holds what was logged at each step of the baseline, by name; ``memory`` what held memory during one step,
    and ``savings`` what was tried to need less, where that was asked for.
    """

    target: str
    points: tuple[Point, ...]
    folder: Path
    when: str
    versions: str
    curves: dict[str, list[float]]
    memory: Memory | None = None
    savings: tuple[Saving, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether no point failed; what could not be checked is no failure."""
        return not any(point.state == "failed" for point in self.points)

    @property
    def failed(self) -> Point | None:
        """The point that failed, behind which none was reached."""
        return next((point for point in self.points if point.state == "failed"), None)

    @property
    def verdict(self) -> str:
        """The page in a line."""
        if self.failed is not None:
            return f"not ready: stopped at point {self.failed.number}, {self.failed.name}"
        left = [point for point in self.points if point.state == "not checked"]
        if not left:
            return "ready: all six points passed"
        numbers = " and ".join(str(point.number) for point in left)
        return f"nothing failed; not checked, or not wholly: point{'s' * (len(left) > 1)} {numbers}"

    def __str__(self) -> str:
        lines = [f"{self.target}: {self.verdict}", ""]
        for point in self.points:
            lines.append(f"{MARKS[point.state]} {point.number}  {point.name:<34} {point.state}")
            lines += [f"       {text}" for text in (point.evidence, f"fix: {point.fix}" if point.fix else "") if text]
        lines += [f"  memory  {self.memory}"] if self.memory is not None else []
        lines += [f"          {saving}" for saving in self.savings]
        return "\n".join(lines)

    __repr__ = __str__

    def to_json(self) -> str:
        """Return the page as JSON: target, ok, verdict, when, versions, points, memory (bytes), savings, seconds."""
        points = [
            {**{k: v for k, v in vars(p).items() if k != "findings"}, "findings": [_plain(f) for f in p.findings]}
            for p in self.points
        ]
        memory = {"peak": self.memory.peak, **self.memory.at_peak} if self.memory is not None else None
        told = {"target": self.target, "ok": self.ok, "verdict": self.verdict, "when": self.when}
        told |= {"versions": self.versions, "points": points, "memory": memory}
        told |= {"savings": [asdict(saving) for saving in self.savings], "seconds": round(self.seconds, 1)}
        return json.dumps(told, indent=1)

    def save(self, path: str | Path) -> Path:
        """Write one HTML file that needs nothing else, and return its path; it names no folder of this machine.

        Raises
        ------
        DxdyError
            The name is no page's, or the place cannot be written.
        """
        path = Path(path)
        if path.suffix not in (".html", ".htm"):
            raise DxdyError(f"preflight: expected a page's name, like preflight.html; got {str(path)!r}.")
        try:
            path.write_text(self._repr_html_(), encoding="utf-8")
        except OSError as error:
            raise DxdyError(f"preflight: {path}: cannot be written ({error.strerror}).") from None
        return path

    def _repr_html_(self) -> str:
        """Return the whole page."""
        first = next((p.number for p in self.points if p.state != "passed"), 0)
        points = "".join(_point(point, opened=point.number == first) for point in self.points)
        drawn = "".join(_curve(name, values) for name, values in self.curves.items())
        parts = {
            "title": _text(self.target),
            "verdict": _text(self.verdict),
            "state": "passed" if self.ok else "failed",
            "points": points,
            "baseline": f"<h2>Baseline</h2><div class='curves'>{drawn}</div>" if drawn else "",
            "memory": _memory(self.memory, self.savings) if self.memory is not None else "",
            "foot": _text(f"{self.when} · {self.versions} · run {self.folder.name} · {self.seconds:.0f} s"),
        }
        return Template(Path(__file__).with_name("page.html").read_text()).substitute(parts)


def _plain(finding: Finding) -> dict[str, str]:
    return {k: v for k, v in vars(finding).items() if k != "trial"}


def nameless(text: str) -> str:
    """Return a text whose paths are cut down to their last names.

    Examples
    --------
    >>> nameless("No such file: '/home/me/data/train.csv', see https://pytorch.org/docs/stable")
    "No such file: 'train.csv', see https://pytorch.org/docs/stable"
    """
    return PATHS.sub("", text)


def _text(text: str) -> str:
    return html.escape(nameless(text))


def _point(point: Point, opened: bool) -> str:
    told_below = any(finding.evidence in point.evidence for finding in point.findings)
    rows = [] if told_below else [("seen", point.evidence), ("fix", point.fix)]
    body = "".join(f"<dt>{name}</dt><dd>{_text(text).replace('; ', '<br>')}</dd>" for name, text in rows if text)
    told = "".join(_finding(finding) for finding in point.findings)
    state = point.state.replace(" ", "-")
    return (
        f"<details class='point {state}'{' open' * opened}><summary><b>{point.number}</b><span>{_text(point.name)}"
        f"</span><i>{MARKS[point.state]} {point.state}</i></summary><dl>{body}</dl>{told}</details>"
    )


def _finding(finding: Finding) -> str:
    title = " · ".join(filter(None, [finding.severity, finding.stage, finding.cause, finding.where]))
    check = f"<pre>{_text(finding.check)}</pre>" if finding.check else ""
    lesson = f"<p>lesson {_text(finding.lesson)}</p>" if finding.lesson else ""
    return (
        f"<div class='finding {finding.severity}'><p><b>{_text(title)}</b></p><p>{_text(finding.evidence)}</p>"
        f"<p>fix: {_text(finding.fix)}</p>{check}{lesson}</div>"
    )


def _curve(name: str, values: Sequence[float], width: int = 320, height: int = 90) -> str:
    """Return a small line picture as SVG, with its lowest, highest and last value in words."""
    known = [(i, v) for i, v in enumerate(values) if math.isfinite(v)]
    if len(known) < 2:
        return ""
    low, high = min(v for _, v in known), max(v for _, v in known)
    span, last = (high - low) or 1.0, max(1, len(values) - 1)
    dots = " ".join(
        f"{4 + (width - 8) * i / last:.1f},{height - 6 - (height - 12) * (v - low) / span:.1f}" for i, v in known
    )
    told = f"{low:.3g} to {high:.3g}, at the end {known[-1][1]:.3g}" if high > low else f"{low:.3g} throughout"
    return (
        f"<figure><svg viewBox='0 0 {width} {height}' role='img' aria-label='{_text(name)}: {told}'>"
        f"<polyline points='{dots}'/></svg><figcaption><b>{_text(name)}</b> over {len(values)} steps: {told}"
        "</figcaption></figure>"
    )


def _memory(memory: Memory, savings: Sequence[Saving]) -> str:
    at, peak = memory.at_peak, max(memory.peak, 1)
    bars = "".join(f"<span class='{name}' style='flex:{size / peak:.5f}'></span>" for name, size in at.items())
    key = "".join(f"<li><span class='{name}'></span>{name} {in_bytes(size)}</li>" for name, size in at.items())
    rows = "".join(
        f"<tr><td>{_text(s.advice)}</td><td>{_text(_seen(s))}</td><td>{_text(s.price)}</td></tr>" for s in savings
    )
    table = (
        f"<table><tr><th>out of memory?</th><th>peak of a step</th><th>price</th></tr>{rows}</table>" if rows else ""
    )
    return (
        f"<h2>Memory of one step: {in_bytes(peak)} at its peak</h2><div class='bar'>{bars}</div><ul>{key}</ul>{table}"
    )


def _seen(saving: Saving) -> str:
    return saving.note if saving.after is None else f"{in_bytes(saving.before)} → {in_bytes(saving.after)}"
