// Exact decode on sm_90 for one KV head and up to N packed query rows (query tokens x group).
//
// One block an SM, and beside it, where rows are few, one of the next launch. Each warp streams its
// own 16- or 32-token chunks through a private ring in shared memory (cp.async, evict first), keeps
// its own online-softmax state, and waits for no other warp until a request ends:
//   S^T = K Q^T (tokens on M, rows on N), P by movmatrix, O^T += V^T P.
// The ring runs on across requests. At a request's end the warps' states are merged in shared
// memory; states of requests that other blocks share are handed out, and merged when the block's
// range has been read. Batch-invariant requests have such an end every span of tiles.
#ifndef STREAM_ATTENTION_DECODE_KERNEL_CUH_
#define STREAM_ATTENTION_DECODE_KERNEL_CUH_

#include "decode_merge.cuh"
#include "stream_attention/global_memory.cuh"

namespace stream_attention {

template <class T, class E, class Shape, bool kWholePages>
class DecodeBlock : DecodeMerge<T, E, Shape, kWholePages> {
  using Work = DecodeMerge<T, E, Shape, kWholePages>;
  using typename Work::ChunkPlace;
  using Work::D, Work::N, Work::kVectorsPerRow, Work::kAhead, Work::kSubs;
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
    begin(at, ahead);
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
      begin_request(at, range);
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
        begin_request(at, control.range);
      }
      if constexpr (kInvariant) {
        if (held && warp == 0 && begins_request(at)) this->note_items();
      }
      place = this->look_up(ahead);
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
        this->template copy<kKey>(value_slot, place);
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

  // Notes how the request at hand is shared, for the threads to read behind the next barrier.
  __device__ __forceinline__ void begin_request(const Cursor& at, const Range& range) const {
    const RequestTiles tiles = tiles_of<Shape>(p, at.kv_len);
    control.range = range;
    control.request_tiles = tiles.count;
    control.current = this->sharers(at, at.tile == tiles.first, range);
  }

  // Finds the block's range, reads its first rows of q and fills the ring. While the producer still
  // runs, the range and the first pages are read as hints, and addresses made of them. When it has
  // ended, copies begin at once with what the hints say, and what they say is read again: if it is
  // no longer true, all begins anew. A block that fills its SM does not come before its producer
  // has ended, and needs no hints.
  __device__ __forceinline__ void begin(Cursor& at, Cursor& ahead) {
    auto& search = this->search();
    constexpr bool kHints = Shape::kHints;
    // Of whole pages the ids of the tiles that follow go ahead of the tokens as well.
    constexpr int kSteps = kWholePages ? kAhead + 1 : kAhead;
    const Lens lens = this->lens();
    const int block = control.block;
    const bool in_warps = p.batch <= 32, in_threads = p.batch <= Shape::kThreads;
    const int own = p.batch == 1 ? 0 : in_warps ? lane : threadIdx.x;
    const bool has_own = own < p.batch && in_threads;
    ChunkPlace places[kAhead + 1];
    int own_read = 0;
    bool same = false;
    if (kHints && in_threads) {
      const int own_hint = has_own ? lens.template read<true>(own) : 0;
      const int own_len = has_own ? lens.bounded(own_hint) : 0;
      locate(launch, own_len, block, search, at, range);
      const KnownLens known{p.batch, own_len, search.lens};
      typename Work::Hint hints[kAhead + 1];
      ahead = at;
#pragma unroll
      for (int i = 0; i <= kAhead; ++i) {
        hints[i] = this->hint_of(ahead);
        places[i] = hints[i].place;
        if (i < kSteps && ahead.in_block > 0) this->next_tile(known, ahead);
      }
      const int32_t* next_ids = nullptr;
      if constexpr (kWholePages) {
        this->start_ids();
        if (ahead.in_block > 0) next_ids = this->ids_from(ahead.request, ahead.tile, ahead.kv_len);
      }
      const char* const own_query = computed_once(this->query_piece(at.request, 0));
      const auto first_keys = this->first_keys(places[0]);
      // Of a single tile the prefetch comes too late to help, and only delays what follows.
      if (at.in_block > 1) this->prefetch_keys(places[0]);
      DependentMemory::wait_for_producer();
      if (at.in_block > 0) this->copy_first_query(at.request, own_query);
      if (has_own) own_read = lens.template read<false>(own);
      int ids[kAhead + 1][kSubs];
#pragma unroll
      for (int i = 0; i <= kAhead; ++i) this->read_again(hints[i], ids[i]);
      if constexpr (kWholePages) this->copy_ids(next_ids, this->own_ids());
      if (at.in_block > at.in_request) this->copy_query(at.request + 1);
      commit_copies();
      // All warps' small reads go ahead of the tokens, behind which they would queue.
      __syncthreads();
      this->copy_first_keys(places[0], first_keys);
      this->copy_first(places, 1);
      release_at_point(at);
      same = own_hint == own_read;
#pragma unroll
      for (int i = 0; i <= kAhead; ++i) {
        same = same && hints[i].exists;
#pragma unroll
        for (int sub = 0; sub < kSubs; ++sub) same = same && ids[i][sub] == places[i].page[sub];
      }
      same = in_warps ? __all_sync(0xffffffffu, same) : __syncthreads_and(same);
      if (!same) wait_copies<0>();
    } else {
      DependentMemory::wait_for_producer();
      if (has_own) own_read = lens.template read<false>(own);
    }
    if (!same) {
      if (in_threads) {
        locate(launch, has_own ? lens.bounded(own_read) : 0, block, search, at, range);
      } else {
        locate_in_turns(launch, lens, block, search, at, range);
      }
      if (!kHints || !in_threads) release_at_point(at);
      if (at.in_block == 0) return;
      if constexpr (kFp8) this->copy_scales();
      this->copy_query(at.request);
      if (at.in_block > at.in_request) this->copy_query(at.request + 1);
      ahead = at;
#pragma unroll
      for (int i = 0; i <= kAhead; ++i) {
        places[i] = this->place_of(ahead);
        if (i < kSteps && ahead.in_block > 0) this->next_tile(lens, ahead);
      }
      if constexpr (kWholePages) this->begin_lookup(ahead);
      commit_copies();
      this->copy_first(places, 0);
    }
    // For the warps' walk along the range, behind the next barrier.
    if (in_warps && warp == 0 && has_own) search.lens[own] = lens.bounded(own_read);
    place = places[kAhead];
  }

  // Lets the next launch's blocks come, now or, by a note to all threads, at a later tile.
  __device__ __forceinline__ void release_at_point(const Cursor& at) const {
    const int release_at = release_point(at.in_block);
    if (at.in_block <= release_at) DependentMemory::release_consumer();
    if (threadIdx.x == 0) control.release_at = release_at;
  }

  // How many tiles a block has left when it lets the next launch's blocks come: halfway. They must
  // find a block of this launch on every SM, else two of them share one and the launch takes up to
  // a sixth longer; and what they ask for should not come ahead of most of this launch's tokens. It
  // is a matter of speed alone: of a wrong hint, or of more requests than hints are read for, they
  // may come at once or when the block ends.
  static __device__ __forceinline__ int release_point(int tiles) { return max(tiles / 2, 2); }

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
      this->template copy<kKey>(slot > 0 ? slot - 1 : Shape::kSlots - 1, place);
    }
    this->template copy<kValue>(slot, place);
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

  Range range;      // as it was found
  Seen own_seen;    // unless it lies in shared memory
  ChunkPlace place;
};

template <class T, class E, int kHeadDim, int kRows, bool kWholePages, bool kInvariant>
__global__ void __launch_bounds__(
    DecodeShape<kHeadDim, kRows, sizeof(E), kInvariant>::kThreads,
    DecodeShape<kHeadDim, kRows, sizeof(E), kInvariant>::kBlocksPerSm)
    decode_kernel(const __grid_constant__ DecodeLaunch launch) {
  using Shape = DecodeShape<kHeadDim, kRows, sizeof(E), kInvariant>;
  extern __shared__ __align__(1024) char shared[];
  // Left to itself the compiler makes the address anew wherever it is used, which takes long.
  // Instances with fp8 have no register for it.
  char* const memory = sizeof(E) > 1 ? kept_in_register(shared) : shared;
  DecodeBlock<T, E, Shape, kWholePages> work(launch, memory);
  work.run();
}

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_KERNEL_CUH_
