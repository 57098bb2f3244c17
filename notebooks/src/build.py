"""Build the lessons from their sources, or check that they are what a build would give.

    python notebooks/src/build.py [NN_name ...]      execute and write the notebooks, outputs included
    python notebooks/src/build.py --check            fail on a stale, unexecuted or noisy one; executes nothing

A source is a jupytext percent file here. The same source gives the same bytes on one machine, except in cells
tagged nbval-ignore-output: ids come from the content, metadata that tells times or versions is left out.
"""

import argparse
import hashlib
import os
import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from tqdm import tqdm

SOURCES = Path(__file__).resolve().parent
NOTEBOOKS = SOURCES.parent
METADATA = {
    "kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"},
    "language_info": {"name": "python"},
}
# What must not stand in a checked output: it is another one on another machine, or tomorrow.
NOISE = re.compile(r"0x[0-9a-f]{6,}|/(home|root|tmp|Users|usr)/|ipykernel_\d+|\d+/\d+ \[\d\d:\d\d")


def sources(names: list[str]) -> list[Path]:
    """Return the sources of the named lessons, or of all."""
    found = sorted(p for p in SOURCES.glob("[0-9][0-9]_*.py") if not p.stem.endswith("_exercises"))
    unknown = set(names) - {p.stem for p in found}
    if unknown:
        sys.exit(f"no source for {', '.join(sorted(unknown))}; there are: {', '.join(p.stem for p in found)}")
    return [p for p in found if not names or p.stem in names]


def load(source: Path) -> NotebookNode:
    """Return a source as a notebook without outputs, with ids that follow from the content."""
    notebook = jupytext.read(source)
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = hashlib.sha256((cell.cell_type + cell.source).encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        cell["id"] = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        cell.metadata = nbformat.from_dict({"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {})
    notebook.metadata = nbformat.from_dict({**METADATA, "source_sha256": digest_of(source)})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def digest_of(source: Path) -> str:
    """Return the sha256 of a lesson's source together with its exercises and the modules beside the lessons it uses."""
    exercises = source.with_name(f"{source.stem}_exercises.py")
    beside = [path for path in sorted(source.parents[1].glob("*.py")) if path.stem in source.read_text()]
    parts = [path.read_bytes() for path in (source, exercises, *beside) if path.exists()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def build(source: Path) -> Path:
    """Execute a lesson as a reader without widgets would, and write it beside its fellows."""
    notebook = load(source)
    metadata = dict(notebook.metadata)
    client = NotebookClient(
        notebook,
        timeout=600,
        record_timing=False,
        extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
        coalesce_streams=True,  # else the bytes depend on when the kernel flushed
        store_widget_state=False,
        kernel_name="python3",
        resources={"metadata": {"path": str(NOTEBOOKS)}},
    )
    client.execute(env={**os.environ, "PYTHONHASHSEED": "0"})
    notebook.metadata = nbformat.from_dict(metadata)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    nbformat.validate(notebook)
    target = NOTEBOOKS / f"{source.stem}.ipynb"
    nbformat.write(notebook, target)
    return target


def problems(source: Path) -> list[str]:
    """Return what is wrong with the notebook that stands beside a source."""
    target = NOTEBOOKS / f"{source.stem}.ipynb"
    if not target.exists():
        return [f"{target.name}: not built"]
    stored, fresh = nbformat.read(target, as_version=4), load(source)
    found = []
    if stored.metadata.get("source_sha256") != digest_of(source):
        found.append(f"{target.name}: stale, its source or exercises changed")
    if [(c.cell_type, c.source, c.id) for c in stored.cells] != [(c.cell_type, c.source, c.id) for c in fresh.cells]:
        found.append(f"{target.name}: its cells are not those of the source")
    for number, cell in enumerate(c for c in stored.cells if c.cell_type == "code"):
        if cell.source.strip() and cell.execution_count is None:
            found.append(f"{target.name}: code cell {number} was not executed")
        if "nbval-ignore-output" not in cell.metadata.get("tags", []):
            noise = NOISE.search(text_of(cell))
            found += [f"{target.name}: code cell {number} prints {noise.group()!r}, which changes"] if noise else []
        if any(output.output_type == "error" for output in cell.outputs):
            found.append(f"{target.name}: code cell {number} ended with an error")
    return found


def text_of(cell: NotebookNode) -> str:
    """Return all text that nbval would compare in a cell's outputs."""
    parts = []
    for output in cell.outputs:
        parts.append(output.get("text", ""))
        parts += [str(value) for kind, value in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(parts)


def main() -> int:
    """Build or check, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NN_name")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    chosen = sources(arguments.names)
    if arguments.check:
        found = [problem for source in chosen for problem in problems(source)]
        print("\n".join(found) or f"{len(chosen)} notebooks are what their sources say.")
        return 1 if found else 0
    for source in tqdm(chosen, desc="build", unit="lesson", disable=None):
        print(f"built {build(source).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
