"""Ranks that should do the same and do not: what each wrote down of itself, compared."""

import ast
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dxdy_nb.diagnosis.report import Finding, Stage, found, listed
from dxdy_nb.errors import counted
from dxdy_nb.ranks.failure import LOST
from dxdy_nb.ranks.log import Event, named
from dxdy_nb.ranks.verify import Ranks, differing, is_number, windows

CLOSE = 1e-4  # relative: two reductions of the same numbers in another order
TWICE = 3  # samples that two ranks read in one pass: fewer may be alike by chance
UNEVEN = 2.0  # times as many samples as another rank: what an error in the weights of samples is called an error
WORDS = {
    "Expected to have finished reduction in the prior iteration": "unused-params-error",
    "appears not to match sizes of the same param": "models-differ",
    "rank 0 has": "models-differ",
}
# What a rank was doing, by the last thing that it wrote down.
DOING: dict[str, tuple[Stage, str]] = {
    "pass": ("data", "reads a batch"),
    "batch": ("forward", "has read a batch"),
    "sampler": ("data", "reads samples"),
    "forward": ("forward", "is in a forward"),
    "backward": ("backward", "is in a backward"),
    "update": ("update", "is in an optimizer's step"),
    "collective": ("comm", "is in a collective"),
}


# ---- ranks that did not return ----


def failures(ranks: Ranks) -> Iterator[Finding]:
    """A rank raised, died or waited without end."""
    if not ranks.failures:
        return
    raised = {rank: events[-1] for rank, events in enumerate(ranks.all("raised")) if events}
    for words, cause in WORDS.items():
        for rank, event in raised.items():
            if words in event["all"]:
                yield found(cause, named(event["line"]), f"rank {rank} raised {event['type']}: {event['text'][:160]}")
                return
    parted = out_of_step(ranks)
    own = {r: e for r, e in raised.items() if not LOST.search(e["all"])}
    if own:
        rank, event = next(iter(own.items()))
        stage = DOING.get(last(ranks.logs[rank]).get("event", ""), ("comm", ""))[0]
        finding = found("exception", named(event["line"]), f"rank {rank} raised {event['type']}: {event['text'][:160]}")
        yield replace(finding, stage=stage)
    elif parted is not None:
        yield parted
    else:
        rank, how = next(iter(ranks.failures.items()))
        told = "; ".join(f"rank {r} {doing(log)}" for r, log in enumerate(ranks.logs))
        cause = "collective-mismatch" if _left(ranks.logs[rank]) else "rank-died"
        yield found(cause, f"rank {rank}", f"{how} Last seen: {told}")


def _left(log: Sequence[Event]) -> bool:
    """Return whether a rank came to its end without an error."""
    kinds = {e["event"] for e in log[-2:]}
    return "end" in kinds and "raised" not in kinds


def last(log: Sequence[Event]) -> Event:
    """Return the last thing a rank began and did not end."""
    event: Event = next((e for e in reversed(log) if e["event"] not in {"raised", "end"}), {})
    return event if event.get("event") in DOING and not _left(log) else {}


def doing(log: Sequence[Event]) -> str:
    """Return in words what a rank did last."""
    event = last(log)
    if event.get("event") == "collective":
        return f"waits in {event['name']} ({named(event['line'])})"
    number = sum(e["event"] == "backward" for e in log)
    if event.get("event") == "backward":
        return f"waits in its backward number {number}"
    if event.get("event") == "forward" and event["ddp"]:
        return f"waits in DistributedDataParallel's forward, after {counted(number, 'backward')}"
    if not event and log and any(e["event"] == "end" for e in log):
        return f"has left, after {counted(number, 'backward')}"
    return DOING.get(event.get("event", ""), ("comm", "runs its own code"))[1]


def out_of_step(ranks: Ranks) -> Finding | None:
    """Return the first place where one rank waits in what another does not call."""
    meetings = [[_meeting(e) for e in log if _meeting(e)] for log in map(_waits, ranks.logs)]
    lengths = [len(m) for m in meetings]
    place = next((i for i, each in enumerate(zip(*meetings, strict=False)) if differing(each)), min(lengths))
    if place == max(lengths):
        return None
    where = [m[place] if place < len(m) else "nothing" for m in meetings]
    told = "; ".join(f"rank {r} {doing(log)}" for r, log in enumerate(ranks.logs))
    backwards = [[e for e in log if e["event"] == "backward"] for log in ranks.logs]
    waiting = [last(log) for log in ranks.logs]
    met = [e for e in waiting if e.get("event") == "collective"]
    line = backwards[0][-1]["line"] if backwards[0] else ()
    inside = any(_same_loop(line, e["line"]) for e in met)
    if uneven := "" if inside or "backward" not in where else _uneven(ranks):
        return found("uneven-inputs-hang", "loader", f"{uneven}. {told}")
    evidence = f"meeting {place + 1}: {', '.join(f'rank {r} {w}' for r, w in enumerate(where))}. {told}"
    return found("collective-mismatch", "", evidence)


def _waits(log: Sequence[Event]) -> list[Event]:
    """Return a log in which a forward of DistributedDataParallel that has not ended is the step that it belongs to."""
    event = last(log)
    if event.get("event") != "forward" or not event["ddp"]:
        return [*log]
    if event["grad"] and event["sync"]:
        return [*log, {"event": "backward", "reduces": True}]
    return [*log, {"event": "collective", "name": "forward", "world": True, "size": 0}]


def _uneven(ranks: Ranks) -> str:
    """Return how many steps each rank made in the first pass over a loader in which these differ."""
    passes: list[list[list[Any]]] = []
    for log in map(_waits, ranks.logs):
        passes.append([[None, 0]])
        for event in log:
            if event["event"] == "pass":
                passes[-1].append([event["batches"], 0])
            passes[-1][-1][1] += _meeting(event) == "backward"
        passes[-1] = [p for p in passes[-1] if p[1]]
    for place, each in enumerate(zip(*passes, strict=False)):
        batches = [b for b, _ in each]
        if differing([steps for _, steps in each]):
            told = [f"rank {r} {n}" + (f" of {b} batches" if b is not None else "") for r, (b, n) in enumerate(each)]
            even = None not in batches and not differing(batches)
            return "" if even else f"steps in pass {place + 1}: {', '.join(told)}"
    return ""


def _same_loop(line: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two source lines are in one loop, the innermost one around the first."""
    if not line or not other or line[0] != other[0]:
        return False
    source = "".join(linecache.getlines(line[0]))
    loops = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.For | ast.While)] if source else []
    around = [n for n in loops if n.lineno <= line[1] <= (n.end_lineno or n.lineno)]
    inner = max(around, key=lambda n: n.lineno, default=None)
    return inner is not None and inner.lineno <= other[1] <= (inner.end_lineno or inner.lineno)


def _meeting(event: Event) -> str:
    """Return what an event waits for the other ranks in."""
    if event["event"] == "backward" and event["reduces"]:
        return "backward"
    if event["event"] == "collective" and event["world"]:
        return f"{event['name']} of {event['size']}" if event["size"] else event["name"]
    return ""


# ---- samples ----


def shards(ranks: Ranks) -> Iterator[Finding]:
    """A sampler belongs to another rank."""
    for rank, events in enumerate(ranks.all("sampler")):
        for event in events:
            if event["replicas"] == len(ranks.logs) and event["rank"] != rank:
                seen = f"rank {rank} reads shard {event['rank']}: samples {listed(event['ids'], 8)}"
                yield found("sampler-wrong-rank", f"rank {rank}", seen)
                return


def orders(ranks: Ranks) -> Iterator[Finding]:
    """A sampler that shuffles gives the same order in every epoch."""
    trains = bool(ranks.any("backward"))
    for piece in _passes(ranks.logs[0]).values():
        shuffled = [e for e, used in piece if e["shuffle"] and (used or not trains)]
        if len(shuffled) > 1 and not differing([e["order"] for e in shuffled]):
            seen = f"{len(shuffled)} epochs begin with the samples {listed(shuffled[0]['ids'], 8)}; sampler.epoch stays"
            yield found("set-epoch-missing", "DistributedSampler", f"{seen} {shuffled[0]['epoch']}")


def _passes(log: Sequence[Event]) -> dict[int, list[tuple[Event, bool]]]:
    """Return the passes of each sampler, and whether there was a backward before the next pass of any."""
    passes: dict[int, list[tuple[Event, bool]]] = {}
    for place, event in enumerate(log):
        if event["event"] == "sampler":
            rest = [e["event"] for e in log[place + 1 :]]
            rest = rest[: rest.index("sampler")] if "sampler" in rest else rest
            passes.setdefault(event["number"], []).append((event, "backward" in rest))
    return passes


def padded(ranks: Ranks) -> Iterator[Finding]:
    """Samples that a sampler repeats, so that ranks are even, are counted in a metric."""
    log = ranks.logs[0]
    for piece in windows(log, "sampler")[1:]:
        place = next(i for i, e in enumerate(log) if e is piece[0]) - 1 if piece else -1
        event = log[place] if place >= 0 else {}
        kinds = {e["event"] for e in piece}
        joined = {e["name"] for e in piece if e["event"] == "collective"} - {"barrier"}
        if event.get("padded") and "backward" not in kinds and joined:
            seen = f"{event['size'] + event['padded']} samples are counted of {event['size']}: {event['padded']} twice"
            summed = joined & {"all_reduce", "reduce"}
            severity: Any = "error" if summed else "hint"  # who gathers may cut the surplus off
            yield found("eval-padded-duplicates", "DistributedSampler", seen, severity=severity)
            return


def repeated(ranks: Ranks) -> Iterator[Finding]:
    """All ranks train on the same batches, or go over the same samples each in an order of its own."""
    if not ranks.averaged:
        return
    first = []
    for log in ranks.logs:
        start = next((i for i, e in enumerate(log) if e["event"] == "pass" and _trains(log[i + 1 :])), None)
        if start is None:
            return
        rest = log[start + 1 :]
        stop = next((i for i, e in enumerate(rest) if e["event"] == "pass"), len(rest))
        first.append((log[start], rest[:stop]))
    batches = [[e for e in piece if e["event"] == "batch" and e["number"] == p["number"]] for p, piece in first]
    count, begun = min(map(len, batches)), first[0][0]
    firsts = [[e["sum"] for e in each[:count]] for each in batches]
    if count > 1 and not differing(firsts) and len(set(firsts[0])) > 1:
        seen = f"the first {count} batches are the same on all {len(first)} ranks (sampler: {begun['sampler']})"
        yield found("no-distributed-sampler", "loader", seen)
    elif begun["whole"] and not differing([e["whole"] for e, _ in first]):
        read = [[s for e in each for s in e["samples"]] for each in batches]
        sets = [set(samples) for samples in read]
        both = min(len(sets[0] & other) for other in sets[1:])
        chance = min(map(len, sets)) ** 2 / begun["whole"]  # two orders of the same samples have so many in common
        alike = max(len(samples) - len(own) for samples, own in zip(read, sets, strict=True))  # in the data themselves
        if both >= max(TWICE, chance / 2, 8 * alike):
            seen = f"{both} of the first {len(sets[0])} samples of rank 0 are among those of each other rank"
            seen += f": all go over the same {begun['whole']} ({begun['sampler']}), in {begun['batches']} batches"
            ended = all(any(e["event"] == "passed" for e in piece) for _, piece in first)
            yield found("no-distributed-sampler", "loader", seen, severity="error" if ended else "hint")


def _trains(rest: Sequence[Event]) -> bool:
    kinds = [e["event"] for e in rest]
    return "backward" in (kinds[: kinds.index("pass")] if "pass" in kinds else kinds)


# ---- gradients and weights ----


def gradients(ranks: Ranks) -> Iterator[Finding]:
    """Parameters that are equal on all ranks are handed different gradients."""
    for place, events in enumerate(ranks.rounds("update")):
        shared = set(events[0]["gradients"]).intersection(*(e["gradients"] for e in events[1:]))
        start = [e["parameters"] for e in events]
        equal = [n for n in shared if not differing([s.get(n) for s in start])]
        apart = sorted(n for n in equal if differing([e["gradients"][n][0] for e in events]))
        if apart:
            yield from _unreduced(ranks, place, events, apart)
            return


def _unreduced(ranks: Ranks, place: int, events: Sequence[Event], apart: Sequence[str]) -> Iterator[Finding]:
    """Say why the gradients of some parameters differ between ranks at an update."""
    name = apart[0]
    norms = ", ".join(f"{e['gradients'][name][1]:.3g}" for e in events)
    seen = f"update {place}: the gradient of {name} has norms {norms} on ranks that hold the same weights"
    if len(apart) > 1:
        seen += f"; so have {listed(apart[1:])}"
    window = windows(ranks.logs[0], "update")[place]
    forwards = [e for e in window if e["event"] == "forward" and e["grad"]]
    late = set(events[0]["late"]) & set(apart)
    cause, severity = "gradients-not-reduced", "error"
    if _proportional([e["gradients"] for e in events], apart):
        cause, seen = "clip-with-local-norm", f"{seen}; they point the same way and differ by a factor"
    elif late:
        name = min(late)
        cause = "unfrozen-after-wrap" if ranks.names.get(name) is False else "param-replaced-after-wrap"
    elif ranks.names and not set(apart) & set(ranks.names):
        cause = "loss-params-outside-ddp"
    elif ranks.names and forwards and not any(e["ddp"] for e in forwards):
        cause = "forward-through-module"
    elif ranks.names and forwards and not forwards[-1]["sync"]:
        flags = ", ".join("sync" if e["sync"] else "no_sync" for e in forwards)
        cause, seen = "no-sync-wrong-parity", f"{seen}; micro-batches of the window: {flags}"
    elif any(e["weights"] for e in ranks.any("collective") if e["name"] != "broadcast"):
        severity = "hint"  # weights are averaged instead: local SGD
    yield found(cause, name, seen, severity=severity)  # type: ignore[arg-type]


def _proportional(gradients: Sequence[Mapping[str, Sequence[float]]], names: Sequence[str]) -> bool:
    """Return whether ranks hold the same gradient but for one factor."""
    first = gradients[0]
    for other in gradients[1:]:
        factors = [other[n][k] / first[n][k] for n in names for k in (1, 2) if first[n][k]]
        if not factors or max(factors) - min(factors) > CLOSE * abs(max(factors)) or abs(factors[0] - 1) < CLOSE:
            return False
    return True


def weights(ranks: Ranks) -> Iterator[Finding]:
    """Ranks that are handed the same gradients hold different weights."""
    for place, events in enumerate(ranks.rounds("update")):
        lrs = [e["lr"] for e in events]
        if differing(lrs):
            shown = "; ".join(f"rank {r} {', '.join(f'{lr:.3g}' for lr in lr_)}" for r, lr_ in enumerate(lrs))
            yield found("lr-differs-by-rank", f"update {place}", f"learning rates at update {place}: {shown}")
            return
        first = events[0]["gradients"]
        shared = set(first).intersection(*(e["gradients"] for e in events[1:]))
        same = [n for n in shared if not differing([e["gradients"][n][0] for e in events]) and any(first[n][1:])]
        apart = sorted(n for n in same if differing([e["parameters"].get(n) for e in events]))
        if apart:
            if place == 0:
                seen = f"{listed(apart)}: other values on each rank at the first update, though the gradients are equal"
                yield found("different-init-manual-allreduce", apart[0], seen)
            else:
                seen = f"update {place - 1} left other values in {listed(apart)}: gradients and rates were equal"
                yield found("optimizer-state-differs", apart[0], seen)
            return


def summed(ranks: Ranks) -> Iterator[Finding]:
    """Gradients of a mean loss are added up over the ranks and not divided."""
    for kind in ("update", "end"):
        pieces = [windows(log, kind) for log in ranks.logs]
        for each in zip(*pieces, strict=False):
            if not all(p and p[-1]["event"] == kind for p in each):
                continue
            backs = [[e for e in p if e["event"] in ("backward", "backwarded")] for p in each]
            if not all(len(b) > 1 for b in backs):
                continue
            plain = all(b[-2].get("reduction") == "mean" and not b[-2].get("scaled") for b in backs)
            local, final = [b[-1].get("gradients", {}) for b in backs], each[0][-1]["gradients"]
            names = [n for n in final if all(n in g for g in local) and abs(final[n][2]) > 0]
            by_hand = any(e["event"] == "collective" and not is_number(e) for e in each[0])  # after the average, too
            apart = {n for n in names if by_hand or differing([g[n][0] for g in local])}
            reduced = [n for n in names if n in apart and final[n][0] != local[0][n][0]]
            totals = {n: sum(g[n][2] for g in local) for n in reduced}
            if plain and reduced and all(abs(final[n][2] - totals[n]) <= CLOSE * abs(totals[n]) for n in reduced):
                world = len(ranks.logs)
                seen = f"the gradient of {reduced[0]} is the sum of those of {world} mean losses: {world}"
                yield found("grad-sum-not-mean", reduced[0], f"{seen} times the gradient of the mean over all samples")
                return


def counts(ranks: Ranks) -> Iterator[Finding]:
    """Ranks average over different numbers of samples, and their averages are averaged."""
    pieces = [windows(log, "backward") for log in ranks.logs]
    for place, each in enumerate(zip(*pieces, strict=False)):
        ends = [p[-1] if p and p[-1]["event"] == "backward" else None for p in each]
        if any(e is None for e in ends):
            break
        counted = [e["counted"] for e in ends if e is not None]
        averaged = all(e["reduction"] == "mean" or (e["reduction"] == "sum" and e["scaled"]) for e in ends if e)
        exchanged = any(is_number(e) for p in each for e in p)
        if not averaged or exchanged or not ranks.averaged or min(counted) < 1 or not differing(counted):
            continue
        ratio = max(counted) / min(counted)
        told = ", ".join(f"rank {r} over {n}" for r, n in enumerate(counted))
        seen = f"backward {place}: {told}. A sample of the smaller batch counts {ratio:.3g} times as much"
        severity: Any = "error" if ratio >= UNEVEN else "hint"
        yield found("token-count-mean-of-means", "loss", seen, severity=severity)
        return


def ownership(ranks: Ranks) -> Iterator[Finding]:
    """The optimizer holds tensors that no gradient reaches, since the model was given others."""
    for events in ranks.rounds("update")[:1]:
        if all(e["owned"] and not e["graded"] and e["strangers"] for e in events):
            others = listed(events[0]["strangers"])
            seen = f"none of the optimizer's {events[0]['owned']} tensors has a gradient; {others} have"
            yield found("fsdp-optimizer-before-shard", "optimizer", seen)


# ---- what else ranks do ----


def schedules(ranks: Ranks) -> Iterator[Finding]:
    """A scheduler advances as often as there are ranks."""
    world = len(ranks.logs)
    pieces = windows(ranks.logs[0], "update")[1:-1]
    for number in {e["number"] for e in ranks.all("schedule")[0]}:
        steps = [sum(e["event"] == "schedule" and e["number"] == number for e in p) for p in pieces]
        if len(steps) > 1 and set(steps) == {world}:
            seen = f"{world} scheduler steps for each of {counted(len(steps), 'update')}"
            yield found("scheduler-times-world", "scheduler", seen)


def buffers(ranks: Ranks) -> Iterator[Finding]:
    """Running statistics differ between ranks, and nothing makes them equal."""
    if not any(not e["broadcast"] for e in ranks.all("wrapped")[0]):
        return
    for events in ranks.rounds("end"):
        states = [e["buffers"] for e in events]
        running = [n for n in states[0] if n.endswith(("running_mean", "running_var"))]
        apart = [n for n in running if differing([s.get(n) for s in states])]
        if apart:
            seen = f"{listed(apart)}: other values on each rank, broadcast_buffers=False"
            yield found("bn-stats-not-synced", apart[0], seen)


def files(ranks: Ranks) -> Iterator[Finding]:
    """Several ranks write the same file."""
    paths = [{e["path"]: e["line"] for e in events} for events in ranks.all("saved")]
    for path in paths[0]:
        writers = [rank for rank, mine in enumerate(paths) if path in mine]
        if len(writers) > 1:
            seen = f"ranks {listed(writers)} all write {path.rsplit('/', 1)[-1]}"
            yield found("save-from-every-rank", named(paths[0][path]), seen)
            return


def gathered(ranks: Ranks) -> Iterator[Finding]:
    """Outputs are gathered without their graph, between forward and backward."""
    for piece in windows(ranks.logs[0], "backward"):
        event = next((e for e in piece if e["event"] == "collective" and e["output"] and "gather" in e["name"]), None)
        if event is not None and piece[-1]["event"] == "backward":
            seen = f"{event['name']} of an output before backward: what the other ranks sent has no graph"
            yield found("all-gather-cuts-grad", named(event["line"]), seen, severity="hint")
            return


def logging(ranks: Ranks) -> Iterator[Finding]:
    """Each rank reads its own loss, and no number is ever reduced."""
    reduced = any(map(is_number, ranks.any("collective")))
    ends = ranks.all("end")
    if reduced or not ranks.averaged or not all(ends) or not all(e["items"] for events in ends for e in events):
        return
    for events in ranks.rounds("backward"):
        values = [e["value"] for e in events]
        if differing(values):
            seen = f"losses {', '.join(f'{v:.3g}' for v in values)} are read on their own ranks, and never averaged"
            yield found("local-loss-logged", "loss", seen, severity="hint")
            return


RULES: tuple[Callable[[Ranks], Iterator[Finding]], ...] = (
    *(failures, shards, orders, padded, repeated, gradients, weights, summed, counts, ownership),
    *(schedules, buffers, files, gathered, logging),
)
