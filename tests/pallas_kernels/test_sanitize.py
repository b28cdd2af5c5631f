"""What `bench.sanitize` makes of a tool's output."""

import pytest

from bench.sanitize import Finding, verdict

CLEAN = Finding.parse("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", 0)
FAULT = Finding.parse("========= Invalid read\n========= ERROR SUMMARY: 12 errors\n", 99)
HAZARD = Finding.parse("========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n", 99)


def test_summaries_are_read():
    assert (CLEAN.count, FAULT.count, HAZARD.count) == (0, 12, 2)
    assert HAZARD.text == "2 hazards displayed (1 error, 1 warning)"


@pytest.mark.parametrize(
    ("output", "status", "text"),
    [
        ("Segmentation fault", -11, "no summary, exit status -11: Segmentation fault"),
        ("ImportError: no jax\n========= ERROR SUMMARY: 0 errors", 1, "the program failed with status 1"),
        ("", None, "no summary"),
    ],
)
def test_a_program_that_failed_is_no_pass(output, status, text):
    found = Finding.parse(output, status)
    assert found.count is None and text in found.text
    assert verdict("memcheck", FAULT, found)[0] == 2


@pytest.mark.parametrize(
    ("control", "kernels", "status", "text"),
    [
        (FAULT, CLEAN, 0, "nothing found"),
        (FAULT, FAULT, 1, "FOUND 12 errors"),
        (HAZARD, HAZARD, 1, "FOUND 2 hazards"),
        (CLEAN, CLEAN, 2, "BLIND"),
        (CLEAN, FAULT, 1, "FOUND"),
        (None, CLEAN, 0, "no planted fault proves"),
    ],
)
def test_silence_counts_only_beside_a_fault_that_was_seen(control, kernels, status, text):
    code, said = verdict("racecheck", control, kernels)
    assert code == status and text in said
