// Exact decode of few packed rows, of any head_dim and dtype.
//
// One block an SM, and beside it, where rows are few, one of the next launch. Each warp streams its
// own 16- or 32-token chunks through a private ring in shared memory (cp.async, evict first), keeps
// its own online-softmax state, and waits for no other warp until a request ends:
//   S^T = K Q^T (tokens on M, rows on N), P by movmatrix, O^T += V^T P.
// The ring runs on across requests. At a request's end the warps' states are merged in shared
// memory; states of requests that other blocks share are handed out, and merged when the block's
// range has been read. Batch-invariant requests have such an end every span of tiles.
#ifndef STREAM_ATTENTION_DECODE_BLOCK_CUH_
#define STREAM_ATTENTION_DECODE_BLOCK_CUH_

#include "decode_merge.cuh"

namespace stream_attention {

template <class T, class E, class Shape, bool kWholePages>
class DecodeBlock : DecodeMerge<T, E, Shape, kWholePages> {
  using Work = DecodeMerge<T, E, Shape, kWholePages>;
  using Work::D, Work::N, Work::kAhead, Work::kSubs;
  using Work::launch, Work::p, Work::lane, Work::warp, Work::control;

  using typename Work::Math;
  using Work::kFp8, Work::query, Work::row_scale;
  using Work::acc, Work::memory, Work::row_max, Work::row_sum;
  static constexpr bool kInvariant = Shape::kInvariant;
  static constexpr bool kTurnShared = kInvariant || (Shape::kScarce && !kWholePages);
  // Chains of sums in the scores, so that few rows' products need not wait for one another; of fp8
  // not where registers are too few for it.
  static constexpr int kChains =
      Shape::kRowBlocks == 1 && !(kFp8 && (kInvariant || !kWholePages)) ? 2 : 1;

 public:
  __device__ __forceinline__ DecodeBlock(const DecodeLaunch& launched, char* shared)
      : Work(launched, shared) {}

  __device__ __forceinline__ void run() {
    Cursor at{}, ahead{};  // a search that finds no tile sets no more than that
    if (kInvariant && lane == 0) turn().merges = 0;
    this->begin(at, ahead);
    if (at.in_block == 0) return;
    if constexpr (!kWholePages) {
      if (ahead.in_block > 0) this->next_tile(this->lens(), ahead);
      this->begin_lookup(ahead);
    }
    wait_copies<Shape::kSlots>();  // for the rows of q
    __syncthreads();
    this->take_query(at.request);
    start_state(at);
    if (threadIdx.x == 0) {
      control.first_request = at.request;
      this->begin_request(at, this->range);
    }
    if (warp == 0) {
      if constexpr (kInvariant) {
        this->note_items();
      } else {
        this->prefetch_region();
      }
    }
    int slot = 0;
    // Whether the slot before this one is not filled again yet: other warps may be reading it.
    bool held = false;
    while (true) {
      if (at.in_block == control.release_at) DependentMemory::release_consumer();
      const int value_slot = slot + 1 < Shape::kSlots ? slot + 1 : 0;
      attend(at, slot, value_slot, held);
      if (held && threadIdx.x == 0 && (!kInvariant || begins_request(at))) {
        // A request that ends inside the range and that others began is merged later.
        if (control.current.parts > 1) control.owed = control.current;
        control.range.before += control.request_tiles;
        this->begin_request(at, control.range);
      }
      if constexpr (kInvariant) {
        if (held && warp == 0 && begins_request(at)) this->note_items();
      }
      this->place = this->look_up(ahead);
      held = ends_span(at);
      if (held || at.in_block == 1) {
        finish(at, value_slot);
        if (at.in_block == 1) break;
        this->next_tile(at);
        start_state(at);
        if ((!kInvariant || begins_request(at)) && at.in_block > at.in_request) {
          this->copy_query(at.request + 1);
        }
      } else {
        this->template copy<kKey>(value_slot, this->place);
        this->next_tile(at);
      }
      slot += slot + 2 < Shape::kSlots ? 2 : 2 - Shape::kSlots;
    }
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const typename Work::Sharing merged = i == 0 ? control.owed : control.current;
      if (merged.parts > 1) this->merge_slice(merged);
    }
  }

 private:
  __device__ __forceinline__ bool begins_request(const Cursor& at) const {
    return at.tile == tiles_of<Shape>(p, at.kv_len).first;
  }

  // Whether the states of all warps are merged behind this tile, whatever the block's range.
  __device__ __forceinline__ bool ends_span(const Cursor& at) const {
    return at.in_request == (kInvariant ? turn().last : 1);
  }

  // Batch-invariant: where the warp is among spans. Elsewhere but what it sees.
  __device__ __forceinline__ Turn& turn() const {
    static_assert(!kTurnShared || Shape::kTurnBytes == Shape::kWarps * sizeof(Turn));
    return reinterpret_cast<Turn*>(memory + Shape::kTurnsAt)[warp];
  }

  __device__ __forceinline__ Seen& seen() {
    if constexpr (kTurnShared) return turn().seen;
    return own_seen;
  }
  __device__ __forceinline__ const Seen& seen() const {
    return const_cast<DecodeBlock*>(this)->seen();
  }

  // The state of the request at hand, or of a span of it: nothing seen.
  __device__ __forceinline__ void start_state(const Cursor& at) {
    const int oldest = at.kv_len - p.qo_len;  // position of the request's first query
    seen().to = p.causal ? min(oldest + 1, at.kv_len) : at.kv_len;
    seen().from = p.window_left < 0 ? 0 : max(0, at.kv_len - 1 - p.window_left);
    if (launch.cap > 0.f) seen().to = 0;
    if constexpr (kInvariant) {
      const int tiles = span_tiles(tiles_of<Shape>(p, at.kv_len).count);
      turn().last = max(at.in_request - tiles, 0) + 1;
    }
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

  // Folds the chunk whose K lies in ring slot `slot`, and V in `value_slot`, into the warp's state.
  // Fills the first with V of `place`, and before it, if it was held back, the one ahead of it with
  // K of `place`; `value_slot` is the caller's to fill.
  __device__ __forceinline__ void attend(const Cursor& at, int slot, int value_slot, bool held) {
    const int begin = this->chunk_begin(at);
    const bool any = begin < at.kv_len;
    float s[kSubs][Shape::kRowBlocks][4];
    if (held) {
      wait_copies<Shape::kSlots - 2>();
    } else {
      wait_copies<Shape::kSlots - 1>();
    }
    __syncwarp();
    if (any) {
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) multiply_keys(at.request, slot, sub, s[sub]);
    }
    __syncwarp();  // all lanes have read K
    if (held) {
      const int before_last =
          kInvariant ? turn().merges - 1 : at.request - 1 - control.first_request;
      wait_for_phase(this->merged(), before_last % 2);
      this->template copy<kKey>(slot > 0 ? slot - 1 : Shape::kSlots - 1, this->place);
    }
    this->template copy<kValue>(slot, this->place);
    if (any) {
      scale_and_mask(at, begin, s);
      weigh(s);
    }
    wait_copies<Shape::kSlots - 1>();
    __syncwarp();
    if (any) {
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) add_values(value_slot, sub, s[sub]);
    }
    __syncwarp();  // all lanes have read V
  }

  // Turns scores into weights, and scales the state where a row's maximum grows.
  __device__ __forceinline__ void weigh(float (&s)[kSubs][Shape::kRowBlocks][4]) {
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
  }

  // S^T of sixteen tokens. Few rows have two chains of sums, so that a product need not wait for
  // the one before it.
  __device__ __forceinline__ void multiply_keys(int request, int slot, int sub,
                                                float (&s)[Shape::kRowBlocks][4]) const {
    float odd[Shape::kRowBlocks][4];
#pragma unroll
    for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[nb][c] = odd[nb][c] = 0.f;
    }
    const uint32_t base =
        Shape::Tokens::below(this->read_key_at, sub * 16) + slot * Shape::kSlotBytes;
    const uint32_t queries_at = Shape::kQueryShared ? this->queries(request) : 0;
    const auto multiply = [&](const uint32_t(&a)[4], int k) {
      multiply_rows(queries_at, a, k, kChains > 1 && k % 2 != 0 ? odd : s);
    };
#pragma unroll
    for (int piece = 0; piece < Shape::kPieces; piece += 2) {
      uint32_t a[4];
      const uint32_t at = Shape::Tokens::after(base, piece);
      if (piece + 1 < Shape::kPieces) {
        load_matrices(a, at);
      } else {  // nor is there another piece to be read
        load_two_matrices(a[0], a[1], at);
      }
      if constexpr (kFp8) {
        // A lane's four bytes are consecutive d: the order within sixteen is q's as well.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (piece + half >= Shape::kPieces) break;
          uint32_t keys[4];
          widen(a[half * 2], keys[0], keys[2]);
          widen(a[half * 2 + 1], keys[1], keys[3]);
          multiply(keys, piece + half);
        }
      } else {
        multiply(a, piece / 2);
      }
    }
    if constexpr (kChains > 1) {
#pragma unroll
      for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
#pragma unroll
        for (int c = 0; c < 4; ++c) s[nb][c] += odd[nb][c];
      }
    }
  }

  // Adds sixteen tokens' products of the k-th sixteen of d.
  __device__ __forceinline__ void multiply_rows(uint32_t queries_at, const uint32_t (&a)[4], int k,
                                                float (&s)[Shape::kRowBlocks][4]) const {
    if constexpr (Shape::kQueryShared) {
#pragma unroll
      for (int nb = 0; nb < Shape::kRowBlocks; nb += 2) {
        uint32_t b[4];
        load_matrices(b, queries_at + Shape::Query::offset(nb * 8 + lane / 16 * 8 + lane % 8,
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
  __device__ __forceinline__ void add_values(int slot, int sub,
                                             const float (&weights)[Shape::kRowBlocks][4]) {
    uint32_t b[Shape::kRowBlocks][2];
#pragma unroll
    for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
      b[nb][0] = transpose_matrix(Half<Math>::pack(weights[nb][0], weights[nb][1]));
      b[nb][1] = transpose_matrix(Half<Math>::pack(weights[nb][2], weights[nb][3]));
    }
    const uint32_t base =
        Shape::Tokens::below(this->read_value_at, sub * 16) + slot * Shape::kSlotBytes;
#pragma unroll
    for (int piece = 0; piece < Shape::kPieces; piece += 2) {
      uint32_t a[4];
      if (piece + 1 < Shape::kPieces) {
        load_matrices_transposed(a, Shape::Tokens::after(base, piece));
      } else {  // of sixteen tokens, as K is read
        const uint32_t tokens =
            Shape::Tokens::below(this->read_key_at, sub * 16) + slot * Shape::kSlotBytes;
        load_two_matrices_transposed(a[0], a[2], Shape::Tokens::after(tokens, piece));
      }
      if constexpr (kFp8) {
        // A transposed pair of bytes is two d of one token: even d are the upper rows of the
        // product, odd ones the lower.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (piece + half >= Shape::kPieces) break;
          uint32_t values[4];
          widen(__byte_perm(a[half], 0, 0x3120), values[0], values[1]);
          widen(__byte_perm(a[half + 2], 0, 0x3120), values[2], values[3]);
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

  __device__ __forceinline__ void scale_and_mask(const Cursor& at, int begin,
                                                 float (&s)[kSubs][Shape::kRowBlocks][4]) const {
    const Seen all = seen();
    const bool plain = begin >= all.from && begin + Shape::kChunk <= all.to;
#pragma unroll
    for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) {
#pragma unroll
        for (int c = 0; c < 4; ++c) s[sub][nb][c] *= kFp8 ? row_scale[nb][c % 2] : launch.scale;
      }
    }
    if (!plain) cap_and_mask(at, begin, s);
  }

  __device__ __forceinline__ void cap_and_mask(const Cursor& at, int begin,
                                               float (&s)[kSubs][Shape::kRowBlocks][4]) const {
    const int oldest = at.kv_len - p.qo_len;
#pragma unroll
    for (int nb = 0; nb < Shape::kRowBlocks; ++nb) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = control.row_start + nb * 8 + lane % 4 * 2 + c;
        const int position = oldest + launch.group(min(row, launch.rows_total - 1));
        const int last = p.causal ? min(at.kv_len, position + 1) : at.kv_len;
        const int first =
            p.window_left < 0
                ? 0
                : static_cast<int>(max(int64_t{0}, int64_t{position} - p.window_left));
#pragma unroll
        for (int sub = 0; sub < kSubs; ++sub) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& x = s[sub][nb][c + 2 * half];
            if (launch.cap > 0.f) x = hyperbolic_tangent(x) * launch.cap;
            const int token = begin + sub * 16 + half * 8 + lane / 4;
            if (token < first || token >= last) x = -INFINITY;
          }
        }
      }
    }
  }

  // The end of a request, of a span of it or of the range.
  __device__ __forceinline__ void finish(const Cursor& at, int value_slot) {
    const bool more = at.in_block > 1;
    // The next rows of q were asked for when the request began: in so few tiles they may not have
    // been waited for.
    if (more && at.tile - tiles_of<Shape>(p, at.kv_len).first < kAhead) wait_copies<0>();
    if constexpr (kInvariant) {
      this->merge_warps(
          value_slot, !more, [](int) { return 0; },
          [&](int, int vector, const State& state) {
            this->give(control.current, at.in_request, vector, state);
          });
    } else {
      this->merge_warps(
          value_slot, !more,
          [&](int vector) { return this->target_of(control.current, vector); },
          [&](const Region& target, int vector, const State& state) {
            if (control.current.parts == 1) {
              this->write(this->answer_at(control.current.request, vector), state);
            } else {
              target.publish(0, state);
            }
          });
    }
    if (more) {
      arrive(this->merged());
      if (kInvariant && lane == 0) ++turn().merges;
      // Visible since the barriers of the merge.
      this->take_query(kInvariant && at.in_request > 1 ? at.request : at.request + 1);
    }
  }

  Seen own_seen;  // unless it lies in shared memory
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_BLOCK_CUH_
