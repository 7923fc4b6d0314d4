// The packed query rows of decode: from global memory to the fragments that the products take.
#ifndef STREAM_ATTENTION_DECODE_QUERY_CUH_
#define STREAM_ATTENTION_DECODE_QUERY_CUH_

#include <type_traits>

#include "decode_share.cuh"

namespace stream_attention {

template <class T, class E, class Shape, bool kWholePages>
class DecodeQuery : protected DecodeShare<T, E, Shape, kWholePages> {
 protected:
  using Work = DecodeShare<T, E, Shape, kWholePages>;
  using Work::D, Work::N, Work::launch, Work::p, Work::lane, Work::control;

  static constexpr bool kFp8 = sizeof(E) == 1;
  using Math = std::conditional_t<kFp8, __half, T>;
  static constexpr int kQueryTurns =
      (N * D / 8 + Shape::kQueryThreads - 1) / Shape::kQueryThreads;

  using Work::Work;

  __device__ __forceinline__ const T* query_row(int request, int row) const {
    const int token = launch.group(row);
    return static_cast<const T*>(p.q) +
           (static_cast<int64_t>(request) * p.qo_len + token) * p.q_token_stride +
           static_cast<int64_t>(control.head * p.group + row - token * p.group) * p.q_head_stride;
  }

  // Rows of q in shared memory: requests take turns.
  __device__ __forceinline__ uint32_t queries(int request) const {
    return this->ring + Shape::kQueryAt + request % 2 * Shape::kQueryBytes;
  }

  // The thread's number. Where requests go by in a loop it is read anew, lest everything made of it
  // be kept from one request to the next.
  static __device__ __forceinline__ int own_number() {
    if constexpr (!Shape::kAllTogether) return threadIdx.x;
    int number;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
    return number;
  }

  __device__ __forceinline__ bool copies_query() const {
    return Shape::kQueryThreads == Shape::kThreads || threadIdx.x < Shape::kQueryThreads;
  }

  // Where the thread's i-th piece of the packed rows of q of a request lies. Rows past the last one
  // have the first one's, and are never read.
  __device__ __forceinline__ const char* query_piece(int request, int i) const {
    const int index = own_number() + i * Shape::kQueryThreads;
    const int row = index / (D / 8), piece = index % (D / 8);
    const bool live = row < control.live_rows;
    return reinterpret_cast<const char*>(
        query_row(request, control.row_start + (live ? row : 0)) + piece * 8);
  }

  // Copies that piece, which lies at `source`; zeros for rows past the last one.
  __device__ __forceinline__ void copy_piece(uint32_t target, int i, const char* source) const {
    const int index = own_number() + i * Shape::kQueryThreads;
    const int row = index / (D / 8), piece = index % (D / 8);
    if (N * D / 8 % Shape::kQueryThreads != 0 && row >= N) return;
    copy_async(target + Shape::Query::offset(row, piece), source,
               row < control.live_rows ? 16 : 0, this->policy);
  }

  // Copies the packed rows of q of a request. The copies belong to the group that is committed
  // next.
  __device__ __forceinline__ void copy_query(int request) const {
    // Not in a uniform register: ptxas 13.0 then makes illegal copies (`[R1+UR0], desc[UR1]`).
    const uint32_t target = computed_once(queries(request));
    if (!copies_query()) return;
#pragma unroll
    for (int i = 0; i < kQueryTurns; ++i) copy_piece(target, i, query_piece(request, i));
  }

  // Where a thread's pieces lie, for copies that shall be made at once.
  struct QuerySources {
    const char* pieces[kQueryTurns];
  };
  __device__ __forceinline__ QuerySources query_sources(int request) const {
    QuerySources sources;
#pragma unroll
    for (int i = 0; i < kQueryTurns; ++i) {
      sources.pieces[i] = computed_once(query_piece(request, i));
    }
    return sources;
  }

  // The same of the range's first request in a block that has come early, and the scales.
  __device__ __forceinline__ void copy_first_query(int request,
                                                   const QuerySources& sources) const {
    if constexpr (kFp8) this->copy_scales();
    const uint32_t target = computed_once(queries(request));
    if (!copies_query()) return;
#pragma unroll
    for (int i = 0; i < kQueryTurns; ++i) copy_piece(target, i, sources.pieces[i]);
  }

  // Reads the rows of q that all threads have copied, unless they stay where they are, into
  // registers as the fragments that the products take.
  __device__ __forceinline__ void take_query(int request) {
    [[maybe_unused]] const uint32_t queries = this->queries(request);
    if constexpr (kFp8) {
      // The order of d within sixteen is that in which `widen` gives K.
#pragma unroll
      for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
          load_shared(query[nb][k], queries +
                                        Shape::Query::offset(nb * 8 + lane / 4,
                                                             2 * k + lane % 4 / 2) +
                                        lane % 2 * 8);
        }
      }
      scale_query();
    } else if constexpr (!Shape::kQueryShared) {
#pragma unroll
      for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
#pragma unroll
        for (int k = 0; k < D / 16; k += 2) {
          uint32_t b[4];
          load_matrices(b, queries + Shape::Query::offset(nb * 8 + lane % 8,
                                                          min(2 * k + lane / 8, D / 8 - 1)));
          query[nb][k][0] = b[0];
          query[nb][k][1] = b[1];
          if (k + 1 < D / 16) {
            query[nb][k + 1][0] = b[2];
            query[nb][k + 1][1] = b[3];
          }
        }
      }
    }
  }

  // fp8 K meets q in fp16. A row of bf16 is divided by a power of two first, so that its largest
  // element lies in [2^14, 2^15): what is 2^-31 of that or more is exact, what is less is rounded
  // to multiples of 2^-38 of it.
  __device__ __forceinline__ void scale_query() {
#pragma unroll
    for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
      float power = 1.f;
      if constexpr (!std::is_same_v<T, __half>) power = to_halves(query[nb]);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float of_row = __shfl_sync(0xffffffffu, power, (lane % 4 * 2 + c) * 4);
        row_scale[nb][c] = launch.scale * control.key_scale * of_row;
      }
    }
  }

  // Returns the power of two that the row was divided by.
  static __device__ __forceinline__ float to_halves(uint32_t (&words)[D / 16][2]) {
    float top = 0.f;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low = __uint_as_float(words[k][i] << 16);
        const float high = __uint_as_float(words[k][i] & 0xffff0000u);
        top = fmaxf(top, fmaxf(fabsf(low), fabsf(high)));
      }
    }
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const uint32_t exponent = min(max(__float_as_uint(top) >> 23, 15u), 254u);
    const float inverse = __uint_as_float((268u - exponent) << 23);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[k][i] = Half<__half>::pack(__uint_as_float(words[k][i] << 16) * inverse,
                                         __uint_as_float(words[k][i] & 0xffff0000u) * inverse);
      }
    }
    return __uint_as_float((exponent - 14u) << 23);
  }

  uint32_t query[Shape::kRowBlocks][D / 16][2];
  float row_scale[Shape::kRowBlocks][2];
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_QUERY_CUH_
