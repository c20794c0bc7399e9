import doctest
import importlib
import pkgutil

import pytest

import lowgrad_utils

# ``data`` holds archives, no code.
MODULES = ["lowgrad_utils"] + [
    module.name
    for module in pkgutil.walk_packages(lowgrad_utils.__path__, "lowgrad_utils.")
    if module.name != "lowgrad_utils.data"
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # An example that writes a file must not write it here.
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_examples_exist():
    finder = doctest.DocTestFinder()
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name))]
    assert sum(bool(test.examples) for test in found) >= 20
