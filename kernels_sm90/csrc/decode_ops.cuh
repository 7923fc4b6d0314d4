// The instructions that decode is made of: tensor-core products of 16-bit operands, matrix loads
// and transposes in shared memory, asynchronous copies, reductions over the tokens of a tile.
#ifndef STREAM_ATTENTION_DECODE_OPS_CUH_
#define STREAM_ATTENTION_DECODE_OPS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "stream_attention/online_state.h"

namespace stream_attention {

template <class T>
struct Half;

template <>
struct Half<__nv_bfloat16> {
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
};

template <>
struct Half<__half> {
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
};

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// Two of them, at the addresses that lanes 0 to 15 have.
__device__ __forceinline__ void load_two_matrices(uint32_t& r0, uint32_t& r1, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r0), "=r"(r1)
               : "r"(address));
}

__device__ __forceinline__ void load_two_matrices_transposed(uint32_t& r0, uint32_t& r1,
                                                             uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r0), "=r"(r1)
               : "r"(address));
}

__device__ __forceinline__ uint32_t transpose_matrix(uint32_t word) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
}

__device__ __forceinline__ void load_shared(uint32_t (&words)[2], uint32_t address) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_shared(float2& pair, uint32_t address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(pair.x), "=f"(pair.y)
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_shared(float4& four, uint32_t address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" : : "r"(address), "f"(x) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" : : "r"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ int load_shared(uint32_t address) {
  int word;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// Four e4m3 values as two pairs of halves; exact.
__device__ __forceinline__ void widen(uint32_t four, uint32_t& low, uint32_t& high) {
  asm("{\n"
      ".reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(four));
}

// 16 bytes to shared memory, or 16 zero bytes when `bytes` is 0 (then nothing is read). L2 takes
// the whole line: the rest of it is the next head's row, or this one's next token.
__device__ __forceinline__ void copy_async(uint32_t target, const void* source, int bytes,
                                           uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
               :
               : "r"(target), "l"(source), "r"(bytes), "l"(policy)
               : "memory");
}

// 4 bytes to shared memory.
__device__ __forceinline__ void copy_word_async(uint32_t target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

__device__ __forceinline__ void prefetch_to_l2(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" : : "l"(line));
}

__device__ __forceinline__ void prefetch_to_keep(const void* line) {
  asm volatile("prefetch.global.L2::evict_last [%0];" : : "l"(line));
}

// A barrier in shared memory at which threads arrive without waiting. Phases alternate in parity.
__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" : : "r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }"
               :
               : "r"(barrier)
               : "memory");
}

// The thread arrives when all copies that it has asked for so far are made.
__device__ __forceinline__ void arrive_when_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" : : "r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_for_phase(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}"
      :
      : "r"(barrier), "r"(parity)
      : "memory");
}

// A numbered barrier of some warps, `threads` in all.
__device__ __forceinline__ void sync_warps(int number, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" : : "r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ bool any_of_warps(int number, int threads, bool said) {
  int any;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.b32 p, %3, 0; barrier.cta.red.or.aligned.pred q, %1, %2, p;\n"
      "selp.b32 %0, 1, 0, q; }"
      : "=r"(any)
      : "r"(number), "r"(threads), "r"(static_cast<int>(said))
      : "memory");
  return any != 0;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// To 3e-7.
__device__ __forceinline__ float hyperbolic_tangent(float x) {
  const float square = x * x;
  const float series = x * (1.f + square * (-1.f / 3.f + square * (2.f / 15.f)));
  const float large = 1.f - __fdividef(2.f, 1.f + exp2_fast(2.f * kLog2E * x));
  return square < 0.005f ? series : large;
}

// The value itself, in a way that keeps ptxas from computing it again where it is used: in a loop
// that is short of registers it would, from the special registers on.
__device__ __forceinline__ uint32_t computed_once(uint32_t x) {
  return __shfl_sync(0xffffffffu, x, threadIdx.x % 32);
}

__device__ __forceinline__ const char* computed_once(const char* pointer) {
  const uint64_t x = reinterpret_cast<uint64_t>(pointer);
  const uint64_t low = computed_once(static_cast<uint32_t>(x));
  return reinterpret_cast<const char*>(
      low | uint64_t{computed_once(static_cast<uint32_t>(x >> 32))} << 32);
}

// The same of the address of shared memory.
__device__ __forceinline__ char* kept_in_register(char* shared) {
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("mov.u32 %0, %0;" : "+r"(address));
  return static_cast<char*>(__cvta_shared_to_generic(address));
}

// The eight lanes that share rows of a transposed product hold its tokens.
__device__ __forceinline__ float max_over_tokens(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4));
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 8));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 16));
}

__device__ __forceinline__ float sum_over_tokens(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 4);
  x += __shfl_xor_sync(0xffffffffu, x, 8);
  return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_OPS_CUH_
