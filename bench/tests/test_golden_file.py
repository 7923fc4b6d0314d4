"""The oracle's answers in a file: read back as they were, and only for the inputs they judge."""

import pytest
import torch

from stream_attention.bench import golden_file, runner
from stream_attention.bench.cases import FP8, AttentionCase
from stream_attention.bench.check import expect
from stream_attention.bench.floor import ReadCurve, ReadPoint
from stream_attention.bench.lengths import parse_lengths
from stream_attention.bench.pools import build_pool

CPU = torch.device("cpu")
FORMS = ({}, {"dtype": "bfloat16"}, {"kv_dtype": FP8}, {"cache": "contiguous"}, {"q_len": 2})


def case_of(**form):
    shape = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32", **form}
    return AttentionCase(batch=2, lengths=parse_lengths("37,16"), **shape)


@pytest.mark.parametrize("form", FORMS)
def test_answers_read_back_as_they_were_for_inputs_made_anew(tmp_path, form):
    made = [build_pool(case_of(**form), CPU, seed) for seed in (0, 1)]
    want = [expect(pool) for pool in made]
    golden_file.save(want, tmp_path / "answers")
    again = [build_pool(case_of(**form), CPU, seed) for seed in (0, 1)]
    found = golden_file.load(again, tmp_path / "answers")
    for pool, old, new in zip(again, want, found, strict=True):
        assert new.pool is pool and new.runs == old.runs
        assert new.golden.dtype == old.golden.dtype
        for name in ("out", "lse", "reference_out", "reference_lse", "out_noise", "lse_noise"):
            assert torch.equal(getattr(new.golden, name), getattr(old.golden, name))


def change_q(pool):
    pool.q[0, 0, 0] += 1


def change_key(pool):
    pool.cache.key[int(pool.page_table[0, 0]), 0, 0, 0] += 1


def change_table(pool):
    pool.page_table[0, :2] = pool.page_table[0, :2].flip(0)


@pytest.mark.parametrize("change", [change_q, change_key, change_table])
def test_other_inputs_get_no_answer(tmp_path, change):
    pool = build_pool(case_of(), CPU, 0)
    golden_file.save([expect(pool)], tmp_path / "answers")
    other = build_pool(case_of(), CPU, 0)
    change(other)
    assert golden_file.load([pool], tmp_path / "answers") is not None
    assert golden_file.load([other], tmp_path / "answers") is None
    assert golden_file.load([build_pool(case_of(), CPU, 1)], tmp_path / "answers") is None
    assert golden_file.load([pool, pool], tmp_path / "answers") is None


def test_a_setting_takes_answers_that_fit_and_else_computes_its_own(tmp_path, monkeypatch):
    curve = ReadCurve((ReadPoint(1, 1.0, "sum"),), "cpu_cold")
    asked = []
    monkeypatch.setattr(runner, "expect", lambda pool: asked.append(pool) or expect(pool))
    path = tmp_path / "answers"
    golden_file.save([expect(build_pool(case_of(), CPU, 0))], path)
    for seed, computed in ((0, 0), (1, 1)):
        settings = runner.Settings(cold=False, seed=seed)
        setting = runner.prepare(case_of(), CPU, settings, curve, answers=path)
        assert len(setting.expected) == 1 and len(asked) == computed
    assert set(setting.spent.seconds) == {"inputs", "oracle"}
