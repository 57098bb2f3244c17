"""What the package offers: named, documented, and cheap to import."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import dxdy_nb as dx

MODULES = [dx.__name__, *sorted(module.name for module in pkgutil.walk_packages(dx.__path__, "dxdy_nb."))]


def public_things(module):
    """Return name and object of all public functions and classes of a module, and of the methods of its classes."""
    found = {}
    for name, thing in vars(module).items():
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(thing) or inspect.isroutine(thing):
            found[name] = thing
        if inspect.isclass(thing):
            methods = {n: m for n, m in vars(thing).items() if not n.startswith("_")}
            kinds = (property, classmethod, staticmethod)
            found |= {f"{name}.{n}": m for n, m in methods.items() if inspect.isroutine(m) or isinstance(m, kinds)}
    return found


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_says_what_it_does(name):
    module = importlib.import_module(name)
    things = public_things(module)
    inherited = {"forward"}  # torch says what it does
    bare = [n for n, thing in things.items() if not inspect.getdoc(thing) and n.split(".")[-1] not in inherited]
    assert bare == []
    assert inspect.getdoc(module)


def test_public_things_are_found():
    found = public_things(importlib.import_module("dxdy_nb.runs.record"))
    assert {"Run", "Run.load", "Run.steps", "Run.plot", "Recorder.write", "result"} <= set(found)
    assert not {"Path", "dataclass", "Run.folder"} & set(found)


@pytest.mark.parametrize("name", dx.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert inspect.getdoc(getattr(dx, name))


def test_the_public_names_are_listed():
    assert dir(dx) == dx.__all__ == sorted(set(dx.__all__))
    assert {"RunConfig", "train", "Run", "watch", "live", "result", "DxdyError"} <= set(dx.__all__)


def test_type_checkers_see_the_same_names():
    tree = importlib.import_module("ast").parse(inspect.getsource(dx))
    imported = [
        alias.asname for node in tree.body if hasattr(node, "test") for line in node.body for alias in line.names
    ]
    assert sorted(imported) == dx.__all__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'dxdy_nb' has no attribute 'trian'"):
        _ = dx.trian


HEAVY = ("IPython", "ipywidgets", "matplotlib", "pandas")


@pytest.mark.parametrize(
    "code",
    [
        "import dxdy_nb",
        "import dxdy_nb as dx; dx.RunConfig(); dx.train; dx.watch; dx.Run; dx.result",
    ],
)
def test_importing_brings_no_notebook_plotting_or_table_library(code):
    code += f"; import sys; print(*sorted(sys.modules.keys() & {set(HEAVY)}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
