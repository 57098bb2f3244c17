"""What dxdy costs and finds beside other tools, as one page: `make bench` writes benchmarks/REPORT.md.

    .venv-bench/bin/python benchmarks/report.py [--quick] [--only loop graph] [--out benchmarks/REPORT.md]

Each benchmark runs as a process of its own, one after the other, and prints its table. A line that begins with @ is a
comparison, `@ work | unit | dxdy 1.2 | peer 3.4`, in which less is better; the page begins with all of them.
"""

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from tqdm import tqdm

HERE = Path(__file__).parent
PACKAGES = (
    "torch", "dxdy_nb", "torchviz", "torchlens", "lightning", "accelerate", "tensorboard", "wandb",
    "torchtest", "torchtest2", "torch-audit",
)  # fmt: skip


@dataclass(frozen=True)
class Section:
    """A benchmark: its file's name, what it measures, what its peers do not do, and its arguments."""

    name: str
    title: str
    says: str
    lacks: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()


SECTIONS = (
    Section(
        "watch",
        "Statistics of all gradients, and watching a loop",
        "What is called after `backward` is timed in its place in a training step, and what hooks into the loop by ten "
        "steps with it against ten bare ones. dxdy reads six statistics of each gradient; Lightning and Composer read "
        "one norm, wandb and TensorBoard a histogram. Lightning's line is written again from what it computes, and so "
        "is Composer's: beside torch 2.13 pip finds only its release 0.3.1.",
        "Lightning and Composer say nothing of zeros, extremes or what is not finite, and not how far weights move. "
        "TensorBoard and wandb draw and judge nothing. torch-audit judges a step and keeps no series; its checks are "
        "said at every step here, and every 1,000 by default.",
        ("--rounds", "20"),
        ("--rounds", "15", "--models", "mlp"),
    ),
    Section(
        "loop",
        "A recorded training loop",
        "190 steps of a small CNN, whose bare loop takes a few milliseconds a step: a net as small as this shows what "
        "a loop costs around the mathematics. The recorded loop knows six statistics of each gradient at each step, "
        "and they are on disk; accelerate records nothing here.",
        "accelerate and Lightning run the loop on several devices and in half precision, which dxdy leaves to the "
        "loop's owner. They keep no gradients unless a hook is written, and can not show a step again.",
        ("--rounds", "9"),
        ("--rounds", "4"),
    ),
    Section(
        "graph",
        "The autograd graph",
        "The graph behind a loss, read with all that its nodes have saved. torchviz writes the source of a picture at "
        "the same time, and draws nothing yet; torchlens traces the forward pass and keeps more of each operation than "
        "`dx.record` does (its arguments, its code's context), so it is no surprise that it takes longer.",
        "torchviz has no gradient on an edge, no line of code, and stops at the recursion limit of Python (raised "
        "here). torchlens can save, change and run again what a forward pass makes, which dxdy can not; it shows where "
        "an output comes from, not where the graph was cut.",
        ("mlp10", "resnet18", "gpt12", "rnn300", "rnn1000", "--rounds", "5"),
        ("resnet18", "gpt12", "rnn300", "--rounds", "3"),
    ),
    Section(
        "check",
        "The gradient check",
        "`check_gradients` and `torch.autograd.gradcheck(fast_mode=True)` judge the same loss of a transformer by all "
        "its parameters, in float64. Faults are planted in one parameter's gradient at a time; found is only what is "
        "called wrong by its name.",
        "gradcheck compares a projection for each tensor, says that something is wrong and not which element, and "
        "takes a kink for an error. In return it checks complex numbers, sparse tensors and second derivatives. "
        "torchtest2 has gradcheck too, by the inputs alone: these are words, so it has nothing to check.",
        ("--rounds", "3", "--faults", "6"),
        ("--rounds", "1", "--faults", "1"),
    ),
    Section(
        "ranks",
        "A call on two ranks",
        "Two processes meet, reduce one tensor and part. The pool's processes stay warm between two calls; a fork is "
        "quick as well, for it inherits all that is imported.",
        "torch's spawn imports everything anew. accelerate's `debug_launcher` is for tests on CPUs only. "
        "Neither says which rank held the others up.",
        ("--rounds", "5"),
        ("--rounds", "3"),
    ),
    Section(
        "verify",
        "Ranks verified while they train",
        "DistributedDataParallel on two processes, three million parameters and a small batch. dxdy compares what each "
        "rank does and holds: data, learning rates, gradients, weights.",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL is made to compare the kind and the shape of each collective before it runs, "
        "and so to stop a mismatch before it hangs, which dxdy only tells afterwards. It compares no values: ranks "
        "that drift apart, train on the same data or sum where they should average are right to it. It is not timed: "
        "under DETAIL, DistributedDataParallel of torch 2.13.0 on gloo ended with a segmentation fault.",
        ("--rounds", "6"),
        ("--rounds", "2"),
    ),
    Section(
        "diagnosis",
        "Faults told, and false alarms",
        "Small trainings with one fault and their right twins. Told apart is what a tool says of the fault and not of "
        "the twin, whether it names the cause or not. Most of the faults were in sight when dxdy's rules were written "
        "or widened, so its own recall is no exam: at first sight it was 16 of 66, and later 4 of 36 (README).",
        "The peers name no stage. torchtest and torchtest2 look at one batch and train by a step of "
        "their own, so no fault of a loop is theirs to find; torch-audit has rules on style (weight decay on biases, "
        "layers in a poor layout) that dxdy has no opinion on, and these are its remarks on right set-ups.",
        ("--every", "4"),
        ("--every", "12", "--no-ranks"),
    ),
)


@dataclass(frozen=True)
class Result:
    """A benchmark's command, what it printed, its exit code (1: a bar is missed), its seconds, and the load before."""

    command: str
    text: str
    code: int
    seconds: float
    load: float


def summary(work: str, unit: str, values: Mapping[str, float]) -> None:
    """Print a comparison for the page's first table; dxdy's own first, less is better."""
    print("@ " + " | ".join([work, unit, *(f"{name} {value:.3g}" for name, value in values.items())]), flush=True)


def comparisons(text: str) -> list[tuple[str, str, dict[str, float]]]:
    """Return the comparisons of a benchmark's text: work, unit, and a value for each tool."""
    found = []
    for line in text.splitlines():
        if line.startswith("@ "):
            work, unit, *cells = line[2:].split(" | ")
            pairs = (cell.rpartition(" ") for cell in cells)
            found.append((work, unit.strip(), {name: float(value) for name, _, value in pairs}))
    return found


def first_table(results: Mapping[str, Result]) -> list[str]:
    """Return the table of all comparisons, and the list of those where a peer is better."""
    lines, better = ["| work | unit | dxdy | beside it |", "|---|---|---|---|"], []
    for result in results.values():
        for work, unit, values in comparisons(result.text):
            own = {name: value for name, value in values.items() if name.startswith(("dxdy", "dx."))}
            peers = {name: value for name, value in values.items() if name not in own}
            ours, theirs = (", ".join(f"{name} {value:g}" for name, value in side.items()) for side in (own, peers))
            lines.append(f"| {work} | {unit} | {ours.removeprefix('dxdy ')} | {theirs or '-'} |")
            if ahead := [name for name, value in peers.items() if value < min(own.values())]:
                better.append(f"- {work}: {', '.join(ahead)}")
    return [*lines, "", "Where another tool's figure is the lower one (it may do less: see its section):", "", *better]


def render(results: Mapping[str, Result], about: str) -> str:
    """Return the page."""
    sections = {section.name: section for section in SECTIONS}
    lines = [
        "# What dxdy costs and finds beside other tools",
        "",
        f"{about} What ran is said under each table, in "
        f"{sum(result.seconds for result in results.values()) / 60:.0f} minutes altogether; `make bench` repeats it.",
        "",
        "All tools of a table ran on the same work in one run, on one thread, in turns. Times are CPU seconds of the "
        "processes at work (wall clock where it is said) and medians. Ratios carry over to other machines, times do "
        "not. Noise: what else the machine does takes caches and clock rate away, and process time ticks coarsely; "
        "where a table has a line `bare again`, that is the noise of this run, and a cost below 0 is nothing else. In "
        "the first table less is better.",
        "",
        *first_table(results),
    ]
    for name, result in results.items():
        section, table = sections[name], [line for line in result.text.splitlines() if not line.startswith("@ ")]
        state = {0: "all bars held", 1: "a bar was missed, or is unclear within the noise"}.get(
            result.code, f"failed, exit code {result.code}"
        )
        lines += [
            "", f"## {section.title}", "", section.says, "", "```text", *"\n".join(table).strip().splitlines(), "```",
            "", f"What the others do and do not: {section.lacks}", "",
            f"`{result.command}`: {state}; {result.seconds:.0f} s, load {result.load:.1f} at its begin.",
        ]  # fmt: skip
    lines += [
        "",
        "Without a peer, and not on this page: `benchmarks/store.py` (a step on disk), `benchmarks/panels.py` (a "
        "slider that moves), `benchmarks/tuning.py` (the learning rate that is found, against a grid).",
        "",
    ]
    return "\n".join(lines)


def machine() -> str:
    """Return date, versions and machine in a few sentences."""
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} not installed")
    return (
        f"{date.today().isoformat()}, Python {platform.python_version()} on {platform.system()} {platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores that may be shared. {', '.join(versions)}."
    )


def run(section: Section, quick: bool) -> Result:
    """Run a benchmark, whose progress is shown, and return what it printed."""
    words = [f"{section.name}.py", *(section.quick if quick else section.arguments)]
    command = [sys.executable, str(HERE / words[0]), *words[1:]]
    began, load = time.monotonic(), os.getloadavg()[0]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    return Result(f"python benchmarks/{' '.join(words)}", done.stdout, done.returncode, time.monotonic() - began, load)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, write the page, and return 1 where a benchmark did not get to its end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a fifth of the time, with more noise")
    parser.add_argument("--only", nargs="+", choices=[section.name for section in SECTIONS], metavar="NAME")
    parser.add_argument("--out", type=Path, default=HERE / "REPORT.md")
    args = parser.parse_args(arguments)
    about, results = machine(), {}
    chosen = [section for section in SECTIONS if not args.only or section.name in args.only]
    for section in (bar := tqdm(chosen, desc="benchmarks", disable=None)):
        bar.set_postfix_str(section.name)
        print(f"{section.title} (benchmarks/{section.name}.py)", file=sys.stderr, flush=True)
        results[section.name] = run(section, args.quick)
        print(results[section.name].text, flush=True)
        args.out.write_text(render(results, about))  # what is done is kept
    print(f"{args.out} is written.")
    return int(any(result.code not in (0, 1) or not result.text.strip() for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
