"""dxdy_nb: how gradients flow through PyTorch training, and what is wrong with yours.

The public names are loaded when they are first used, so that importing this package imports no notebook, plotting
or table library.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dxdy_nb.autograd.check import check_gradients as check_gradients
    from dxdy_nb.autograd.graph import graph as graph
    from dxdy_nb.autograd.record import record as record
    from dxdy_nb.config import RunConfig as RunConfig
    from dxdy_nb.diagnosis.diagnose import diagnose as diagnose
    from dxdy_nb.diagnosis.preflight import preflight as preflight
    from dxdy_nb.diagnosis.ranks import diagnose_ranks as diagnose_ranks
    from dxdy_nb.errors import DxdyError as DxdyError
    from dxdy_nb.lesson.live import live as live
    from dxdy_nb.observe.observer import watch as watch
    from dxdy_nb.ranks.pool import launch as launch
    from dxdy_nb.ranks.session import session as session
    from dxdy_nb.ranks.verify import verify_ranks as verify_ranks
    from dxdy_nb.runs.compare import compare as compare
    from dxdy_nb.runs.record import Run as Run
    from dxdy_nb.runs.record import result as result
    from dxdy_nb.training.ablation import ablate as ablate
    from dxdy_nb.training.curvature import sharpness as sharpness
    from dxdy_nb.training.loop import train as train
    from dxdy_nb.training.tuning import lr_range_test as lr_range_test
    from dxdy_nb.training.tuning import lr_search as lr_search

_HOMES = {
    "DxdyError": "errors",
    "Run": "runs.record",
    "RunConfig": "config",
    "ablate": "training.ablation",
    "check_gradients": "autograd.check",
    "compare": "runs.compare",
    "diagnose": "diagnosis.diagnose",
    "diagnose_ranks": "diagnosis.ranks",
    "graph": "autograd.graph",
    "launch": "ranks.pool",
    "live": "lesson.live",
    "lr_range_test": "training.tuning",
    "lr_search": "training.tuning",
    "preflight": "diagnosis.preflight",
    "record": "autograd.record",
    "result": "runs.record",
    "sharpness": "training.curvature",
    "session": "ranks.session",
    "train": "training.loop",
    "verify_ranks": "ranks.verify",
    "watch": "observe.observer",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dxdy_nb' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dxdy_nb.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def load_ipython_extension(shell: Any) -> None:
    """Give a notebook the magic ``%%watch``: called by ``%load_ext dxdy_nb``."""
    from dxdy_nb.lesson import magics

    magics.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Take ``%%watch`` away again: called by ``%unload_ext dxdy_nb`` and ``%reload_ext dxdy_nb``."""
    from dxdy_nb.lesson import magics

    magics.unload(shell)
