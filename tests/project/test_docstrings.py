"""Public names are documented, and the examples of docstrings run."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import jaxoff
import models
import pallas_kernels

PACKAGES = (jaxoff, pallas_kernels, models)
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def modules():
    for package in PACKAGES:
        yield package.__name__
        yield from sorted(m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))


def public(package):
    """What a package exports: the names of `__all__`, else those without an underscore, modules apart."""
    names = getattr(package, "__all__", [n for n in vars(package) if not n.startswith("_")])
    return {name: value for name in names if not inspect.ismodule(value := getattr(package, name))}


def examples(module):
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(module, module.__name__) if test.examples]


def failures(test):
    said = []
    doctest.DocTestRunner(optionflags=OPTIONS, verbose=False).run(test, out=said.append, clear_globs=False)
    return "".join(said)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_public_names_are_documented(package):
    names = public(package)
    assert names
    documented = {n for n, v in names.items() if not callable(v) or (v.__doc__ or "").strip()}
    assert set(names) - documented == set()


def test_signatures_show_no_long_default():
    lengths = {name: len(str(inspect.signature(value))) for name, value in public(jaxoff).items()}
    assert {name for name, length in lengths.items() if length > 400} == set()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_packages_show_examples(package):
    names = [name for name in modules() if name.split(".")[0] == package.__name__]
    assert sum(len(examples(importlib.import_module(name))) for name in names) > 0


# The example trains a model, as README's command does.
LONG = {"models.lm"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in modules()]
)
def test_examples_run(name):
    for test in examples(importlib.import_module(name)):
        assert failures(test) == ""


def test_an_example_that_is_wrong_fails():
    def parsed(text):
        return doctest.DocTestParser().get_doctest(text, {}, "example", None, 0)

    assert failures(parsed(">>> 1 + 1\n2\n")) == ""
    assert "Expected:\n    3\nGot:\n    2" in failures(parsed(">>> 1 + 1\n3\n"))
    assert "NameError" in failures(parsed(">>> missing\n1\n"))
