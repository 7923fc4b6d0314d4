"""`⟨q̄, c⟩`: the mean query against the mean key of each page.

The score is the page's mean logit of the mean query, q̄ the mean over the group. Pages ranked by
pooled keys: InfLLM (arXiv:2402.04617) and MInference's block-sparse pattern (arXiv:2407.02490).
"""

from stream_attention.flows import CMean, Flow, GeMV, Mean, register, topK


@register("block_sparse_attention")
class BlockSparseAttention(Flow):
    """Fields: c, the page's mean key."""

    def __init__(self):
        self.group_mean = Mean(dim=1)
        self.score = GeMV()
        self.select = topK()
        self.page_mean = CMean(dim=1)

    def create_cache(self, page_size, head_dim):
        return {"c": (1, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        self.page_mean(cache["k"], cache["c"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        q_mean = self.group_mean(q, ctx=ctx)  # [B, 1, D]
        score = self.score(q_mean, cache["c"], ctx=ctx)  # [S, 1, 1]
        self.select(score, o, ctx=ctx)
