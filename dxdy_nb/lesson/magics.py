"""``%%watch``: watch whatever trains in a cell, then say what was seen."""

import ast
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython
from IPython.core.magic_arguments import MagicArgumentParser
from IPython.display import display

from dxdy_nb.lesson import plots
from dxdy_nb.observe.observer import Watch
from dxdy_nb.observe.recorder import Enough
from dxdy_nb.observe.summary import summary


def load(shell: Any) -> None:
    """Let a shell of IPython's understand ``%%watch``."""
    unload(shell)
    shell.input_transformers_cleanup.append(_mark)
    shell.ast_transformers.append(_Wrap())
    shell.register_magic_function(watch, "cell")


def unload(shell: Any) -> None:
    """Take ``%%watch`` away again."""
    for transformers, ours in ((shell.input_transformers_cleanup, "_mark"), (shell.ast_transformers, "_Wrap")):
        transformers[:] = [t for t in transformers if getattr(t, "__name__", type(t).__name__) != ours]
    shell.magics_manager.magics["cell"].pop("watch", None)


def watch(line: str, cell: str) -> None:
    """Watch whatever trains in this cell, then show what was seen.

    %%watch [NAME] [--steps N] [--out DIR] [--budget SHARE]

    NAME is the variable that holds the record afterwards (default: _watch); --steps ends the cell after N steps of an
    optimizer; --out keeps the record in a new folder while it runs; --budget is the part of a step's time that
    measuring may take (0.03), or "none": then every step is measured in full. The cell runs as it would without the
    line: it may await, and an error in it is its own; the record up to there is kept and shown.
    """
    raise UsageError("%%watch stands on the first line of a cell.")


@contextmanager
def watching(line: str) -> Iterator[None]:
    """Watch the block with the options of a ``%%watch`` line, then show what was seen, however the block ended.

    Raises
    ------
    UsageError
        The line is not understood; the block does not run.
    """
    options = _options(line)
    out = None if options.out is None else Path(options.out)
    with ExitStack() as afterwards, Watch(out=out, budget=options.budget, stop_after=options.steps, witness=True) as w:
        afterwards.callback(_tell, w)
        get_ipython().user_ns[options.name] = w
        with suppress(Enough):
            yield


def _tell(w: Watch) -> None:
    print(summary(w))
    if len(w.steps):
        plots.show(plots.training(w))
        display(w.diagnose())


def _options(line: str) -> Any:
    parser = MagicArgumentParser("%%watch")
    parser.add_argument("name", nargs="?", default="_watch")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out")
    parser.add_argument("--budget", type=_share, default=0.03)
    options = parser.parse_argstring(line)
    if not options.name.isidentifier():
        raise UsageError(f"%%watch: expected a variable's name, got {options.name!r}.")
    return options


def _share(text: str) -> float | None:
    return None if text == "none" else float(text)


def _mark(lines: list[str]) -> list[str]:
    """Put a call in the place of a first line ``%%watch``, as IPython does it, but leave the cell below it as code."""
    found = re.fullmatch(r"%%watch(?:\s+(.*))?", lines[0].rstrip()) if lines else None
    return [f"get_ipython().run_cell_magic('watch', {found[1] or ''!r}, '')\n", *lines[1:]] if found else lines


class _Wrap(ast.NodeTransformer):
    """Put a cell that begins with that call into a ``with`` block: to indent its text would change its strings.

    A block shows no value, so its last expression is handed to IPython's display by name.
    """

    def visit_Module(self, node: ast.Module) -> ast.Module:
        match node.body:
            case [
                ast.Expr(ast.Call(_, [ast.Constant("watch"), ast.Constant(str(line)), ast.Constant("")])) as first,
                *body,
            ]:
                node.body = [ast.copy_location(_block(line, body), first)]
        return node


def _block(line: str, body: list[ast.stmt]) -> ast.With:
    opening = ast.parse(f"__import__({__name__!r}, fromlist=['']).watching({line!r})", mode="eval").body
    if body and isinstance(body[-1], ast.Expr):
        show = ast.parse("get_ipython().displayhook", mode="eval").body
        body[-1].value = ast.copy_location(ast.Call(show, [body[-1].value], []), body[-1])
    return ast.With([ast.withitem(opening)], body or [ast.Pass()])
