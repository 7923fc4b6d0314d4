// Exact decode on sm_90 for one KV head and up to N packed query rows (query tokens x group).
//
// Eight warps, one block an SM. Each warp streams its own 16- or 32-token chunks through a private
// ring in shared memory (cp.async, evict first), keeps its own online-softmax state, and waits for
// no other warp until a request ends:
//   S^T = K Q^T (tokens on M, rows on N), P by movmatrix, O^T += V^T P.
// The ring runs on across requests. At a request's end the warps' states are merged in shared
// memory; a request that several blocks share is merged by the block that arrives last.
#ifndef STREAM_ATTENTION_DECODE_KERNEL_CUH_
#define STREAM_ATTENTION_DECODE_KERNEL_CUH_

#include "decode_cursor.cuh"
#include "decode_ops.cuh"

namespace stream_attention {

constexpr int kMergeRound = 8;  // partial outputs that a thread has in flight
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Compile-time shape of one instance. D: head_dim. N: packed rows, a multiple of 8.
template <int kHeadDim, int kRows>
struct DecodeShape {
  static constexpr int D = kHeadDim;
  static constexpr int N = kRows;
  static constexpr int kRowBlocks = N / 8;
  static constexpr int kChunk = D <= 64 ? 32 : 16;         // tokens a warp takes at once
  static constexpr int kTile = kChunk * kDecodeWarps;      // tokens a block takes at once
  static constexpr int kPieces = D / 8;                    // 16-byte pieces of a row
  static constexpr int kRowsPerCopy = 32 / kPieces;        // rows that one warp-wide copy moves
  static constexpr int kCopies = kChunk / kRowsPerCopy;
  static constexpr int kChunkBytes = kChunk * D * 2;       // K or V of a chunk
  static constexpr int kStages = N <= 8 ? 3 : 2;
  static constexpr int kRingBytes = kDecodeWarps * kStages * 2 * kChunkBytes;
  static constexpr int kMergeStride = D + 4;               // floats; conflict-free for both sides
  static constexpr int kMergeFloats = kDecodeWarps * N * kMergeStride;
  static constexpr int kSharedBytes =
      kRingBytes + 4 * (kMergeFloats + 2 * kDecodeWarps * N + 2 * kDecodeWarps + 4);
  static constexpr int kPartFloats = N * (D + 2);          // of one partial state in scratch
};

// The page and the slot that one lane's token of a chunk lies in.
struct Place {
  int page;
  int slot;
  bool live;
};

template <class T, int kHeadDim, int kRows>
class DecodeBlock {
  using Shape = DecodeShape<kHeadDim, kRows>;
  static constexpr int D = Shape::D, N = Shape::N, kSubs = Shape::kChunk / 16;

 public:
  __device__ __forceinline__ DecodeBlock(const StreamAttentionDecodeParams& params, char* shared)
      : p(params),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        rows_total(params.qo_len * params.group) {
    const int row_groups = (rows_total + N - 1) / N;
    const int heads = p.num_kv_heads * row_groups;
    lead = blockIdx.x % heads;  // neighbours in the grid read the heads of one page side by side
    head = lead / row_groups;
    row_start = lead % row_groups * N;
    block = blockIdx.x / heads;
    blocks = gridDim.x / heads;
    ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) +
           warp * Shape::kStages * 2 * Shape::kChunkBytes;
    merge_out = reinterpret_cast<float*>(shared + Shape::kRingBytes);
    merge_max = merge_out + Shape::kMergeFloats;
    merge_sum = merge_max + kDecodeWarps * N;
    sums = reinterpret_cast<int64_t*>(merge_sum + kDecodeWarps * N);
    flag = reinterpret_cast<int*>(sums + kDecodeWarps);
    key = static_cast<const T*>(p.key) + head * p.k_head_stride;
    value = static_cast<const T*>(p.value) + head * p.v_head_stride;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  }

  __device__ void run() {
    const KvLens lens(p, head);
    Cursor load;
    // `found` of the search lies in the merge area, which nothing else uses yet.
    locate<Shape>(p, lens, block, blocks, sums, reinterpret_cast<int64_t*>(merge_out), load, before,
                  total);
    if (load.in_block == 0) return;
    Cursor at = load;
    load_query(at.request);
    Place places[Shape::kStages - 1];
    Cursor ahead = load;
#pragma unroll
    for (int i = 0; i < Shape::kStages - 1; ++i) {
      places[i] = place_of(ahead);
      if (ahead.in_block > 0) advance<Shape>(p, lens, ahead);
    }
    Place next = place_of(ahead);
#pragma unroll
    for (int i = 0; i < Shape::kStages - 1; ++i) copy_chunk(i, places[i], load, lens);
    start_state();
    int stage = 0;
    bool from_start = at.tile == tiles_of<Shape>(p, at.kv_len).first;
    while (at.in_block > 0) {
      wait_copies<Shape::kStages - 2>();
      __syncwarp();
      const int refill = stage == 0 ? Shape::kStages - 1 : stage - 1;
      const Place place = next;
      if (ahead.in_block > 0) advance<Shape>(p, lens, ahead);
      next = place_of(ahead);
      copy_chunk(refill, place, load, lens);
      attend(at, stage);
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
      const bool request_done = at.in_request == 1;
      if (request_done || at.in_block == 1) {
        finish(at, from_start, request_done);
        if (request_done) {
          before += tiles_of<Shape>(p, at.kv_len).count;
          from_start = true;
        }
      }
      advance<Shape>(p, lens, at);
    }
    wait_copies<0>();
  }

 private:
  // The row of q that packed row `row` is.
  __device__ __forceinline__ void load_query(int request) {
    const T* q = static_cast<const T*>(p.q);
#pragma unroll
    for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
      const int row = row_start + nb * 8 + lane / 4;
      const bool live = row < rows_total;
      const int token = live ? row / p.group : 0;
      const int member = live ? row - token * p.group : 0;
      const T* source = q + (static_cast<int64_t>(request) * p.qo_len + token) * p.q_token_stride +
                        static_cast<int64_t>(head * p.group + member) * p.q_head_stride +
                        lane % 4 * 2;
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(source + k * 16);
        query[nb][k][0] = live ? words[0] : 0;
        query[nb][k][1] = live ? words[4] : 0;
      }
    }
  }

  __device__ __forceinline__ Place place_of(const Cursor& at) const {
    const int token = at.tile * Shape::kTile + warp * Shape::kChunk + lane % Shape::kChunk;
    Place place{0, 0, at.in_block > 0 && token < at.kv_len};
    if (!place.live) return place;
    if (p.page_table == nullptr) {
      place.page = at.request;
      place.slot = token;
    } else {
      const int index = token / p.page_size;
      place.slot = token - index * p.page_size;
      place.page = __ldg(p.page_table + at.request * p.table_batch_stride +
                         head * p.table_head_stride + index);
    }
    return place;
  }

  // Copies the chunk at `load` to ring slot `slot`, and moves `load` on. Always one group.
  __device__ __forceinline__ void copy_chunk(int slot, const Place& place, Cursor& load,
                                             const KvLens& lens) {
    if (load.in_block > 0) {
      const int64_t k_offset = place.page * p.k_page_stride + place.slot * p.k_token_stride;
      const int64_t v_offset = place.page * p.v_page_stride + place.slot * p.v_token_stride;
      const uint32_t k_slot = ring + slot * 2 * Shape::kChunkBytes;
      const int piece = lane % Shape::kPieces;
      const unsigned live = __ballot_sync(0xffffffffu, place.live);
#pragma unroll
      for (int i = 0; i < Shape::kCopies; ++i) {
        const int row = i * Shape::kRowsPerCopy + lane / Shape::kPieces;
        const int64_t offset = __shfl_sync(0xffffffffu, k_offset, row);
        const int bytes = live >> row & 1 ? 16 : 0;
        const uint32_t target = k_slot + row * (2 * D) + ((piece ^ (row & 7)) << 4);
        copy_async(target, key + offset + piece * 8, bytes, policy);
      }
#pragma unroll
      for (int i = 0; i < Shape::kCopies; ++i) {
        const int row = i * Shape::kRowsPerCopy + lane / Shape::kPieces;
        const int64_t offset = __shfl_sync(0xffffffffu, v_offset, row);
        const int bytes = live >> row & 1 ? 16 : 0;
        const uint32_t target =
            k_slot + Shape::kChunkBytes + row * (2 * D) + ((piece ^ (row & 7)) << 4);
        copy_async(target, value + offset + piece * 8, bytes, policy);
      }
      advance<Shape>(p, lens, load);
    }
    commit_copies();
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
    const uint32_t k_slot = ring + stage * 2 * Shape::kChunkBytes;
    const uint32_t v_slot = k_slot + Shape::kChunkBytes;
    float s[kSubs][Shape::kRowBlocks][4];
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
#pragma unroll
      for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
#pragma unroll
        for (int c = 0; c < 4; ++c) s[sub][nb][c] = 0.f;
      }
      const int row = sub * 16 + lane % 16;
      const uint32_t base = k_slot + row * (2 * D);
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
        uint32_t a[4];
        load_matrices(a, base + (((2 * k + lane / 16) ^ (row & 7)) << 4));
#pragma unroll
        for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
          Half<T>::mma(s[sub][nb], a, query[nb][k][0], query[nb][k][1]);
        }
      }
    }
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
    for (int sub = 0; sub < kSubs; ++sub) {
      uint32_t weight[Shape::kRowBlocks][2];
#pragma unroll
      for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
        weight[nb][0] = transpose_matrix(Half<T>::pack(s[sub][nb][0], s[sub][nb][1]));
        weight[nb][1] = transpose_matrix(Half<T>::pack(s[sub][nb][2], s[sub][nb][3]));
      }
      const int row = sub * 16 + lane / 16 * 8 + lane % 8;
      const uint32_t base = v_slot + row * (2 * D);
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        uint32_t a[4];
        load_matrices_transposed(a, base + (((2 * i + lane / 8 % 2) ^ (row & 7)) << 4));
#pragma unroll
        for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
          Half<T>::mma(acc[nb][i], a, weight[nb][0], weight[nb][1]);
        }
      }
    }
  }

  __device__ __forceinline__ void scale_and_mask(const Cursor& at, int chunk_begin,
                                                 float (&s)[kSubs][Shape::kRowBlocks][4]) const {
    const float scale = p.soft_cap > 0.f ? p.sm_scale / p.soft_cap : p.sm_scale * kLog2E;
    const bool capped = p.soft_cap > 0.f;
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
          const int position = oldest + min(row, rows_total - 1) / p.group;
          if (p.causal) last = min(last, position + 1);
          if (p.window_left >= 0) {
            first = static_cast<int>(max(int64_t{0}, int64_t{position} - p.window_left));
          }
        }
#pragma unroll
        for (int sub = 0; sub < kSubs; ++sub) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float x = s[sub][nb][c + 2 * half] * scale;
            if (capped) x = tanhf(x) * (p.soft_cap * kLog2E);
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

  // Merges the warps' states of the request that ends here (or of the block's part of it) and
  // writes the answer, or a partial state and, as the last block of the request, the answer.
  __device__ void finish(const Cursor& at, bool from_start, bool to_end) {
    __syncthreads();  // the last merge has been read
#pragma unroll
    for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = nb * 8 + lane % 4 * 2 + c;
        const float sum = sum_over_tokens(row_sum[nb][c]);
        float* target = merge_out + (warp * N + row) * Shape::kMergeStride + lane / 4;
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
          target[i * 16] = acc[nb][i][c];
          target[i * 16 + 8] = acc[nb][i][c + 2];
        }
        if (lane < 4) {
          merge_max[warp * N + row] = row_max[nb][c];
          merge_sum[warp * N + row] = sum;
        }
      }
    }
    if (at.in_block > 1) load_query(at.request + 1);  // its latency hides behind the merge
    start_state();
    __syncthreads();
    const RequestTiles tiles = tiles_of<Shape>(p, at.kv_len);
    const EqualCuts cuts(total, blocks);
    const int first_block = from_start ? block : cuts.owner(before);
    const int last_block = to_end ? block : cuts.owner(before + tiles.count - 1);
    const int parts = last_block - first_block + 1;
    constexpr int kVectors = N * D / 4;
    for (int v = threadIdx.x; v < kVectors; v += kDecodeThreads) {
      const int row = v / (D / 4), column = v % (D / 4) * 4;
      float top = -INFINITY;
#pragma unroll
      for (int w = 0; w < kDecodeWarps; ++w) top = fmaxf(top, merge_max[w * N + row]);
      const float base = top == -INFINITY ? 0.f : top;
      float sum = 0.f;
      float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int w = 0; w < kDecodeWarps; ++w) {
        const float weight = exp2_fast(merge_max[w * N + row] - base);
        const float4 part = *reinterpret_cast<const float4*>(
            merge_out + (w * N + row) * Shape::kMergeStride + column);
        sum += weight * merge_sum[w * N + row];
        out.x += weight * part.x;
        out.y += weight * part.y;
        out.z += weight * part.z;
        out.w += weight * part.w;
      }
      if (parts == 1) {
        write_row(at.request, row, column, top, sum, out);
      } else {
        float* part = part_of(block, from_start);
        __stcg(reinterpret_cast<float4*>(part + row * D + column), out);
        if (column == 0) {
          __stcg(reinterpret_cast<float2*>(part + N * D + 2 * row), make_float2(top, sum));
        }
      }
    }
    if (parts > 1) merge_parts(at.request, first_block, parts);
  }

  // A block holds at most two partial states: one of the request that it begins in the middle of,
  // one of the request that it does not end.
  __device__ __forceinline__ float* part_of(int of_block, bool from_start) const {
    const int64_t slot = 2 * (static_cast<int64_t>(lead) * blocks + of_block) + from_start;
    return p.scratch + slot * Shape::kPartFloats;
  }

  __device__ void merge_parts(int request, int first_block, int parts) {
    const int heads = p.num_kv_heads * ((rows_total + N - 1) / N);
    int32_t* counter = p.counters + static_cast<int64_t>(request) * heads + lead;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      const int arrived = atomicAdd(counter, 1);
      *flag = arrived == parts - 1;
      if (arrived == parts - 1) *counter = 0;
    }
    __syncthreads();
    if (!*flag) return;
    __threadfence();
    // A warp a row: maximum, weights and sum of the parts' states. Then every thread adds up its
    // vector with known weights, many loads in flight.
    float* weights = merge_out;              // [N][parts]
    float2* states = reinterpret_cast<float2*>(merge_max);  // [N], the merged (max, sum)
    for (int row = warp; row < N; row += kDecodeWarps) {
      float top = -INFINITY;
      for (int j = lane; j < parts; j += 32) top = fmaxf(top, state_of(first_block, j, row).x);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
      }
      const float base = top == -INFINITY ? 0.f : top;
      float sum = 0.f;
      for (int j = lane; j < parts; j += 32) {
        const float2 state = state_of(first_block, j, row);
        const float weight = exp2_fast(state.x - base);
        weights[row * parts + j] = weight;
        sum += weight * state.y;
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (lane == 0) states[row] = make_float2(top, sum);
    }
    __syncthreads();
    constexpr int kVectors = N * D / 4;
    for (int v = threadIdx.x; v < kVectors; v += kDecodeThreads) {
      const int row = v / (D / 4), column = v % (D / 4) * 4;
      const float* first = part_of(first_block, true) + row * D + column;
      const float* rest = part_of(first_block, false) + row * D + column;
      const float* weight = weights + row * parts;
      float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
      add_part(out, weight[0], __ldcg(reinterpret_cast<const float4*>(first)));
      constexpr int64_t kStep = 2 * Shape::kPartFloats;
      int j = 1;
      for (; j + kMergeRound <= parts; j += kMergeRound) {
        float4 x[kMergeRound];
#pragma unroll
        for (int i = 0; i < kMergeRound; ++i) {
          x[i] = __ldcg(reinterpret_cast<const float4*>(rest + (j + i) * kStep));
        }
#pragma unroll
        for (int i = 0; i < kMergeRound; ++i) add_part(out, weight[j + i], x[i]);
      }
      for (; j < parts; j += kMergeRound) {  // the rest in one round: a repeated part weighs 0
        float4 x[kMergeRound];
#pragma unroll
        for (int i = 0; i < kMergeRound; ++i) {
          x[i] = __ldcg(reinterpret_cast<const float4*>(rest + min(j + i, parts - 1) * kStep));
        }
#pragma unroll
        for (int i = 0; i < kMergeRound; ++i) {
          if (j + i < parts) add_part(out, weight[j + i], x[i]);
        }
      }
      write_row(request, row, column, states[row].x, states[row].y, out);
    }
  }

  __device__ __forceinline__ float2 state_of(int first_block, int j, int row) const {
    const float* part = part_of(first_block + j, j == 0);
    return __ldcg(reinterpret_cast<const float2*>(part + N * D + 2 * row));
  }

  static __device__ __forceinline__ void add_part(float4& out, float weight, const float4& x) {
    out.x += weight * x.x;
    out.y += weight * x.y;
    out.z += weight * x.z;
    out.w += weight * x.w;
  }

  // Four elements of one row's answer; the thread of column 0 writes the lse.
  __device__ __forceinline__ void write_row(int request, int row, int column, float top, float sum,
                                            float4 out) const {
    const int packed = row_start + row;
    if (packed >= rows_total) return;
    const int token = packed / p.group;
    const int q_head = head * p.group + packed - token * p.group;
    const int64_t place = static_cast<int64_t>(request) * p.qo_len + token;
    const bool empty = sum == 0.f;
    if (p.attn_sink != nullptr && !empty) {
      const float sink = __ldg(p.attn_sink + q_head) * kLog2E;
      const float with_sink = fmaxf(top, sink);
      const float weight = exp2_fast(top - with_sink);
      sum = sum * weight + exp2_fast(sink - with_sink);
      out.x *= weight;
      out.y *= weight;
      out.z *= weight;
      out.w *= weight;
      top = with_sink;
    }
    const float inverse = empty ? 0.f : 1.f / sum;
    uint2 words;
    words.x = empty ? 0u : Half<T>::pack(out.x * inverse, out.y * inverse);
    words.y = empty ? 0u : Half<T>::pack(out.z * inverse, out.w * inverse);
    T* target = static_cast<T*>(p.out) + place * p.out_token_stride +
                static_cast<int64_t>(q_head) * p.out_head_stride + column;
    *reinterpret_cast<uint2*>(target) = words;
    if (p.lse != nullptr && column == 0) {
      p.lse[place * p.lse_token_stride + q_head * p.lse_head_stride] =
          empty ? -INFINITY : (top + log2f(sum)) * kLn2;
    }
  }

  const StreamAttentionDecodeParams& p;
  const int lane, warp, rows_total;
  int lead, head, row_start, block, blocks;
  uint32_t ring;
  float* merge_out;
  float* merge_max;
  float* merge_sum;
  int64_t* sums;
  int* flag;
  const T* key;
  const T* value;
  uint64_t policy;
  int64_t before, total;
  uint32_t query[Shape::kRowBlocks][D / 16][2];
  float acc[Shape::kRowBlocks][D / 16][4];
  float row_max[Shape::kRowBlocks][2];
  float row_sum[Shape::kRowBlocks][2];
};

template <class T, int kHeadDim, int kRows>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    decode_kernel(const __grid_constant__ StreamAttentionDecodeParams p) {
  extern __shared__ __align__(128) char shared[];
  DecodeBlock<T, kHeadDim, kRows> work(p, shared);
  work.run();
}

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_KERNEL_CUH_
