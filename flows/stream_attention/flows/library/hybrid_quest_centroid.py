"""`α max_h ⟨q_h, c⟩ + (1 − α) max_h Σ_d max(q_hd M_d, q_hd m_d)`: mean logit and its bound.

The envelope is Quest's (arXiv:2406.10774), the mean key that of pooled-key selection (InfLLM,
arXiv:2402.04617).
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


@register("hybrid_quest_centroid")
class HybridQuestCentroid(Flow):
    """Fields: c, M and m: mean and envelope. alpha: the mean's share, 0 to 1."""

    def __init__(self, alpha=0.5):
        self.logits = GeMM()
        self.product = Multiply()
        self.larger = Maximum()
        self.over_dimensions = Sum(dim=2)
        self.best_of_columns, self.best_of_rows = Max(dim=2), Max(dim=1)
        self.mix = Add(alpha=alpha, beta=1.0 - alpha)
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
        self.select(self.mix(average, peak, ctx=ctx), o, ctx=ctx)
