// Products of a warpgroup (wgmma): operands in shared memory, in rows of 128 bytes.
#ifndef STREAM_ATTENTION_DECODE_WGMMA_CUH_
#define STREAM_ATTENTION_DECODE_WGMMA_CUH_

#include "decode_ops.cuh"

namespace stream_attention {

// kRows rows of 16-byte pieces as the tensor cores read them: blocks of 128 bytes of each row, one
// block below the other, and in each of them pieces permuted by the row's number modulo 8. The
// first row begins at a multiple of 1024.
template <int kRows>
struct SwizzledRows {
  static constexpr int kLine = 128;
  static constexpr int kBlockBytes = kRows * kLine;

  static __host__ __device__ constexpr uint32_t offset(int row, int piece) {
    return piece / 8 * kBlockBytes + row * kLine + ((piece % 8 ^ row % 8) << 4);
  }

  // The address `rows` rows below, where the two row numbers have no bit in common below 8.
  static __device__ __forceinline__ uint32_t below(uint32_t address, int rows) {
    return (address ^ (rows % 8 << 4)) + rows * kLine;
  }
};

// An operand in such rows: the low half of its descriptor, the same in all lanes. The high half
// says how rows are permuted and that eight of them take 1024 bytes; the distance of blocks is not
// asked for, for no operand is wider than one.
struct Operand {
  static constexpr uint32_t kHigh = 1u << 30 | 1024 >> 4;
  uint32_t low;

  // From a uniform register the descriptors of the steps that follow cost one operation each.
  static __device__ __forceinline__ Operand at(uint32_t address) {
    return Operand{__shfl_sync(0xffffffffu, (address & 0x3ffff) >> 4 | 1u << 16, 0)};
  }
  __device__ __forceinline__ Operand after(uint32_t bytes) const {
    return Operand{low + (bytes >> 4)};
  }
};

// What the threads have written or copied into shared memory will be seen by the tensor cores that
// are asked behind the next barrier.
__device__ __forceinline__ void show_to_tensor_cores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Products are asked for between the two, and are in `c` behind the wait. The compiler takes the
// three to use `c`, so that no access to it moves among the products.
template <int kBlocks>
__device__ __forceinline__ void keep_in_place(float (&c)[kBlocks][4]) {
#pragma unroll
  for (int nb = 0; nb < kBlocks; ++nb) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(c[nb][i])::"memory");
  }
}
template <int kBlocks>
__device__ __forceinline__ void begin_products(float (&c)[kBlocks][4]) {
  keep_in_place(c);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kBlocks>
__device__ __forceinline__ void wait_for_products(float (&c)[kBlocks][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  keep_in_place(c);
}

// c (+)= A B^T of 64 x 8 kBlocks x 16, of which a warp has 16 rows, by eights of columns. A lies in
// rows of its sixteen, or, kTransposed, in sixteen rows; B in rows of its sixteen.
template <class T, bool kTransposed>
struct GroupProduct;

#define STREAM_ATTENTION_PAIR(block) \
  "+f"(c[block][0]), "+f"(c[block][1]), "+f"(c[block][2]), "+f"(c[block][3])
#define STREAM_ATTENTION_GROUP_PRODUCT(TYPE, NAME, TRANSPOSED)                                     \
  template <>                                                                                      \
  struct GroupProduct<TYPE, TRANSPOSED> {                                                          \
    static __device__ __forceinline__ void multiply(float (&c)[2][4], Operand a, Operand b,        \
                                                    int accumulate) {                              \
      asm volatile("{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %10, 0;\n"                      \
                   "mov.b64 a, {%8, %12}; mov.b64 b, {%9, %12};\n"                                 \
                   "wgmma.mma_async.sync.aligned.m64n16k16.f32." NAME "." NAME                     \
                   " {%0,%1,%2,%3,%4,%5,%6,%7}, a, b, p, 1, 1, %11, 0; }"                          \
                   : STREAM_ATTENTION_PAIR(0), STREAM_ATTENTION_PAIR(1)                            \
                   : "r"(a.low), "r"(b.low), "r"(accumulate), "n"(TRANSPOSED),                     \
                     "n"(Operand::kHigh));                                                         \
    }                                                                                              \
    static __device__ __forceinline__ void multiply(float (&c)[4][4], Operand a, Operand b,        \
                                                    int accumulate) {                              \
      asm volatile(                                                                                \
          "{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %18, 0;\n"                               \
          "mov.b64 a, {%16, %20}; mov.b64 b, {%17, %20};\n"                                        \
          "wgmma.mma_async.sync.aligned.m64n32k16.f32." NAME "." NAME                              \
          " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, a, b, p, 1, 1, %19, 0; }"     \
          : STREAM_ATTENTION_PAIR(0), STREAM_ATTENTION_PAIR(1), STREAM_ATTENTION_PAIR(2),          \
            STREAM_ATTENTION_PAIR(3)                                                               \
          : "r"(a.low), "r"(b.low), "r"(accumulate), "n"(TRANSPOSED), "n"(Operand::kHigh));        \
    }                                                                                              \
  };
STREAM_ATTENTION_GROUP_PRODUCT(__nv_bfloat16, "bf16", 0)
STREAM_ATTENTION_GROUP_PRODUCT(__nv_bfloat16, "bf16", 1)
STREAM_ATTENTION_GROUP_PRODUCT(__half, "f16", 0)
STREAM_ATTENTION_GROUP_PRODUCT(__half, "f16", 1)
#undef STREAM_ATTENTION_GROUP_PRODUCT
#undef STREAM_ATTENTION_PAIR

// Four 8 x 8 matrices of 16-bit elements, transposed, to the rows that the lanes have addresses of.
__device__ __forceinline__ void store_matrices_transposed(uint32_t address,
                                                          const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               :
               : "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_WGMMA_CUH_
