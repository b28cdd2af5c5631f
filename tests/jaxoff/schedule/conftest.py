"""Fixtures of the tests of `tune=True`, without a budget and within one."""

import types

import pytest

from jaxoff._schedule.tuning import Tuning


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of decisions: of this test alone."""
    monkeypatch.setenv("JAXOFF_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def took(monkeypatch):
    """The programs that steps were taken by. The samples of the one named last in `fast` are the least."""
    names, run_step = [], Tuning.run

    def run_and_set(self, step, args, kwargs):
        current = self.current
        names.append(str(current))
        results = run_step(self, step, args, kwargs)
        self.samples[current][:] = [1.0 if str(current) == fast[-1] else 2.0 for _ in self.samples[current]]
        return results

    fast = ["stock"]
    monkeypatch.setattr(Tuning, "run", run_and_set)
    return types.SimpleNamespace(names=names, fast=fast)
