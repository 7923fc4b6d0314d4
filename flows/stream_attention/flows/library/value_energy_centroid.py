"""`⟨q̄, c⟩ · mean‖v‖`: the mean logit, weighed by how long the page's values are.

What a page adds to the output grows with its attention and with its values' norms; pruning by both
is VATP's criterion (arXiv:2406.12335), here for pages.
"""

from stream_attention.flows import CL2Norm, CMean, Flow, GeMV, Mean, Multiply, register, topK


@register("value_energy_centroid")
class ValueEnergyCentroid(Flow):
    """Fields: c, the page's mean key; e, its values' mean Euclidean norm."""

    def __init__(self):
        self.group_mean = Mean(dim=1)
        self.relevance = GeMV()
        self.weigh = Multiply()
        self.select = topK()
        self.page_mean = CMean(dim=1)
        self.norm, self.mean_norm = CL2Norm(dim=2), CMean(dim=1)

    def create_cache(self, page_size, head_dim):
        return {"c": (1, head_dim), "e": (1, 1)}

    def forward_cache(self, cache, loc, ctx):
        self.page_mean(cache["k"], cache["c"], loc=loc, ctx=ctx)
        norms = self.norm(cache["v"], loc=loc, ctx=ctx)  # [page_size, 1]
        self.mean_norm(norms, cache["e"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        relevance = self.relevance(self.group_mean(q, ctx=ctx), cache["c"], ctx=ctx)  # [S, 1, 1]
        score = self.weigh(relevance, cache["e"], ctx=ctx)
        self.select(score, o, ctx=ctx)
