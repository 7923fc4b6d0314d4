"""Every numbered line of the contract on every CPU route, and proof that each check can fail."""

import dataclasses

import pytest
import torch

from stream_attention.core.describe import describe
from stream_attention.core.routes import torch_route
from stream_attention.core.testing import faulty
from stream_attention.core.testing.checks import check_route, find_record
from stream_attention.core.testing.contract import LINES, many_requests
from stream_attention.core.testing.hostile import HOSTILE
from stream_attention.core.testing.problems import Case, build

ROUTES = {
    "torch": lambda: find_record("torch", torch_route.register),
    "plain": lambda: faulty.record(None),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("line", LINES)
def test_line_holds(line, route):
    LINES[line](ROUTES[route]())


@pytest.mark.parametrize("fault", faulty.FAULTS)
def test_broken_line_is_caught(fault):
    # An id that is dereferenced reads out of bounds on a CPU before any value is compared.
    with pytest.raises((AssertionError, IndexError)):
        LINES[faulty.FAULTS[fault]](faulty.record(fault))


def test_every_line_has_a_fault():
    assert set(faulty.FAULTS.values()) == set(LINES)


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.name)
@pytest.mark.parametrize("route", ROUTES)
def test_hostile_list_on_cpu_routes(route, case):
    check_route(ROUTES[route](), case)


def test_sixty_five_thousand_requests_on_the_torch_route():
    many_requests(ROUTES["torch"]())


Q_FORMS = {
    "every second element": lambda q: q.repeat_interleave(2, -1)[..., ::2],
    "heads innermost": lambda q: q.transpose(-1, -2).contiguous().transpose(-1, -2),
}


@pytest.mark.parametrize("form", Q_FORMS)
def test_q_with_a_strided_last_axis_is_refused_by_name(form):
    built = build(Case())
    with pytest.raises(ValueError, match=r"q\.stride.*nothing is copied silently"):
        describe(Q_FORMS[form](built.q), built.cache, built.qo_indptr)


def test_checks_notice_a_route_that_writes_its_inputs():
    right = faulty.record(None)

    def build_writer(problem, plan, device, bound):
        launch = right.build(problem, plan, device, bound)
        bound.q.view(torch.int16)[..., 0] ^= 1
        return launch

    with pytest.raises(AssertionError, match="the route changed q"):
        check_route(dataclasses.replace(right, build=build_writer), Case())


def test_checks_notice_rows_that_are_not_written():
    right = faulty.record(None)

    class Lazy:
        backend_plan = None

        def run(self):
            return None

    writer = dataclasses.replace(right, build=lambda *args: Lazy())
    with pytest.raises(AssertionError, match="NaN in the wrong places"):
        check_route(writer, Case())
