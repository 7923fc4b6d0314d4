"""`w_avg ⟨q̄, c⟩ + w_peak Σ_d max(q̄_d M_d, q̄_d m_d)`: heavy hitters of pages, by the mean query.

H2O (arXiv:2306.14048) keeps the tokens with the most attention. Of a page, ⟨q̄, c⟩ is the mean
logit, and the envelope (Quest, arXiv:2406.10774) bounds the largest one; q̄ is the group's mean.
"""

from stream_attention.flows import (
    Add,
    CMax,
    CMean,
    CMin,
    Flow,
    GeMV,
    Maximum,
    Mean,
    Multiply,
    Sum,
    register,
    topK,
)


@register("h2o_sparse_attention")
class H2OSparseAttention(Flow):
    """Fields: c, M, m: mean and envelope of the page's keys. The bound is the larger term."""

    def __init__(self, w_avg=1.0, w_peak=1.0):
        self.group_mean = Mean(dim=1)
        self.average = GeMV()
        self.product = Multiply()
        self.larger = Maximum()
        self.over_dimensions = Sum(dim=2)
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
        q_mean = self.group_mean(q, ctx=ctx)  # [B, 1, D]
        average = self.average(q_mean, cache["c"], ctx=ctx)  # [S, 1, 1]
        upper = self.product(q_mean, cache["M"], ctx=ctx)  # [S, 1, D]
        lower = self.product(q_mean, cache["m"], ctx=ctx)  # [S, 1, D]
        peak = self.over_dimensions(self.larger(upper, lower, ctx=ctx), ctx=ctx)  # [S, 1, 1]
        self.select(self.add(average, peak, ctx=ctx), o, ctx=ctx)
