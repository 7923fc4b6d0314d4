"""What a graph says of a flow: nodes, requirements, text, DOT, hash; and how flows are found."""

import dataclasses
import re

import pytest
import torch

from stream_attention.flows import (
    CMean,
    Field,
    Fill,
    GeMV,
    Mean,
    Save,
    Softmax,
    Sum,
    load_flow,
    register,
    registered_flows,
    topK,
)
from stream_attention.flows import Flow as vFlow
from stream_attention.flows.formats import BATCHED, PAGED, RAGGED, Format, join
from stream_attention.flows.graph import (  # noqa: F401, names that a repr evaluates with
    FlowGraph,
    GraphField,
    Node,
    Requirements,
    SideGraph,
)
from stream_attention.flows.library.running_average_block import RunningAverageBlock
from stream_attention.flows.library.template import MyFlow
from stream_attention.flows.op_table import OPS
from stream_attention.flows.operators import Operator
from stream_attention.flows.testing.formulas import SCORES, TOKEN_FLOWS

PAGE_FLOWS = [name for name in SCORES if name not in TOKEN_FLOWS]


def traced(name, page_size=None, head_dim=128, **kwargs):
    return load_flow(name, **kwargs).trace(
        page_size or (1 if name in TOKEN_FLOWS else 16), head_dim
    )


def test_a_graph_is_nodes_with_formats_shapes_and_loads_of_fields():
    graph = traced("block_sparse_attention")
    assert [node.op for node in graph.cache.nodes] == ["load", "mean", "store"]
    assert [(n.op, n.format, n.shape) for n in graph.indexer.nodes] == [
        ("query", BATCHED, ("G", "D")),
        ("mean", BATCHED, (1, "D")),
        ("load", RAGGED, (1, "D")),
        ("gemv", RAGGED, (1, 1)),
        ("topk", RAGGED, (1, 1)),
    ]
    assert graph.indexer.nodes[3].operands == (1, 2)
    assert graph.indexer.nodes[3].source.endswith("block_sparse_attention.py:28")
    assert all(node.format is PAGED for node in graph.cache.nodes)


@pytest.mark.parametrize("name", SCORES)
def test_requirements_follow_from_the_graph(name):
    needs = traced(name).requirements
    state = name in (*TOKEN_FLOWS, "running_average_block")
    assert needs.prefix_sharing == (not state)
    assert needs.page_sizes == ((1,) if name in TOKEN_FLOWS else None)
    assert needs.phases == (2 if name in (*TOKEN_FLOWS, "gqa_block_sparse_attention") else 1)
    assert len(needs.writes) == state
    assert set(needs.summaries) <= set(needs.reads)
    assert ("k" in needs.reads) == (name in TOKEN_FLOWS)
    assert ("v" in needs.cache_reads) == (name == "value_energy_centroid")


@pytest.mark.parametrize("name", SCORES)
def test_operands_come_before_their_users_and_every_op_is_in_the_table(name):
    graph = traced(name)
    for side in (graph.cache, graph.indexer):
        for node_id, node in side:
            assert all(0 <= operand < node_id for operand in node.operands)
            assert len(node.operands) == OPS[node.op].arity and side.side in OPS[node.op].sides
            assert dict(node.attributes).keys() == OPS[node.op].attributes.keys()
    assert graph.indexer.nodes[-1].op == "topk"


@pytest.mark.parametrize("name", SCORES)
def test_a_graph_prints_evaluates_and_draws(name):
    graph = traced(name)
    text = str(graph)
    assert text.startswith(f"flow {name}: page_size {graph.page_size}, head_dim 128\n")
    for node_id, node in graph.indexer:
        assert re.search(rf"%{node_id} = {node.op}\(.*{node.format} \[.*\]\s+{name}.py:\d+", text)
    names = {**globals(), "Format": Format}
    assert eval(repr(graph), names) == graph
    dot = graph.dot()
    assert dot.startswith(f'digraph "{name}" {{') and dot.endswith("}")
    assert dot.count("{") == dot.count("}")
    edges = sum(len(node.operands) for side in (graph.cache, graph.indexer) for _, node in side)
    touched = sum(
        node.op in ("load", "save", "store")
        for side in (graph.cache, graph.indexer)
        for _, node in side
    )
    assert dot.count("->") == edges + touched


def test_the_text_says_what_a_flow_needs():
    text = str(traced("h2o_token_sparse_attention", head_dim=64))
    assert "hh: state [1, 1] float32, starts at 0" in text
    assert "softmax(%3, dim=0, scale=0.125)" in text
    assert "page sizes: 1; prefix sharing: refused; phases: 2" in text
    assert "reads: k, hh; writes: hh; hash: " in text


def test_the_hash_is_of_the_program_and_not_of_its_lines_or_name():
    graph = traced("h2o_sparse_attention")
    moved = dataclasses.replace(
        graph,
        name="other",
        indexer=dataclasses.replace(
            graph.indexer,
            nodes=tuple(dataclasses.replace(n, source="x.py:1") for n in graph.indexer.nodes),
        ),
    )
    assert moved.content_hash == graph.content_hash
    others = [
        traced("h2o_sparse_attention", w_peak=2.0),
        traced("h2o_sparse_attention", page_size=32),
        traced("h2o_sparse_attention", head_dim=64),
        traced("gqa_h2o_sparse_attention"),
    ]
    assert len({g.content_hash for g in (graph, *others)}) == 5
    assert re.fullmatch(r"[0-9a-f]{64}", graph.content_hash)


def test_every_flow_has_a_hash_of_its_own():
    assert len({traced(name, page_size=1).content_hash for name in SCORES}) >= 10


def test_values_that_nothing_uses_are_left_out():
    class Idle(MyFlow):
        def forward_indexer(self, q, o, cache, ctx):
            Mean(dim=1)(q, ctx=ctx)
            super().forward_indexer(q, o, cache, ctx)

    assert Idle().trace(16, 64).content_hash == MyFlow().trace(16, 64).content_hash


def test_a_flow_is_traced_once_a_size():
    calls = []

    class Counted(MyFlow):
        def forward_indexer(self, q, o, cache, ctx):
            calls.append((ctx.page_size, ctx.head_dim))
            super().forward_indexer(q, o, cache, ctx)

    flow = Counted()
    assert flow.trace(16, 64) is flow.trace(16, 64)
    assert flow.graph is flow.trace(16, 64)
    assert flow.trace(32, 80) is flow.graph and flow.graph.page_size == 32
    assert calls == [(16, 64), (32, 80)]
    assert Counted().graph.head_dim == 128


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_meta_info_and_the_virtual_run_need_no_data(name, head_dim):
    page_size = 1 if name in TOKEN_FLOWS else 32
    flow = load_flow(name)
    shapes = flow.get_cache_meta_info(page_size, head_dim)
    assert shapes == {
        n: f.shape if not isinstance(f, tuple) else tuple(int(x) for x in f)
        for n, f in flow.create_cache(page_size, head_dim).items()
    }
    for group in (1, 3, 4, 7, 8):
        assert flow.run_indexer_virtual(group, page_size, head_dim).name == name
    with pytest.raises(ValueError, match="group_size=0: must be an int >= 1; use 1"):
        flow.run_indexer_virtual(0, page_size, head_dim)


@pytest.mark.parametrize("name", [*TOKEN_FLOWS, "gqa_block_sparse_attention"])
def test_the_scale_follows_from_the_head_dim_unless_it_is_given(name):
    flow = load_flow(name)
    flow.create_cache(1, 128)
    assert flow.softmax.scale == 128**-0.5
    scales = [
        next(
            n.attribute("scale")
            for n in traced(name, 1, d, **kw).indexer.nodes
            if n.op == "softmax"
        )
        for d, kw in ((64, {}), (256, {}), (64, {"scale": 0.09}))
    ]
    assert scales == [0.125, 0.0625, 0.09]


def test_the_decay_is_the_weight_of_the_old_state():
    assert (load_flow(TOKEN_FLOWS[0]).add.alpha, load_flow(TOKEN_FLOWS[0]).add.beta) == (
        1,
        0.984375,
    )
    assert load_flow(TOKEN_FLOWS[1], decay=1.0).add.beta == 1.0


def test_a_fill_of_a_state_only_says_where_it_starts():
    class Ported(vFlow):
        """A flow as it is written where resets are the author's."""

        def __init__(self):
            super().__init__()
            self.q_mean = Mean(dim=1)
            self.dot = GeMV()
            self.save = Save()
            self.top = topK()
            self.k_mean = CMean(dim=1)
            self.reset = Fill(alpha=0.5)

        def create_cache(self, page_size: int, head_dim: int):
            return {"centroids": (1, head_dim), "accumulated": (1, 1)}

        def forward_cache(self, cache, loc, ctx):
            self.k_mean(cache["k"], cache["centroids"], loc=loc, ctx=ctx)
            self.reset(cache["accumulated"], loc=loc, ctx=ctx)

        def forward_indexer(self, q, o, cache, ctx):
            score = self.dot(self.q_mean(q, ctx=ctx), cache["centroids"], ctx=ctx)
            self.save(score, cache["accumulated"], ctx=ctx)
            self.top(score, o, ctx=ctx)

    graph = Ported().trace(16, 64)
    assert graph.fields["accumulated"] == GraphField("accumulated", (1, 1), "float32", "state", 0.5)
    assert [node.op for node in graph.cache.nodes] == ["load", "mean", "store"]


def test_a_field_is_loaded_once_until_it_is_written():
    class Reread(RunningAverageBlock):
        def forward_indexer(self, q, o, cache, ctx):
            first = self.add(cache["r"], cache["r"], ctx=ctx)
            self.save(first, cache["r"], ctx=ctx)
            self.select(self.add(first, cache["r"], ctx=ctx), o, ctx=ctx)

    nodes = Reread().trace(16, 64).indexer.nodes
    assert [node.op for node in nodes] == ["load", "add", "save", "load", "add", "topk"]
    assert nodes[1].operands == (0, 0) and nodes[4].operands == (1, 3)


def test_a_state_read_again_waits_for_what_its_save_waited_for():
    class Late(RunningAverageBlock):
        def forward_indexer(self, q, o, cache, ctx):
            self.save(Softmax()(cache["r"], ctx=ctx), cache["r"], ctx=ctx)
            self.select(self.load(cache["r"], ctx=ctx), o, ctx=ctx)

    nodes = Late().trace(16, 64).indexer.nodes
    assert [(node.op, node.level) for node in nodes] == [
        ("load", 0),
        ("softmax", 1),
        ("save", 1),
        ("load", 1),
        ("topk", 1),
    ]


def test_a_declared_dtype_stays_and_a_state_is_float32():
    class Typed(MyFlow):
        def create_cache(self, page_size, head_dim):
            return {"c": Field((1, head_dim), torch.float16)}

    assert Typed().trace(16, 64).fields["c"].dtype == "float16"
    assert traced("running_average_block").fields["r"].dtype == "float32"
    assert traced("running_average_block").fields["c"].dtype is None
    assert eval(repr(Field((1, 2), init=-1.0))) == Field((1, 2), init=-1.0)


def test_formats_join_to_that_of_pages():
    assert join((BATCHED, BATCHED)) is BATCHED
    assert join((BATCHED, RAGGED)) is join((RAGGED, BATCHED)) is join((RAGGED,)) is RAGGED


def test_a_name_is_registered_once():
    before = set(registered_flows())

    @register("test_graph_only_once")
    class Once(MyFlow):
        pass

    assert Once().name == "test_graph_only_once" and MyFlow().name == "MyFlow"
    assert set(registered_flows()) - before == {"test_graph_only_once"}
    with pytest.raises(ValueError, match=r"name='test_graph_only_once': is taken by .*Once; use"):
        register("test_graph_only_once")(MyFlow)
    with pytest.raises(ValueError, match="name='no name': must be an identifier"):
        register("no name")(MyFlow)
    with pytest.raises(ValueError, match=r"flow=<class 'int'>: must be a subclass of Flow"):
        register("number")(int)


def test_a_flow_that_is_not_there_names_the_nearest():
    with pytest.raises(ValueError, match="flow='h2o_sparse': is not registered; use 'h2o_sparse_a"):
        load_flow("h2o_sparse")
    with pytest.raises(ValueError, match=r"flow='nowhere/flow.py': there is no such file"):
        load_flow("nowhere/flow.py")


def test_keywords_are_the_constructors():
    assert load_flow("h2o_sparse_attention", w_avg=0.5).add.alpha == 0.5
    with pytest.raises(ValueError) as caught:
        load_flow("h2o_sparse_attention", w_average=1, w_peek=2)
    assert "w_average=1: is no keyword of this flow; use 'w_avg'" in str(caught.value)
    assert "w_peek=2: is no keyword of this flow; use 'w_peak'" in str(caught.value)
    with pytest.raises(ValueError, match="scale=1: is no keyword of this flow; use none"):
        load_flow("block_sparse_attention", scale=1)


FILE = """
from stream_attention.flows import register
from stream_attention.flows.library.running_average_block import RunningAverageBlock
from stream_attention.flows.library.template import MyFlow


@register("{name}")
class FromFile(MyFlow):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
"""


def test_a_file_registers_its_flow(tmp_path):
    path = tmp_path / "my_flow.py"
    path.write_text(FILE.format(name="test_graph_from_file"))
    assert load_flow(path, weight=3).weight == 3
    assert load_flow(str(path), weight=4).trace(16, 64).name == "test_graph_from_file"
    assert "test_graph_from_file" in registered_flows()
    with pytest.raises(ValueError, match="weight=None: has no default and must be given"):
        load_flow(path)
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n")
    with pytest.raises(
        ValueError, match="must register one flow, registers none; use one @register"
    ):
        load_flow(empty)
    broken = tmp_path / "broken.py"
    broken.write_text(FILE.format(name="test_graph_broken") + "\nraise OSError('half way')\n")
    with pytest.raises(OSError, match="half way"):
        load_flow(broken)
    assert "test_graph_broken" not in registered_flows()


def test_the_template_is_a_legal_flow():
    assert MyFlow().trace(16, 64).requirements.phases == 1


def test_an_op_shows_and_keeps_its_attributes():
    op = Sum(2)
    assert repr(op) == "Sum(dim=2, block=None)" and isinstance(op, Operator)
    assert "Σ x" in Sum.__doc__


@pytest.mark.parametrize("name", PAGE_FLOWS)
def test_page_flows_take_any_page_size_and_head_dim(name):
    for page_size, head_dim in ((1, 1), (3, 7), (24, 80), (64, 64), (128, 576)):
        assert traced(name, page_size, head_dim).page_size == page_size
