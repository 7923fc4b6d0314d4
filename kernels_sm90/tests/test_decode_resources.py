"""The records of the decode kernels against what the library launches, and scratch of plans.

`test_resources.py` has the legality of every compiled kernel; here the records are shown to be of
the kernels that problems run.
"""

import dataclasses
import itertools

import pytest

from stream_attention.core import resources
from stream_attention.core.device import DeviceFacts
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import Registry
from stream_attention.core.testing.native_library import require
from stream_attention.kernels_sm90 import capabilities, decode, schedules
from stream_attention.kernels_sm90.library import LIBRARY

DEVICE = DeviceFacts(type="cuda", compute_capability=(9, 0), num_sms=132)
KV_DTYPES = ("bfloat16", "float8_e4m3fn")


def problem(dim, rows, **changes):
    """`rows` packed rows, by queries where the number is odd and above one."""
    queries = rows if rows % 2 else 1
    group = rows // queries
    fields = {"batch": 3, "total_qo_len": 3 * queries, "max_qo_len": queries, "kv_capacity": 4096}
    fields |= {"num_qo_heads": 2 * group, "num_kv_heads": 2, "sm_scale": 0.1}
    fields |= {"head_dim_qk": dim, "head_dim_vo": dim}
    fields |= dict.fromkeys(("q_dtype", "kv_dtype", "out_dtype"), "bfloat16")
    return AttentionProblem(**{**fields, **changes})


@pytest.mark.parametrize("dim", decode.HEAD_DIMS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("invariant", [False, True])
def test_a_problems_record_is_of_what_the_library_launches(dim, kv_dtype, invariant):
    require(LIBRARY)
    for rows in range(1, decode.MAX_ROWS + 1):
        asked = problem(dim, rows, kv_dtype=kv_dtype, batch_invariant=invariant)
        (record,) = schedules.decode_schedules(asked, DEVICE)
        form = decode.geometry(asked, 132)
        assert (record.rows, record.tile_tokens) == (form.rows, form.tile_tokens)
        assert (record.threads, record.stages) == (form.threads, form.slots)
        assert record.shared_bytes == form.shared_bytes
        assert (record.merge == "tree_exchange") == invariant


def test_problems_reach_every_decode_record():
    reached = set()
    for dim, rows, kv_dtype, invariant, page_size in itertools.product(
        decode.HEAD_DIMS, range(1, 33), KV_DTYPES, (False, True), (1, 16)
    ):
        asked = problem(
            dim, rows, kv_dtype=kv_dtype, batch_invariant=invariant, page_size=page_size
        )
        reached.update(record.name for record in schedules.decode_schedules(asked, DEVICE))
    assert reached == {record.name for record in schedules.DECODE}


@pytest.mark.parametrize(
    ("changes", "gather"),
    [
        ({"page_size": 8}, "page_of_token"),
        ({"page_size": 48}, "page_of_sixteen"),
        ({"cache_kind": "contiguous", "page_size": 4095}, "page_of_sixteen"),
    ],
)
def test_pages_of_whole_sixteens_and_contiguous_caches_need_one_id_for_sixteen(changes, gather):
    (record,) = schedules.decode_schedules(problem(128, 4, **changes), DEVICE)
    assert record.gather == gather


def test_the_route_gives_the_record_of_a_problem_and_none_of_what_it_has_no_kernel_for():
    registry = Registry(discover=False)
    capabilities.register(registry)
    (route,) = registry.attention_records()
    (record,) = route.schedules(problem(128, 32), DEVICE)
    assert (record.mma_engine, record.state_scope) == ("wgmma", "block")
    assert route.schedules(problem(72, 8), DEVICE) == ()


def test_facts_of_an_instance_join_what_was_compiled_with_what_is_launched():
    require(LIBRARY)
    (record,) = schedules.decode_schedules(problem(128, 8), DEVICE)
    found = resources.facts(LIBRARY, record)
    assert set(found) == set(record.instances)
    for name, facts in found.items():
        assert facts.registers == resources.compiled_kernels(LIBRARY)[name].registers
        assert (facts.threads, facts.dynamic_shared_bytes) == (record.threads, record.shared_bytes)


@pytest.mark.parametrize("num_sms", [132, 114, 78])
@pytest.mark.parametrize("batch", [1, 40, 65_536])
@pytest.mark.parametrize("invariant", [False, True])
def test_workspace_of_a_plan_stays_small_on_any_device_and_batch(num_sms, batch, invariant):
    """Scratch is the blocks' business: neither lengths nor batch may blow it up."""
    require(LIBRARY)
    for dim, rows in itertools.product(decode.HEAD_DIMS, (8, 64)):
        small = problem(dim, rows, batch=batch, total_qo_len=batch, batch_invariant=invariant)
        large = dataclasses.replace(small, kv_capacity=1 << 17)
        forms = [decode.geometry(each, num_sms) for each in (small, large)]
        assert forms[0].scratch_floats <= forms[1].scratch_floats <= 16 << 20
