"""The examples in the package's docstrings say what happens."""

import doctest
import importlib
import pkgutil

import pytest

import dxdy_nb

MODULES = sorted(module.name for module in pkgutil.walk_packages(dxdy_nb.__path__, "dxdy_nb."))
FINDER = doctest.DocTestFinder(exclude_empty=True)


def examples_of(name):
    return [found for found in FINDER.find(importlib.import_module(name)) if found.examples]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_hold(name, here):
    for found in examples_of(name):
        report = []
        found.globs |= {"tmp_path": here}
        outcome = doctest.DocTestRunner(verbose=False).run(found, out=report.append)
        assert outcome.failed == 0, "".join(report)


def test_the_examples_are_found():
    examples = [example for name in MODULES for found in examples_of(name) for example in found.examples]
    assert len([example for example in examples if doctest.SKIP not in example.options]) >= 15
