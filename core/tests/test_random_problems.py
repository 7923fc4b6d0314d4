"""2,000 seeded and 2,000 drawn random small problems on the torch route against the oracle.

Half of the seeded ones run with chunks of 16 tokens, so that they cross the borders of chunks too.
"""

import random

import pytest
from hypothesis import HealthCheck, given, seed, settings

from stream_attention.core.routes import torch_route
from stream_attention.core.testing import faulty
from stream_attention.core.testing.checks import check_route, find_record
from stream_attention.core.testing.problems import cases, random_case

SEEDED_GROUPS, SEEDED_EACH = 20, 100
DRAWN_PARTS, DRAWN_EACH = 8, 250


@pytest.fixture(scope="module")
def record():
    return find_record("torch", torch_route.register)


@pytest.mark.parametrize("group", range(SEEDED_GROUPS))
def test_seeded_problems_equal_the_oracle(record, group, monkeypatch):
    if group % 2:
        monkeypatch.setattr(torch_route, "CHUNK_BYTES", 0)  # 16 tokens, the least
        monkeypatch.setattr(torch_route, "GROUP_TOKENS", 8)
    rng = random.Random(group)
    for index in range(SEEDED_EACH):
        check_route(record, random_case(rng), seed=group * SEEDED_EACH + index)


@pytest.mark.parametrize("part", range(DRAWN_PARTS))
def test_drawn_problems_equal_the_oracle(record, part):
    @seed(part)
    @settings(
        max_examples=DRAWN_EACH,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases())
    def check(case):
        check_route(record, case)

    check()


# Splits of 64 tokens, and sums of thousands, need longer caches than small problems have. A second
# rounding is less than the tolerance of any problem, and shows where weights are equal.
ELSEWHERE = (
    "sink in every split",
    "values summed in the output dtype",
    "values rounded before their scale",
)
REACHABLE = sorted(
    fault for fault, line in faulty.FAULTS.items() if line < 6 and fault not in ELSEWHERE
)


@pytest.mark.parametrize("fault", REACHABLE)
def test_random_problems_find_every_fault_of_the_formula(fault):
    """The generator reaches what it must: 400 problems expose each fault of lines 1 to 5."""
    rng = random.Random(0)
    broken = faulty.record(fault)

    def search():
        for index in range(400):
            check_route(broken, random_case(rng), seed=index)

    with pytest.raises(AssertionError):
        search()
