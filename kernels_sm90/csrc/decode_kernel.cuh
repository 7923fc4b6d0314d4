// Exact decode on sm_90 for one KV head and up to N packed query rows (query tokens x group).
//
// One block an SM. Each warp streams its own 16- or 32-token chunks through a private ring in
// shared memory (cp.async, evict first), keeps its own online-softmax state, and waits for no other
// warp until a request ends:
//   S^T = K Q^T (tokens on M, rows on N), P by movmatrix, O^T += V^T P.
// The ring runs on across requests. At a request's end the warps' states are merged in shared
// memory; states of requests that other blocks share are handed out, and merged when the block's
// range has been read.
#ifndef STREAM_ATTENTION_DECODE_KERNEL_CUH_
#define STREAM_ATTENTION_DECODE_KERNEL_CUH_

#include <type_traits>

#include "decode_work.cuh"
#include "stream_attention/global_memory.cuh"

namespace stream_attention {

template <class T, class E, int kHeadDim, int kRows, bool kWholePages>
class DecodeBlock : DecodeWork<T, E, DecodeShape<kHeadDim, kRows, sizeof(E)>, kWholePages> {
  using Shape = DecodeShape<kHeadDim, kRows, sizeof(E)>;
  using Work = DecodeWork<T, E, Shape, kWholePages>;
  using typename Work::ChunkPlace;
  using Work::D, Work::N, Work::kVectorsPerRow, Work::kAhead, Work::kSubs;
  using Work::launch, Work::p, Work::lane, Work::warp, Work::row_start, Work::live_rows;
  using Work::block, Work::head, Work::range;

  static constexpr bool kFp8 = sizeof(E) == 1;
  using Math = std::conditional_t<kFp8, __half, T>;
  static constexpr int kQueryTurns = (N * D / 8 + Shape::kThreads - 1) / Shape::kThreads;

 public:
  __device__ __forceinline__ DecodeBlock(const DecodeLaunch& launched, char* shared)
      : Work(launched, shared) {
    queries = this->ring + Shape::kRingBytes;
    merge_out = reinterpret_cast<float*>(shared + Shape::kRingBytes + Shape::kQueryBytes);
    merge_max = merge_out + Shape::kMergeFloats;
    merge_sum = merge_max + Shape::kWarps * 8;
  }

  __device__ __forceinline__ void run() {
    DependentMemory::wait_for_producer();
    DependentMemory::release_consumer();
    const KvLens lens(p, head);
    Cursor at;
    // What the search shares lies in the merge area, which nothing else uses yet.
    locate<Shape>(launch, lens, block, reinterpret_cast<int*>(merge_out), at, range);
    if (at.in_block == 0) return;
    load_query(at.request);  // ahead of the tokens, behind which it would queue
    Cursor ahead = at;
    ChunkPlace places[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      places[i] = this->place_of(ahead);
      if (ahead.in_block > 0) advance<Shape>(p, lens, ahead);
    }
    ChunkPlace next = this->place_of(ahead);
    // Copies before the loop: whatever loads are on their way at its entry would be waited for.
#pragma unroll
    for (int i = 0; i < kAhead; ++i) this->copy_chunk(i, places[i]);
    keep_query();
    if (Shape::kQueryShared) __syncthreads();
    prepare_query();
    start_state();
    bool from_start = at.tile == tiles_of<Shape>(p, at.kv_len).first;
    Shared shared = this->sharers(at, from_start), owed{0, 0, 0};
    int stage = 0, refill = kAhead;
    while (true) {
      wait_copies<kAhead - 1>();
      __syncwarp();
      const ChunkPlace place = next;
      if (ahead.in_block > 0) advance<Shape>(p, lens, ahead);
      next = this->place_of(ahead);
      this->copy_chunk(refill, place);
      refill = refill + 1 == Shape::kStages ? 0 : refill + 1;
      attend(at, stage);
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
      if (at.in_request == 1 || at.in_block == 1) {
        finish(shared, at);
        if (at.in_block == 1) break;
        // A request that ends inside the range and that others began is merged later.
        if (shared.parts > 1) owed = shared;
        prepare_query();
        start_state();
        range.before += tiles_of<Shape>(p, at.kv_len).count;
        advance<Shape>(p, lens, at);
        shared = this->sharers(at, true);
      } else {
        advance<Shape>(p, lens, at);
      }
    }
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      if (owed.parts > 1) this->merge_slice(owed);
      owed = shared;
    }
  }

 private:
  __device__ __forceinline__ const T* query_row(int request, int row) const {
    const int token = launch.group(row);
    return static_cast<const T*>(p.q) +
           (static_cast<int64_t>(request) * p.qo_len + token) * p.q_token_stride +
           static_cast<int64_t>(head * p.group + row - token * p.group) * p.q_head_stride;
  }

  // Reads the packed rows of q: as the fragments that the products take, or, where they go to
  // shared memory, sixteen bytes a thread and turn. Rows past the last one are zero.
  __device__ __forceinline__ void load_query(int request) {
    if constexpr (Shape::kQueryShared) {
#pragma unroll
      for (int i = 0; i < kQueryTurns; ++i) {
        const int index = threadIdx.x + i * Shape::kThreads;
        const int row = index / (D / 8);
        staged[i] = make_uint4(0, 0, 0, 0);
        if (row < live_rows) {
          staged[i] = *reinterpret_cast<const uint4*>(query_row(request, row_start + row) +
                                                      index % (D / 8) * 8);
        }
      }
    } else {
#pragma unroll
      for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
        const int row = nb * 8 + lane / 4;
        const bool live = row < live_rows;
        const T* source = query_row(request, row_start + (live ? row : 0));
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
          if constexpr (kFp8) {
            // The order of d within sixteen is that in which `widen` gives K.
            const uint2 words = *reinterpret_cast<const uint2*>(source + k * 16 + lane % 4 * 4);
            query[nb][k][0] = live ? words.x : 0;
            query[nb][k][1] = live ? words.y : 0;
          } else {
            const T* first = source + k * 16 + lane % 4 * 2;
            query[nb][k][0] = live ? *reinterpret_cast<const uint32_t*>(first) : 0;
            query[nb][k][1] = live ? *reinterpret_cast<const uint32_t*>(first + 8) : 0;
          }
        }
      }
    }
  }

  // Rows in shared memory: all warps are done with the last ones, and see these after a barrier.
  __device__ __forceinline__ void keep_query() const {
    if constexpr (Shape::kQueryShared) {
#pragma unroll
      for (int i = 0; i < kQueryTurns; ++i) {
        const int index = threadIdx.x + i * Shape::kThreads;
        const int row = index / (D / 8), piece = index % (D / 8);
        if (N * D / 8 % Shape::kThreads != 0 && row >= N) break;
        store_shared(queries + Shape::Query::offset(row, piece), staged[i]);
      }
    }
  }

  // fp8 K meets q in fp16. A row of bf16 is divided by a power of two first, so that its largest
  // element lies in [2^14, 2^15): what is 2^-31 of that or more is exact, what is less is rounded
  // to multiples of 2^-38 of it.
  __device__ __forceinline__ void prepare_query() {
    if constexpr (kFp8) {
      const float key_scale =
          p.key_scale == nullptr ? 1.f : __ldg(p.key_scale + head * p.key_scale_stride);
#pragma unroll
      for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
        float power = 1.f;
        if constexpr (!std::is_same_v<T, __half>) power = to_halves(query[nb]);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float of_row = __shfl_sync(0xffffffffu, power, (lane % 4 * 2 + c) * 4);
          row_scale[nb][c] = launch.scale * key_scale * of_row;
        }
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

  __device__ __forceinline__ void start_state() {
#pragma unroll
    for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        row_max[nb][c] = -INFINITY;
        row_sum[nb][c] = 0.f;
      }
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[nb][i][c] = 0.f;
      }
    }
  }

  // Folds the chunk in ring slot `stage` into the warp's state.
  __device__ __forceinline__ void attend(const Cursor& at, int stage) {
    const int chunk_begin = at.tile * Shape::kTile + warp * Shape::kChunk;
    if (chunk_begin >= at.kv_len) return;
    const uint32_t k_slot = this->chunk_of(warp, stage);
    const uint32_t v_slot = k_slot + Shape::kChunkBytes;
    float s[kSubs][Shape::kRowBlocks][4];
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) multiply_keys(k_slot, sub, s[sub]);
    scale_and_mask(at, chunk_begin, s);
#pragma unroll
    for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
      float base[2];
      float alpha[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float top = fmaxf(s[0][nb][c], s[0][nb][c + 2]);
#pragma unroll
        for (int sub = 1; sub < kSubs; ++sub) {
          top = fmaxf(top, fmaxf(s[sub][nb][c], s[sub][nb][c + 2]));
        }
        top = fmaxf(row_max[nb][c], max_over_tokens(top));
        base[c] = top == -INFINITY ? 0.f : top;
        alpha[c] = exp2_fast(row_max[nb][c] - base[c]);
        row_max[nb][c] = top;
        row_sum[nb][c] *= alpha[c];
      }
      if (!__all_sync(0xffffffffu, alpha[0] == 1.f && alpha[1] == 1.f)) {
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
#pragma unroll
          for (int c = 0; c < 4; ++c) acc[nb][i][c] *= alpha[c % 2];
        }
      }
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          s[sub][nb][c] = exp2_fast(s[sub][nb][c] - base[c % 2]);
          row_sum[nb][c % 2] += s[sub][nb][c];
        }
      }
    }
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) add_values(v_slot, sub, s[sub]);
  }

  // S^T of sixteen tokens.
  __device__ __forceinline__ void multiply_keys(uint32_t k_slot, int sub,
                                                float (&s)[Shape::kRowBlocks][4]) const {
#pragma unroll
    for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[nb][c] = 0.f;
    }
    const uint32_t base = k_slot + Shape::Tokens::offset(sub * 16 + lane % 16, lane / 16);
#pragma unroll
    for (int piece = 0; piece < Shape::kPieces; piece += 2) {
      uint32_t a[4];
      load_matrices(a, Shape::Tokens::after(base, piece));
      if constexpr (kFp8) {
        // A lane's four bytes are consecutive d: the order within sixteen is q's as well.
        const uint32_t first[4] = {widen(a[0]), widen(a[1]), widen(a[0] >> 16), widen(a[1] >> 16)};
        multiply_rows(first, piece, s);
        if (piece + 1 < Shape::kPieces) {
          const uint32_t second[4] = {widen(a[2]), widen(a[3]), widen(a[2] >> 16),
                                      widen(a[3] >> 16)};
          multiply_rows(second, piece + 1, s);
        }
      } else {
        multiply_rows(a, piece / 2, s);
      }
    }
  }

  // Adds sixteen tokens' products of the k-th sixteen of d.
  __device__ __forceinline__ void multiply_rows(const uint32_t (&a)[4], int k,
                                                float (&s)[Shape::kRowBlocks][4]) const {
    if constexpr (Shape::kQueryShared) {
#pragma unroll
      for (int nb = 0; nb < Shape::kRowBlocks; nb += 2) {
        uint32_t b[4];
        load_matrices(b, queries + Shape::Query::offset(nb * 8 + lane / 16 * 8 + lane % 8,
                                                        2 * k + lane / 8 % 2));
        Half<Math>::mma(s[nb], a, b[0], b[1]);
        Half<Math>::mma(s[nb + 1], a, b[2], b[3]);
      }
    } else {
#pragma unroll
      for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
        Half<Math>::mma(s[nb], a, query[nb][k][0], query[nb][k][1]);
      }
    }
  }

  // O^T of sixteen tokens with weights P.
  __device__ __forceinline__ void add_values(uint32_t v_slot, int sub,
                                             const float (&weights)[Shape::kRowBlocks][4]) {
    uint32_t b[Shape::kRowBlocks][2];
#pragma unroll
    for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
      b[nb][0] = transpose_matrix(Half<Math>::pack(weights[nb][0], weights[nb][1]));
      b[nb][1] = transpose_matrix(Half<Math>::pack(weights[nb][2], weights[nb][3]));
    }
    const uint32_t base =
        v_slot + Shape::Tokens::offset(sub * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int piece = 0; piece < Shape::kPieces; piece += 2) {
      uint32_t a[4];
      load_matrices_transposed(a, Shape::Tokens::after(base, piece));
      if constexpr (kFp8) {
        // A transposed pair of bytes is two d of one token: even d are the upper rows of the
        // product, odd ones the lower.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (piece + half >= Shape::kPieces) break;
          const uint32_t values[4] = {widen(__byte_perm(a[half], 0, 0x20)),
                                      widen(__byte_perm(a[half], 0, 0x31)),
                                      widen(__byte_perm(a[half + 2], 0, 0x20)),
                                      widen(__byte_perm(a[half + 2], 0, 0x31))};
          add_rows(values, piece + half, b);
        }
      } else {
        add_rows(a, piece / 2, b);
      }
    }
  }

  __device__ __forceinline__ void add_rows(const uint32_t (&a)[4], int i,
                                           const uint32_t (&b)[Shape::kRowBlocks][2]) {
#pragma unroll
    for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
      Half<Math>::mma(acc[nb][i], a, b[nb][0], b[nb][1]);
    }
  }

  __device__ __forceinline__ void scale_and_mask(const Cursor& at, int chunk_begin,
                                                 float (&s)[kSubs][Shape::kRowBlocks][4]) const {
    const int oldest = at.kv_len - p.qo_len;  // position of the request's first query
    const int seen_by_all = p.causal ? min(oldest + 1, at.kv_len) : at.kv_len;
    const int64_t seen_by_last = int64_t{at.kv_len} - 1 - p.window_left;
    const bool whole = chunk_begin + Shape::kChunk <= seen_by_all &&
                       (p.window_left < 0 || chunk_begin >= seen_by_last);
#pragma unroll
    for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        int first = 0, last = at.kv_len;
        if (!whole) {
          const int row = row_start + nb * 8 + lane % 4 * 2 + c;
          const int position = oldest + launch.group(min(row, launch.rows_total - 1));
          if (p.causal) last = min(last, position + 1);
          if (p.window_left >= 0) {
            first = static_cast<int>(max(int64_t{0}, int64_t{position} - p.window_left));
          }
        }
#pragma unroll
        for (int sub = 0; sub < kSubs; ++sub) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float x = s[sub][nb][c + 2 * half] * (kFp8 ? row_scale[nb][c] : launch.scale);
            if (launch.cap > 0.f) x = hyperbolic_tangent(x) * launch.cap;
            if (!whole) {
              const int token = chunk_begin + sub * 16 + half * 8 + lane / 4;
              if (token < first || token >= last) x = -INFINITY;
            }
            s[sub][nb][c + 2 * half] = x;
          }
        }
      }
    }
  }

  // Merges the warps' states, eight rows at a time, and gives each vector to `use`.
  template <class Use>
  __device__ __forceinline__ void merge_warps(Use&& use) {
#pragma unroll
    for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
      if (nb * 8 >= live_rows) break;
      __syncthreads();
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = lane % 4 * 2 + c;
        const float sum = sum_over_tokens(row_sum[nb][c]);
        if (nb * 8 + row < live_rows) {
          float* target = merge_out + (warp * 8 + row) * Shape::kMergeStride;
#pragma unroll
          for (int i = 0; i < D / 16; ++i) {
            target[i * 16 + (kFp8 ? lane / 4 * 2 : lane / 4)] = acc[nb][i][c];
            target[i * 16 + (kFp8 ? lane / 4 * 2 + 1 : lane / 4 + 8)] = acc[nb][i][c + 2];
          }
          if (lane < 4) {
            merge_max[warp * 8 + row] = row_max[nb][c];
            merge_sum[warp * 8 + row] = sum;
          }
        }
      }
      __syncthreads();
      const int vectors = min(8, live_rows - nb * 8) * kVectorsPerRow;
      for (int v = threadIdx.x; v < vectors; v += Shape::kThreads) {
        const int row = v / kVectorsPerRow, column = v % kVectorsPerRow * 4;
        State state = empty_state();
#pragma unroll
        for (int w = 0; w < Shape::kWarps; ++w) {
          state.top = fmaxf(state.top, merge_max[w * 8 + row]);
        }
#pragma unroll
        for (int w = 0; w < Shape::kWarps; ++w) {
          const float weight = weight_in(merge_max[w * 8 + row], state.top);
          const float4 part = *reinterpret_cast<const float4*>(
              merge_out + (w * 8 + row) * Shape::kMergeStride + column);
          state.sum += weight * merge_sum[w * 8 + row];
          state.out.x += weight * part.x;
          state.out.y += weight * part.y;
          state.out.z += weight * part.z;
          state.out.w += weight * part.w;
        }
        use(nb * 8 * kVectorsPerRow + v, state);
      }
    }
  }

  // The end of a request or of the range.
  __device__ __forceinline__ void finish(const Shared& shared, const Cursor& at) {
    const int log2_size = slice_log2(live_rows * kVectorsPerRow, shared.parts);
    // The next request's rows of q: their latency hides behind the merge.
    const bool more = at.in_block > 1;
    if (more) load_query(at.request + 1);
    if (Shape::kQueryShared && more) {
      __syncthreads();  // no warp reads the old rows
      keep_query();
    }
    merge_warps([&](int vector, const State& state) {
      this->give(shared, log2_size, vector, state);
    });
  }

  float* merge_out;
  float* merge_max;
  float* merge_sum;
  uint32_t queries;  // in shared memory
  uint4 staged[kQueryTurns];
  uint32_t query[Shape::kRowBlocks][D / 16][2];
  float row_scale[Shape::kRowBlocks][2];
  float acc[Shape::kRowBlocks][D / 16][4];
  float row_max[Shape::kRowBlocks][2];
  float row_sum[Shape::kRowBlocks][2];
};

template <class T, class E, int kHeadDim, int kRows, bool kWholePages>
__global__ void __launch_bounds__(DecodeShape<kHeadDim, kRows, sizeof(E)>::kThreads, 1)
    decode_kernel(const __grid_constant__ DecodeLaunch launch) {
  extern __shared__ __align__(1024) char shared[];
  DecodeBlock<T, E, kHeadDim, kRows, kWholePages> work(launch, shared);
  work.run();
}

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_KERNEL_CUH_
