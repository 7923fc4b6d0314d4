"""`hh ← softmax_window(scale ⟨q̄, k⟩) + decay · hh`: attention mass of each token; select on hh.

H2O (arXiv:2306.14048): heavy hitters are the tokens that gathered the most attention. What is
gathered is probability, at most 1 a step, and with `decay` below 1 the sum stays below
1 / (1 − decay).
"""

from stream_attention.flows import Add, Flow, GeMV, Load, Mean, Save, Softmax, register, topK


@register("h2o_token_sparse_attention")
class H2OTokenSparseAttention(Flow):
    """Fields: hh, a state, 0 in a new token. scale: `head_dim ** -0.5` by default."""

    page_sizes = (1,)

    def __init__(self, scale=None, decay=0.984375):
        self.scale = scale
        self.group_mean = Mean(dim=1)
        self.logits = GeMV()
        self.softmax = Softmax(dim=0, scale=scale)
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
        logits = self.logits(self.group_mean(q, ctx=ctx), cache["k"], ctx=ctx)  # [S, 1, 1]
        mass = self.softmax(logits, ctx=ctx)
        gathered = self.add(mass, self.load(cache["hh"], ctx=ctx), ctx=ctx)
        self.save(gathered, cache["hh"], ctx=ctx)
        self.select(gathered, o, ctx=ctx)
