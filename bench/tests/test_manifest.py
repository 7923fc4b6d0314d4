"""The exact manifest: its totals, its weights, and what its loader refuses."""

import copy
import dataclasses
import json

import pytest

from stream_attention.bench.manifest import (
    ARCHS,
    BASELINES,
    Cell,
    ErrorBounds,
    exact_cells,
    load_manifest,
    manifest_from_json,
    manifest_to_json,
)
from stream_attention.planner.workloads import WorkloadBatch, WorkloadRequest

MANIFEST = exact_cells()
DATA = manifest_to_json(MANIFEST)


def values(field):
    return {getattr(cell.batch, field) for cell in MANIFEST.cells}


def test_thirty_cells_of_three_kinds():
    assert len(MANIFEST.cells) == 30
    assert [len(MANIFEST.of_kind(kind)) for kind in ("real", "boundary", "feature")] == [12, 10, 8]
    assert len({cell.name for cell in MANIFEST.cells}) == 30


def test_all_architectures_phases_dtypes_dims_and_memory_forms_are_covered():
    assert all(MANIFEST.of_arch(arch) for arch in ARCHS)
    assert len(MANIFEST.of_arch("sm_80")) == 7
    phases = {cell.batch.problem().phase for cell in MANIFEST.cells}
    assert {"decode", "prefill", "train"} <= phases
    assert values("q_dtype") == {"float16", "bfloat16"}
    assert values("head_dim_qk") == {64, 128, 256}
    assert values("cache_kind") == {"paged", "contiguous"}
    assert values("layout") == {"NHD", "HND"}
    assert values("causal") == {True, False}


def test_one_training_cell_drops_weights_and_says_which():
    (cell,) = [cell for cell in MANIFEST.cells if cell.batch.dropout_p]
    assert cell.batch.problem().phase == "train" and cell.batch.dropout_seed is not None
    assert "sdpa_math" in cell.baselines


def test_sm100_prefill_cells_are_the_measured_ones():
    rows = {
        (cell.batch.batch, *set(cell.batch.qo_lens))
        for cell in MANIFEST.cells
        if cell.archs == ("sm_100",) and cell.batch.problem().phase == "prefill"
    }
    assert rows == {(1, 256), (1, 384), (1, 512), (2, 128)}


@pytest.mark.parametrize(
    ("arch", "kind", "dim", "group", "batch", "tokens"),
    [
        ("sm_80", "contiguous", 128, 8, 4, 16384),
        ("sm_80", "contiguous", 64, 8, 4, 32768),
        ("sm_80", "paged", 128, 8, 1, 32768),
        ("sm_90", "paged", 64, 8, 8, 16384),
        ("sm_90", "paged", 128, 8, 8, 65536),
        ("sm_90", "contiguous", 64, 8, 8, 65536),
        ("sm_90", "contiguous", 128, 4, 8, 32768),
        ("sm_100", "paged", 128, 8, 4, 32768),
    ],
)
def test_measured_decode_cells_are_there(arch, kind, dim, group, batch, tokens):
    found = [
        cell
        for cell in MANIFEST.of_arch(arch)
        if cell.kind == "real"
        and cell.batch.cache_kind == kind
        and cell.batch.head_dim_qk == dim
        and cell.batch.num_qo_heads == group * cell.batch.num_kv_heads
        and cell.batch.kv_lens == (tokens,) * batch
    ]
    assert len(found) == 1


def test_every_cell_has_a_baseline_on_each_of_its_architectures():
    for cell in MANIFEST.cells:
        for arch in cell.archs:
            assert cell.baselines_on(arch), (cell.name, arch)
    assert MANIFEST.cells[0].baselines_on("sm_100") == ()
    assert {name for cell in MANIFEST.cells for name in cell.baselines} == set(BASELINES)
    assert "flashinfer_fa3" not in MANIFEST.of_kind("feature")[2].baselines_on("sm_100")


def test_what_was_chosen_is_said():
    assert MANIFEST.chosen and all(len(sentence) > 20 for sentence in MANIFEST.chosen)
    assert any(cell.chosen for cell in MANIFEST.cells)


def test_json_gives_the_manifest_back(tmp_path):
    path = tmp_path / "cells.json"
    path.write_text(json.dumps(DATA))
    assert load_manifest(path) == MANIFEST


def test_a_tolerance_may_be_numbers():
    data = copy.deepcopy(DATA)
    data["cells"][0]["tolerance"] = {"max_error": 1e-3, "rms_error": 1e-4}
    manifest = manifest_from_json(data)
    assert manifest.cells[0].tolerance == ErrorBounds(1e-3, 1e-4)
    assert manifest_to_json(manifest) == data
    data["cells"][0]["tolerance"] = {"max_error": 1e-3, "rms_error": float("nan")}
    with pytest.raises(ValueError, match="rms_error=nan: must be a finite number >= 0"):
        manifest_from_json(data)


def changed(path, value):
    """The manifest's data with one place replaced, or removed where `value` is `KeyError`."""
    data = copy.deepcopy(DATA)
    place = data
    for step in path[:-1]:
        place = place[step]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


TWIN = {**DATA["cells"][0], "name": "twin"}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), "other", "manifest.schema='other': must say what the object is"),
        (("version",), 2, "manifest.version=2: this code reads version 1"),
        (("color",), 1, "manifest.color=1: is no key of this object"),
        (("about",), KeyError, "manifest.about=None: is missing"),
        (("about",), "", "about='': must be a str that is not empty"),
        (("chosen",), [1], r"chosen=\(1,\): must be a tuple of str"),
        (("cells",), [], r"cells=\(\): must be a tuple of one Cell or more"),
        (("cells",), 3, r"cells\[0\]='int': must be an object"),
        (("cells", 2, "weight"), 1, r"cells\[2\].weight=1: is no key.*use"),
        (("cells", 2, "archs"), KeyError, r"cells\[2\].archs=None: is missing"),
        (("cells", 2, "archs"), ["sm_70"], "archs=.*must be one or more of sm_80, sm_90, sm_100"),
        (("cells", 2, "archs"), [], r"archs=\(\): must be one or more"),
        (("cells", 2, "archs"), None, r"cells\[2\] '.*archs=None: must be one or more of sm_80"),
        (("cells", 2, "archs"), 3, r"archs=3: must be one or more of sm_80"),
        (("cells", 2, "archs"), "sm_90", r"archs='sm_90': must be one or more of sm_80"),
        (("cells", 2, "archs"), [[]], r"archs=\(\[\],\): must be one or more of sm_80"),
        (("cells", 2, "archs"), [{"a": 1}], r"archs=.*: must be one or more of sm_80"),
        (("cells", 2, "baselines"), None, r"baselines=None: must be one or more of flashinfer"),
        (("cells", 2, "baselines"), [[]], r"baselines=\(\[\],\): must be one or more of flash"),
        (("cells", 2, "kind"), "odd", "kind='odd': must be one of real, boundary, feature"),
        (("cells", 2, "name"), "", "name='': must be a str that is not empty"),
        (("cells", 2, "name"), DATA["cells"][3]["name"], "names must be unique"),
        (("cells", 2, "tolerance"), "loose", "tolerance='loose': must be ErrorBounds or one of"),
        (("cells", 2, "tolerance"), {"max": 1}, r"tolerance.max=1: is no key"),
        (("cells", 2, "baselines"), ["mine"], r"baselines=\('mine',\): must be one or more of"),
        (("cells", 2, "baselines"), ["flashinfer_fa3"], "each must run on an architecture"),
        (("cells", 2, "chosen"), ["colour"], "chosen=.*must be any of"),
        (("cells", 2, "weights", "trace"), 0.5, "each of the weights .* must sum to 1"),
        (("cells", 2, "weights", "trace"), -0.1, "must give each of trace, stratified, boundary"),
        (("cells", 2, "weights", "other"), 0.1, "weights.other=0.1: is no key"),
        (("cells", 2, "workload", "layout"), "DHN", r"cells\[2\] .*layout='DHN': must be one of"),
        (("cells", 2, "workload", "dim"), 64, r"cells\[2\] .*batch.dim=64: is no key"),
        (("cells", 3), TWIN, "two cells with one content are one cell"),
        (("counts", "sm_80"), 8, "counts=.*must be the cells of every kind and architecture"),
        (("counts", "sm_70"), 8, "counts.sm_70=8: is no key"),
    ],
)
def test_the_loader_names_what_is_wrong(path, value, message):
    with pytest.raises(ValueError, match=message):
        manifest_from_json(changed(path, value))


def test_faults_of_several_cells_are_reported_at_once():
    data = changed(("cells", 2, "kind"), "odd")
    data["cells"][5]["weigth"] = 1
    with pytest.raises(ValueError) as error:
        manifest_from_json(data)
    assert "cells[2]" in str(error.value) and "cells[5].weigth=1" in str(error.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "cells.json: is no JSON "),
        (b"\xff", "cells.json: is no UTF-8 text"),
        (b'{"schema": 1, "schema": 2}', "key 'schema' is given 2 times"),
    ],
)
def test_a_file_that_is_no_manifest_says_why(tmp_path, raw, message):
    path = tmp_path / "cells.json"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        load_manifest(path)


def test_a_cell_needs_a_batch_and_a_weight():
    batch = WorkloadBatch(requests=(WorkloadRequest(kv_len=5),))
    good = {
        "name": "a",
        "kind": "real",
        "archs": ("sm_90",),
        "batch": batch,
        "weights": {"trace": 1.0, "stratified": 0.0, "boundary": 0.0},
        "tolerance": "assert_close",
        "baselines": ("sdpa_math",),
    }
    cell = Cell(**good)
    assert eval(repr(cell)) == cell
    with pytest.raises(ValueError, match="one of them more than 0"):
        dataclasses.replace(cell, weights=dict.fromkeys(good["weights"], 0.0))
    with pytest.raises(ValueError, match="must be a WorkloadBatch"):
        dataclasses.replace(cell, batch=None)
