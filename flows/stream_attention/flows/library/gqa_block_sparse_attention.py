"""`max_h softmax_pages(scale ⟨q_h, c⟩)`: each head's attention to mean keys, the best head's.

The softmax runs over the window, so that heads of different temperature compare. Pooled keys as in
InfLLM (arXiv:2402.04617) and MInference (arXiv:2407.02490).
"""

from stream_attention.flows import CMean, Flow, GeMM, Max, Softmax, register, topK


@register("gqa_block_sparse_attention")
class GQABlockSparseAttention(Flow):
    """Fields: c, the page's mean key. scale: of the softmax; `head_dim ** -0.5` by default."""

    def __init__(self, scale=None):
        self.scale = scale
        self.logits = GeMM()
        self.softmax = Softmax(dim=0, scale=scale)
        self.best_head = Max(dim=2)
        self.select = topK()
        self.page_mean = CMean(dim=1)

    def create_cache(self, page_size, head_dim):
        self.softmax.scale = head_dim**-0.5 if self.scale is None else self.scale
        return {"c": (1, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        self.page_mean(cache["k"], cache["c"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        logits = self.logits(q, cache["c"], ctx=ctx)  # [S, 1, G]
        weights = self.softmax(logits, ctx=ctx)  # [S, 1, G]
        score = self.best_head(weights, ctx=ctx)  # [S, 1, 1]
        self.select(score, o, ctx=ctx)
