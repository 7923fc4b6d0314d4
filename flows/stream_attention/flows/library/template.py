"""A start for a new flow: copy the file, rename, and give it to `load_flow("my_flow.py")`.

Say first what it computes, as a formula: `score = max_h ⟨q_h, c⟩`, and the paper it is from.
It is not registered, so no name is taken: take the line with `register` in.
"""

from stream_attention.flows import CMean, Flow, GeMM, Max, topK


# @register("my_flow")                        # from stream_attention.flows import register
class MyFlow(Flow):
    """Fields: c, the page's mean key."""

    def __init__(self):
        self.logits = GeMM()
        self.best_head = Max(dim=2)
        self.select = topK()
        self.page_mean = CMean(dim=1)

    def create_cache(self, page_size, head_dim):
        return {"c": (1, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        self.page_mean(cache["k"], cache["c"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        logits = self.logits(q, cache["c"], ctx=ctx)  # [S, 1, G]
        score = self.best_head(logits, ctx=ctx)  # [S, 1, 1]
        self.select(score, o, ctx=ctx)
