"""A flow with every op of the cache side, to run writers of summaries on."""

from stream_attention.flows import (
    CAbs,
    CAdd,
    CExp,
    CGeMM,
    CL2Norm,
    CLog,
    CMax,
    CMaximum,
    CMean,
    CMin,
    CMinimum,
    CMultiply,
    CRelu,
    CReshape,
    CSigmoid,
    CSilu,
    CSum,
    CTranspose,
    Fill,
    Flow,
    GeMV,
    Max,
    Mean,
    topK,
)


class EveryOp(Flow):
    """Each op of the cache side, in fields of its own, on axes with and without padded lanes."""

    def __init__(self):
        self.select, self.fill = topK(), Fill(2.5)
        self.two = {"add": CAdd(0.5, -2.0), "multiply": CMultiply()}
        self.two |= {"maximum": CMaximum(), "minimum": CMinimum()}
        self.one = {
            "relu": CRelu(0.25, -1.0),
            "sigmoid": CSigmoid(0.5, -1.5),
            "silu": CSilu(),
            "abs": CAbs(0.5, 2.0),
            "exp": CExp(0.1, 0.5),
        }
        self.log = CLog(1.0, 0.25)
        self.reductions = {"mean": CMean, "max": CMax, "min": CMin, "sum": CSum, "l2norm": CL2Norm}
        self.gemm, self.transpose = CGeMM(), CTranspose()

    def create_cache(self, page_size, head_dim):
        self.reshape = CReshape(head_dim // 8, 8)
        self.head_dim = int(head_dim)
        self.widen = CReshape(6, head_dim // 2)
        blocks = {3: -(-page_size // 3), 4: -(-page_size // 4)}
        fields = {f"{name}_rows": (1, head_dim) for name in (*self.two, *self.one, "log")}
        for name in self.reductions:
            fields |= {f"{name}_tokens": (1, head_dim), f"{name}_dims": (page_size, 1)}
            fields |= {f"{name}_block{b}": (n, head_dim) for b, n in blocks.items()}
        fields |= {"gram": (page_size, page_size), "moment": (head_dim, head_dim)}
        fields |= {"wide": (6, head_dim // 2), "weights": (page_size, 1), "row": (1, page_size)}
        return {**fields, "cut": (head_dim // 8, 8), "constant": (3, 5), "again": (1, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        at = {"loc": loc, "ctx": ctx}
        k, v, total = cache["k"], cache["v"], CSum(dim=1)
        for name, op in self.two.items():
            total(op(k, v, **at), cache[f"{name}_rows"], **at)
        for name, op in self.one.items():
            total(op(k, **at), cache[f"{name}_rows"], **at)
        total(self.log(self.two["multiply"](k, k, **at), **at), cache["log_rows"], **at)
        shifted = CAdd(1.0, 1.0)(k, CExp()(v, **at), **at)  # no padded lane of it is 0
        for name, op in self.reductions.items():
            op(dim=1)(shifted, cache[f"{name}_tokens"], **at)
            op(dim=2)(shifted, cache[f"{name}_dims"], **at)
            for block in (3, 4):
                op(dim=1, block=block)(shifted, cache[f"{name}_block{block}"], **at)
        self.gemm(shifted, k, cache["gram"], **at)
        turned = self.transpose(shifted, **at)
        self.gemm(turned, self.transpose(v, **at), cache["moment"], **at)
        third = CMax(dim=1, block=-(-self.head_dim // 3))(cache["moment"], **at)  # [3, D]
        self.widen(third, cache["wide"], **at)
        mean = CMean(dim=1)(k, **at)
        self.gemm(mean, shifted, cache["weights"], **at)
        self.gemm(shifted, mean, cache["row"], **at)
        self.reshape(mean, cache["cut"], **at)
        self.fill(cache["constant"], **at)
        total(cache["mean_block3"], cache["again"], **at)

    def forward_indexer(self, q, o, cache, ctx):
        logits = GeMV()(Mean(dim=1)(q, ctx=ctx), cache["k"], ctx=ctx)
        self.select(Max(dim=1)(logits, ctx=ctx), o, ctx=ctx)
