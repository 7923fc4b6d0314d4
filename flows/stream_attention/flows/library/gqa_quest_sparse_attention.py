"""`max_h Σ_d max(q_hd M_d, q_hd m_d)`: what no key of the page can exceed, for the best head.

Quest (arXiv:2406.10774). M and m are the page's largest and smallest key in each dimension; both
are needed, for `q_d M_d` bounds `q_d k_d` from above only where `q_d >= 0`.
"""

from stream_attention.flows import CMax, CMin, Flow, Max, Maximum, Multiply, Sum, register, topK


@register("gqa_quest_sparse_attention")
class GQAQuestSparseAttention(Flow):
    """Fields: M and m, the envelope of the page's keys."""

    def __init__(self):
        self.product = Multiply()
        self.larger = Maximum()
        self.over_dimensions = Sum(dim=2)
        self.best_head = Max(dim=1)
        self.select = topK()
        self.page_max, self.page_min = CMax(dim=1), CMin(dim=1)

    def create_cache(self, page_size, head_dim):
        return {"M": (1, head_dim), "m": (1, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        self.page_max(cache["k"], cache["M"], loc=loc, ctx=ctx)
        self.page_min(cache["k"], cache["m"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        upper = self.product(q, cache["M"], ctx=ctx)  # [S, G, D]
        lower = self.product(q, cache["m"], ctx=ctx)  # [S, G, D]
        bound = self.over_dimensions(self.larger(upper, lower, ctx=ctx), ctx=ctx)  # [S, G, 1]
        score = self.best_head(bound, ctx=ctx)  # [S, 1, 1]
        self.select(score, o, ctx=ctx)
