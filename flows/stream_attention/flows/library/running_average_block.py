"""`r ← ½ r + ⟨q̄, c⟩`: block sparse attention with a memory of earlier steps; select on r.

Pages that queries kept asking for stay, as H2O's heavy hitters do (arXiv:2306.14048), by raw mean
logits in place of probabilities.
"""

from stream_attention.flows import Add, CMean, Flow, GeMV, Load, Mean, Save, register, topK


@register("running_average_block")
class RunningAverageBlock(Flow):
    """Fields: c, the page's mean key; r, a state. decay: what a step leaves of the last one."""

    def __init__(self, decay=0.5):
        self.group_mean = Mean(dim=1)
        self.score = GeMV()
        self.load, self.save = Load(), Save()
        self.add = Add(alpha=1.0, beta=decay)
        self.select = topK()
        self.page_mean = CMean(dim=1)

    def create_cache(self, page_size, head_dim):
        return {"c": (1, head_dim), "r": (1, 1)}

    def forward_cache(self, cache, loc, ctx):
        self.page_mean(cache["k"], cache["c"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        score = self.score(self.group_mean(q, ctx=ctx), cache["c"], ctx=ctx)  # [S, 1, 1]
        running = self.add(score, self.load(cache["r"], ctx=ctx), ctx=ctx)
        self.save(running, cache["r"], ctx=ctx)
        self.select(running, o, ctx=ctx)
