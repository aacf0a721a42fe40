"""What each test needs, as its mark: nothing, ranks, or whole jobs; and the time it may take.

Marks are derived from a test's class and fixtures, so that a new test gets the right one. Only a
test that starts several processes by hand says so itself, with ``@pytest.mark.jobs``.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.ranks import RankTest

KINDS = ("unit", "ranks", "jobs")
# Whoever asks for one of these fixtures runs a whole job.
RUNS_JOBS = {"golden_run", "run_job", "six_steps"}
JOB_SECONDS = 300
# What starting the ranks may take, beside the test. The first test of a class pays for it, and so
# does the one after a failure.
START_SECONDS = 120
# The rank tests of `make check`: counts and bits of the scope, of a pipeline and of repeated units.
CHECKED = {
    "TestPartialBackwards": (
        "test_inner_backwards_touch_no_other_group",
        "test_policies_are_restored_by_value",
        "test_reported_counts_of_a_deferred_step",
        "test_retry_after_a_failed_chunk_is_bit_identical",
    ),
    "TestPipelines": (
        "test_reported_counts_of_a_pipeline_step",
        "test_two_ranks_of_stages",
    ),
    "TestInvocations": (
        "test_parity_tied",
        "test_registering_a_callback_changes_no_collective",
        "test_retain_gathers_once_a_forward_and_once_a_backward",
    ),
}


def rank_test(item: pytest.Item) -> type[RankTest] | None:
    cls = getattr(item, "cls", None)
    return cls if isinstance(cls, type) and issubclass(cls, RankTest) else None


def kind_of(item: pytest.Item) -> str:
    """``unit``, ``ranks`` or ``jobs``."""
    for kind in KINDS:
        if item.get_closest_marker(kind):
            return kind
    if rank_test(item):
        return "ranks"
    if RUNS_JOBS.intersection(getattr(item, "fixturenames", ())):
        return "jobs"
    return "unit"


def is_checked(item: pytest.Item, kind: str) -> bool:
    cls = rank_test(item)
    if cls is None:
        return kind == "unit"
    # Only on the CPU: a GPU's ranks would start for nothing.
    return cls.device_type() == "cpu" and item.name.startswith(CHECKED.get(cls.__name__, ()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        kind = kind_of(item)
        if not item.get_closest_marker(kind):
            item.add_marker(kind)
        if is_checked(item, kind):
            item.add_marker("check")
        if kind == "jobs" and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(JOB_SECONDS))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    cls = rank_test(item)
    if cls and (cls.poison_pill or not vars(cls).get("_processes_spawned")):
        mark = item.get_closest_marker("timeout")
        seconds = mark.args[0] if mark else float(item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(seconds + START_SECONDS))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    cls = rank_test(item)
    if cls and report.failed:
        # torch's class notes what a rank has raised, and not that this process has waited too long
        # for ranks that hang: the next test would get the answers to this one.
        cls.poison_pill = True
    return report
