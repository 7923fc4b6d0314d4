"""`w_avg max_h ⟨q_h, c⟩ + w_peak max_h Σ_d max(q_hd M_d, q_hd m_d)`: pages' heavy hitters, GQA.

H2O (arXiv:2306.14048) for pages, with the envelope of Quest (arXiv:2406.10774); each term is that
of the best head of the group.
"""

from stream_attention.flows import (
    Add,
    CMax,
    CMean,
    CMin,
    Flow,
    GeMM,
    Max,
    Maximum,
    Multiply,
    Sum,
    register,
    topK,
)


@register("gqa_h2o_sparse_attention")
class GQAH2OSparseAttention(Flow):
    """Fields: c, M, m: mean and envelope of the page's keys."""

    def __init__(self, w_avg=1.0, w_peak=1.0):
        self.logits = GeMM()
        self.product = Multiply()
        self.larger = Maximum()
        self.over_dimensions = Sum(dim=2)
        self.best_of_columns, self.best_of_rows = Max(dim=2), Max(dim=1)
        self.add = Add(alpha=w_avg, beta=w_peak)
        self.select = topK()
        self.page_mean, self.page_max, self.page_min = CMean(dim=1), CMax(dim=1), CMin(dim=1)

    def create_cache(self, page_size, head_dim):
        return {"c": (1, head_dim), "M": (1, head_dim), "m": (1, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        self.page_mean(cache["k"], cache["c"], loc=loc, ctx=ctx)
        self.page_max(cache["k"], cache["M"], loc=loc, ctx=ctx)
        self.page_min(cache["k"], cache["m"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        average = self.best_of_columns(self.logits(q, cache["c"], ctx=ctx), ctx=ctx)  # [S, 1, 1]
        upper = self.product(q, cache["M"], ctx=ctx)  # [S, G, D]
        lower = self.product(q, cache["m"], ctx=ctx)  # [S, G, D]
        bound = self.over_dimensions(self.larger(upper, lower, ctx=ctx), ctx=ctx)  # [S, G, 1]
        peak = self.best_of_rows(bound, ctx=ctx)  # [S, 1, 1]
        self.select(self.add(average, peak, ctx=ctx), o, ctx=ctx)
