"""A pytest plugin that writes which test begins and which fails, for mutation_check.py.

Lines `begins ID` and `fails ID` go into the file that OUTCOMES names: what is left of a run
that crashes or has to be killed says by which test.
"""

from __future__ import annotations

import os


def _write(word: str, test: str) -> None:
    with open(os.environ["OUTCOMES"], "a") as file:
        file.write(f"{word} {test}\n")


def pytest_runtest_logstart(nodeid):
    _write("begins", nodeid)


def pytest_runtest_logreport(report):
    if report.failed:
        _write("fails", report.nodeid)
