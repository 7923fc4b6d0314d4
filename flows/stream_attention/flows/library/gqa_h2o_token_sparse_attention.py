"""`hh ← max_h softmax_window(scale ⟨q_h, k⟩) + decay · hh`: each head's attention, the best's.

H2O (arXiv:2306.14048) for grouped queries: a step adds between 1 and G over the window.
"""

from stream_attention.flows import Add, Flow, GeMM, Load, Max, Save, Softmax, register, topK


@register("gqa_h2o_token_sparse_attention")
class GQAH2OTokenSparseAttention(Flow):
    """Fields: hh, a state, 0 in a new token. scale: `head_dim ** -0.5` by default."""

    page_sizes = (1,)

    def __init__(self, scale=None, decay=0.984375):
        self.scale = scale
        self.logits = GeMM()
        self.softmax = Softmax(dim=0, scale=scale)
        self.best_head = Max(dim=2)
        self.load, self.save = Load(), Save()
        self.add = Add(alpha=1.0, beta=decay)
        self.select = topK()

    def create_cache(self, page_size, head_dim):
        self.require_page_size(page_size)
        self.softmax.scale = head_dim**-0.5 if self.scale is None else self.scale
        return {"hh": (1, 1)}

    def forward_cache(self, cache, loc, ctx):
        """Nothing: a new page's state starts at its init."""

    def forward_indexer(self, q, o, cache, ctx):
        logits = self.logits(q, cache["k"], ctx=ctx)  # [S, 1, G]
        mass = self.best_head(self.softmax(logits, ctx=ctx), ctx=ctx)  # [S, 1, 1]
        gathered = self.add(mass, self.load(cache["hh"], ctx=ctx), ctx=ctx)
        self.save(gathered, cache["hh"], ctx=ctx)
        self.select(gathered, o, ctx=ctx)
