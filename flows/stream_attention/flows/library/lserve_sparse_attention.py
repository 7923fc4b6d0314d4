"""`max_h max_b Σ_d max(q_hd M_bd, q_hd m_bd)`: Quest's bound for every 16 tokens of a page.

LServe (arXiv:2502.14866), hierarchical paging: large pages are selected by their logical sub-pages,
whose envelopes are tighter. With q = q⁺ + q⁻, split by sign, the bound is the sum of two products,
`q⁺ Mᵀ + q⁻ mᵀ`, because M >= m.
"""

from stream_attention.flows import Add, CMax, CMin, Flow, GeMM, Max, Relu, register, topK


@register("lserve_sparse_attention")
class LServeSparseAttention(Flow):
    """Fields: M and m: [sub-blocks, D], their envelopes. sub_block: tokens of a full one."""

    def __init__(self, sub_block=16):
        self.sub_block = sub_block
        self.positive = Relu()
        self.negative = Add(alpha=1.0, beta=-1.0)
        self.product = GeMM()
        self.add = Add()
        self.best_block, self.best_head = Max(dim=1), Max(dim=2)
        self.select = topK()
        self.block_max, self.block_min = CMax(dim=1, block=sub_block), CMin(dim=1, block=sub_block)

    def create_cache(self, page_size, head_dim):
        num_blocks = -(-page_size // self.sub_block)
        return {"M": (num_blocks, head_dim), "m": (num_blocks, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        self.block_max(cache["k"], cache["M"], loc=loc, ctx=ctx)
        self.block_min(cache["k"], cache["m"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        positive = self.positive(q, ctx=ctx)  # [B, G, D]
        negative = self.negative(q, positive, ctx=ctx)  # [B, G, D]
        upper = self.product(positive, cache["M"], ctx=ctx)  # [S, blocks, G]
        lower = self.product(negative, cache["m"], ctx=ctx)  # [S, blocks, G]
        bound = self.add(upper, lower, ctx=ctx)
        score = self.best_head(self.best_block(bound, ctx=ctx), ctx=ctx)  # [S, 1, 1]
        self.select(score, o, ctx=ctx)
