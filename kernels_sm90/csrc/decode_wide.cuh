// Exact decode of many packed rows by products of warpgroups: one state a block, not one a warp.
//
// Two warpgroups, one up to two tiles of 64 tokens ahead of the other:
//   the first makes weights: S^T = K Q^T, 64 tokens on M, all rows on N; P goes to shared memory;
//   the second adds values up: O^T += V^T P, head_dim on M, and copies K and V of the tiles ahead.
// Weights are relative to a maximum that is raised only when a score exceeds it by more than
// kHeadroom powers of two, which after a request's first tile is rare (the conditional rescaling of
// FlashAttention-4): in most tiles no maximum is looked for, and nothing is scaled. So weights
// reach 2^kHeadroom, which fp16 holds; sums in fp32 of V above 2^119 overflow that much sooner.
#ifndef STREAM_ATTENTION_DECODE_WIDE_CUH_
#define STREAM_ATTENTION_DECODE_WIDE_CUH_

#include "decode_begin.cuh"
#include "decode_wgmma.cuh"

namespace stream_attention {

// Compile-time shape of an instance, as DecodeShape (decode_shape.cuh). D: head_dim. N: packed
// query rows, a multiple of 16.
template <int kHeadDim, int kRows>
struct WideShape {
  static_assert(kHeadDim == 128, "rows of two blocks of 128 bytes");
  static constexpr bool kInvariant = false, kScarce = false;
  static constexpr bool kAllTogether = true;
  static constexpr int D = kHeadDim;
  static constexpr int N = kRows;
  static constexpr int kRowBlocks = N / 8;
  static constexpr int kGroupWarps = 4, kGroupThreads = 32 * kGroupWarps;
  static constexpr int kWarps = 2 * kGroupWarps, kThreads = 32 * kWarps;
  static constexpr int kCopyWarps = kGroupWarps;       // the second group
  static constexpr int kQueryThreads = kGroupThreads;  // the first one
  static constexpr int kPieces = 2 * D / 16;
  static constexpr int kChunk = 16, kTile = kChunk * kCopyWarps;
  using Tokens = SwizzledRows<kTile>;
  static constexpr int kChunkBytes = kChunk * Tokens::kLine;  // between warps' tokens
  static constexpr int kSlotBytes = kTile * 2 * D;
  static constexpr int kBlocksPerSm = 2;
  static constexpr bool kHints = true;
  static constexpr int kMostBytes = (228 * 1024 - kBlocksPerSm * 1024) / kBlocksPerSm;
  using Query = SwizzledRows<N>;
  static constexpr bool kQueryShared = true;
  static constexpr int kQueryBytes = N * 2 * D;
  using Weights = SwizzledRows<N>;  // P, of a tile's tokens
  static_assert(2 * kTile == Weights::kLine);
  static constexpr int kWeightBytes = N * 2 * kTile, kWeightTurns = 2;
  static constexpr int kAhead = 2, kSlots = 2 * kAhead + 1;
  static constexpr int kIdsBytes = 2 * 32 * 4 * kCopyWarps;
  // Rows' maxima and sums, what the warps of the first group have found of either, and by turn what
  // the second group scales rows by, if it does.
  static constexpr int kMaximaBytes = 4 * N, kSumBytes = 4 * N, kFoundBytes = 4 * N * kGroupWarps;
  static constexpr int kScalesBytes = 4 * N * kWeightTurns, kRaisedBytes = 4 * kWeightTurns;
  static constexpr int kControlBytes = 96;
  static constexpr int kSearchBytes = 4 * (kThreads + kWarps + 4);
  // Where what lies.
  static constexpr int kQueryAt = kSlots * kSlotBytes;
  static constexpr int kWeightsAt = kQueryAt + 2 * kQueryBytes;
  static_assert(kQueryAt % 1024 == 0 && kQueryBytes % 1024 == 0 && kWeightBytes % 1024 == 0);
  static constexpr int kIdsAt = kWeightsAt + kWeightTurns * kWeightBytes;
  static_assert(kIdsAt % 256 == 0, "addresses of ids are told apart by their bits");
  static constexpr int kMaximaAt = kIdsAt + kIdsBytes;
  static constexpr int kSumsAt = kMaximaAt + kMaximaBytes;
  static constexpr int kFoundAt = kSumsAt + kSumBytes;
  static constexpr int kScalesAt = kFoundAt + kFoundBytes;
  static constexpr int kRaisedAt = kScalesAt + kScalesBytes;
  static constexpr int kBarriersAt = kRaisedAt + kRaisedBytes;
  static constexpr int kControlAt = kBarriersAt + 8 * (kSlots + 2 * kWeightTurns);
  static_assert(kBarriersAt % 8 == 0 && kControlAt % 8 == 0);
  static constexpr int kSearchAt = kControlAt + kControlBytes;
  static constexpr int kSharedBytes = kSearchAt + kSearchBytes;
  static_assert(kSharedBytes <= kMostBytes);
  static_assert(4 * N * D <= kSlotBytes, "a state takes a slot's place");

  // Barriers in shared memory that begins at `ring`: a slot is filled; a turn's weights are there,
  // and what the threads that tell so have put down of rows; weights of a turn have been taken.
  static constexpr int kTellingThreads = 4;
  static __device__ __forceinline__ uint32_t filled(uint32_t ring, int slot) {
    return ring + kBarriersAt + slot * 8;
  }
  static __device__ __forceinline__ uint32_t weighed(uint32_t ring, int turn) {
    return ring + kBarriersAt + (kSlots + turn) * 8;
  }
  static __device__ __forceinline__ uint32_t taken(uint32_t ring, int turn) {
    return ring + kBarriersAt + (kSlots + kWeightTurns + turn) * 8;
  }
  static __device__ __forceinline__ void init_barriers(uint32_t ring) {
    for (int slot = 0; slot < kSlots; ++slot) init_barrier(filled(ring, slot), 32 * kCopyWarps);
    for (int turn = 0; turn < kWeightTurns; ++turn) {
      init_barrier(weighed(ring, turn), kTellingThreads);
      init_barrier(taken(ring, turn), 1);
    }
  }
};

template <class T, class E, class Shape, bool kWholePages>
class DecodeWide : DecodeBegin<T, E, Shape, kWholePages> {
  static_assert(sizeof(T) == sizeof(E), "K and V are multiplied as they lie in memory");
  using Work = DecodeBegin<T, E, Shape, kWholePages>;
  using Work::D, Work::N, Work::kVectorsPerRow;
  using Work::launch, Work::p, Work::lane, Work::warp, Work::control;

  static constexpr float kHeadroom = 8.f, kMostFloat = 3.40282347e38f;
  static constexpr int kRowBlocks = Shape::kRowBlocks;

  // Of all rows, of two of a warp's sixteen tokens: scores, then weights.
  using Scores = float[kRowBlocks][4];

  // What the first group knows of rows that have two tokens of the thread's: what weights are
  // relative to (far below every score while the row has seen no token), and their sums.
  struct RowState {
    float base[kRowBlocks][2];
    float sum[kRowBlocks][2], of_tile[kRowBlocks][2];
    Seen seen;
  };

  // O^T, of two times 64 columns of head_dim: sixteen of each a warp.
  using Output = float[2][kRowBlocks][4];

  // Numbers of the groups' barriers.
  enum : int { kFirstGroup = 1, kSecondGroup };

  // Which of the turns that the weights of tiles take is next, and the parity of its barriers.
  struct Turn {
    int tile = 0;  // modulo 4
    __device__ __forceinline__ int number() const { return tile % 2; }
    __device__ __forceinline__ int parity() const { return tile / 2; }
    __device__ __forceinline__ void next() { tile = (tile + 1) % 4; }
  };

  // The slots of K of the tile at hand and of V behind it, and the parities of their barriers.
  struct Slots {
    int filled = 0;  // slots before K's, modulo two rings
    static __device__ __forceinline__ int wrapped(int n, int length) {
      return n < length ? n : n - length;
    }
    __device__ __forceinline__ int key() const { return wrapped(filled, Shape::kSlots); }
    __device__ __forceinline__ int key_parity() const { return filled >= Shape::kSlots; }
    __device__ __forceinline__ int value() const { return wrapped(key() + 1, Shape::kSlots); }
    __device__ __forceinline__ int value_parity() const {
      return wrapped(filled + 1, 2 * Shape::kSlots) >= Shape::kSlots;
    }
    __device__ __forceinline__ void next() { filled = wrapped(filled + 2, 2 * Shape::kSlots); }
  };

 public:
  __device__ __forceinline__ DecodeWide(const DecodeLaunch& launched, char* shared)
      : Work(launched, shared) {}

  __device__ __forceinline__ void run() {
    Cursor at{}, ahead{};  // a search that finds no tile sets no more than that
    this->begin(at, ahead);
    if (at.in_block == 0) return;
    if constexpr (!kWholePages) {
      if (ahead.in_block > 0) this->next_tile(this->lens(), ahead);
      this->begin_lookup(ahead);
    }
    const bool weighs = warp < Shape::kGroupWarps;
    if (weighs) {
      wait_copies<0>();  // for the rows of q
      show_to_tensor_cores();
    }
    if (threadIdx.x < N) maximum(threadIdx.x) = -INFINITY;
    __syncthreads();
    if (threadIdx.x == 0) this->begin_request(at, this->range);
    if (warp == 0) this->prefetch_region();
    Turn turn;
    Slots slots;
    while (true) {
      if (weighs) {
        make_weights(at, turn, slots);
      } else {
        add_values_up(at, ahead, turn, slots);
      }
      __syncthreads();
      hand_out(slots.value());
      if (at.in_block == 1) break;
      __syncthreads();
      if (!weighs) this->template copy<kKey>(slots.value(), this->place);
      next(at, turn, slots);
      if (weighs) {
        note_request(at);
        if (at.in_block > at.in_request) this->copy_query(at.request + 1);
        commit_copies();
      }
    }
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const typename Work::Sharing merged = i == 0 ? control.owed : control.current;
      if (merged.parts > 1) this->merge_slice(merged);
    }
  }

 private:
  __device__ __forceinline__ char* shared_at(int place) const {
    return reinterpret_cast<char*>(&control) + (place - Shape::kControlAt);
  }
  // What the weights of a row are relative to; -inf: the row has seen no token.
  __device__ __forceinline__ float& maximum(int row) const {
    return reinterpret_cast<float*>(shared_at(Shape::kMaximaAt))[row];
  }
  // The sum of a row's weights, when the request or the range ends.
  __device__ __forceinline__ float& row_sum(int row) const {
    return reinterpret_cast<float*>(shared_at(Shape::kSumsAt))[row];
  }
  // What a warp of the first group has found of a row.
  __device__ __forceinline__ float& found(int of_warp, int row) const {
    return reinterpret_cast<float*>(shared_at(Shape::kFoundAt))[of_warp * N + row];
  }
  // What a row of O is scaled by before weights of a turn are added, and whether any is.
  __device__ __forceinline__ float& output_scale(int turn, int row) const {
    return reinterpret_cast<float*>(shared_at(Shape::kScalesAt))[turn * N + row];
  }
  __device__ __forceinline__ int& raised(int turn) const {
    return reinterpret_cast<int*>(shared_at(Shape::kRaisedAt))[turn];
  }
  __device__ __forceinline__ uint32_t weights_at(int turn) const {
    return this->ring + Shape::kWeightsAt + turn * Shape::kWeightBytes;
  }
  // The first of a thread's two neighbouring rows in an eight of them.
  __device__ __forceinline__ int row_of(int block) const { return block * 8 + lane % 4 * 2; }

  static __device__ __forceinline__ bool ends(const Cursor& at) {
    return at.in_request == 1 || at.in_block == 1;
  }

  __device__ __forceinline__ void next(Cursor& at, Turn& turn, Slots& slots) const {
    this->next_tile(at);
    turn.next();
    slots.next();
  }

  // The first group: tiles up to the last one of the request or of the range.
  __device__ __forceinline__ void make_weights(Cursor& at, Turn& turn, Slots& slots) const {
    RowState rows;
    start_rows(at, rows);
    while (true) {
      if (at.in_block == control.release_at) DependentMemory::release_consumer();
      wait_for_phase(Shape::filled(this->ring, slots.key()), slots.key_parity());
      show_to_tensor_cores();
      Scores s = {};
      multiply_keys(at.request, slots.key(), s);
      wait_for_products(s);
      scale_and_mask(at, rows.seen, s);
      wait_for_phase(Shape::taken(this->ring, turn.number()), turn.parity() ^ 1);
      const bool exceeds = weigh(s, turn.number(), rows);
      show_to_tensor_cores();
      const bool raises = any_of_warps(kFirstGroup, Shape::kGroupThreads, exceeds);
      if (__builtin_expect(raises, 0)) raise_maxima(s, turn.number(), rows);
      if (threadIdx.x == 0) raised(turn.number()) = raises;
#pragma unroll
      for (int nb = 0; nb < kRowBlocks; ++nb) {
#pragma unroll
        for (int j = 0; j < 2; ++j) rows.sum[nb][j] += rows.of_tile[nb][j];
      }
      if (__builtin_expect(ends(at), 0)) break;
      tell_weighed(turn);
      next(at, turn, slots);
    }
    put_sums(rows);
    tell_weighed(turn);
    wait_copies<0>();  // for the next rows of q
    show_to_tensor_cores();
  }

  __device__ __forceinline__ void tell_weighed(const Turn& turn) const {
    if (threadIdx.x < Shape::kTellingThreads) arrive(Shape::weighed(this->ring, turn.number()));
  }

  // The second group, likewise. `ahead`: of the next tile to be looked up.
  __device__ __forceinline__ void add_values_up(Cursor& at, Cursor& ahead, Turn& turn,
                                                Slots& slots) {
    Output out = {};
    while (true) {
      if (at.in_block == control.release_at) DependentMemory::release_consumer();
      wait_for_phase(Shape::weighed(this->ring, turn.number()), turn.parity());
      this->template copy<kValue>(slots.key(), this->place);  // K has been read
      wait_for_phase(Shape::filled(this->ring, slots.value()), slots.value_parity());
      show_to_tensor_cores();
      if (__builtin_expect(raised(turn.number()), 0)) scale_output(turn.number(), out);
      add_values(slots.value(), turn.number(), out);
      this->place = this->look_up(ahead);
      wait_for_products(out[0]);
      wait_for_products(out[1]);
      sync_warps(kSecondGroup, Shape::kGroupThreads);  // all have read V and the weights
      if (threadIdx.x == Shape::kGroupThreads) arrive(Shape::taken(this->ring, turn.number()));
      if (__builtin_expect(ends(at), 0)) break;
      this->template copy<kKey>(slots.value(), this->place);
      next(at, turn, slots);
    }
    put_output(slots.value(), out);
  }

  // Of the request at hand: nothing seen.
  __device__ __forceinline__ void start_rows(const Cursor& at, RowState& rows) const {
    const int oldest = at.kv_len - p.qo_len;  // position of the request's first query
    rows.seen.to = launch.cap > 0.f ? 0 : p.causal ? min(oldest + 1, at.kv_len) : at.kv_len;
    rows.seen.from = p.window_left < 0 ? 0 : max(0, at.kv_len - 1 - p.window_left);
#pragma unroll
    for (int nb = 0; nb < kRowBlocks; ++nb) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        rows.base[nb][j] = -kMostFloat;
        rows.sum[nb][j] = 0.f;
      }
    }
  }

  // A request begins behind another one. For the first group.
  __device__ __forceinline__ void note_request(const Cursor& at) const {
    if (threadIdx.x < N) maximum(threadIdx.x) = -INFINITY;
    if (threadIdx.x == 0) {
      // A request that ends inside the range and that others began is merged later.
      if (control.current.parts > 1) control.owed = control.current;
      control.range.before += control.request_tiles;
      this->begin_request(at, control.range);
    }
  }

  __device__ __forceinline__ void multiply_keys(int request, int slot, Scores& s) const {
    constexpr int kKeyBlock = Shape::Tokens::kBlockBytes, kQueryBlock = Shape::Query::kBlockBytes;
    const Operand keys = Operand::at(this->ring + slot * Shape::kSlotBytes);
    const Operand queries = Operand::at(this->queries(request));
    begin_products(s);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      const int block = k / 4, step = k % 4 * 32;
      GroupProduct<T, false>::multiply(s, keys.after(block * kKeyBlock + step),
                                       queries.after(block * kQueryBlock + step), k > 0);
    }
    end_products();
  }

  __device__ __forceinline__ void scale_and_mask(const Cursor& at, const Seen& seen,
                                                 Scores& s) const {
#pragma unroll
    for (int nb = 0; nb < kRowBlocks; ++nb) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[nb][c] *= launch.scale;
    }
    const int begin = at.tile * Shape::kTile;
    if (__builtin_expect(begin < seen.from || begin + Shape::kTile > seen.to, 0)) {
      cap_and_mask(at, begin, s);
    }
  }

  __device__ __forceinline__ void cap_and_mask(const Cursor& at, int begin, Scores& s) const {
    const int oldest = at.kv_len - p.qo_len;
#pragma unroll
    for (int nb = 0; nb < kRowBlocks; ++nb) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = control.row_start + row_of(nb) + j;
        const int position = oldest + launch.group(min(row, launch.rows_total - 1));
        const int last = p.causal ? min(at.kv_len, position + 1) : at.kv_len;
        const int first =
            p.window_left < 0
                ? 0
                : static_cast<int>(max(int64_t{0}, int64_t{position} - p.window_left));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = s[nb][2 * half + j];
          if (launch.cap > 0.f) x = hyperbolic_tangent(x) * launch.cap;
          const int token = begin + warp * 16 + half * 8 + lane / 4;
          if (token < first || token >= last) x = -INFINITY;
        }
      }
    }
  }

  // Puts the weights of the thread's scores where the products take them, and adds them up. Returns
  // whether a score exceeds its row's maximum by too much.
  __device__ __forceinline__ bool weigh(const Scores& s, int turn, RowState& rows) const {
    bool exceeds = false;
    float w[kRowBlocks][4];
#pragma unroll
    for (int nb = 0; nb < kRowBlocks; ++nb) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float above = s[nb][c] - rows.base[nb][c % 2];
        exceeds = exceeds || above > kHeadroom;
        w[nb][c] = exp2_fast(above);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) rows.of_tile[nb][j] = w[nb][j] + w[nb][j + 2];
    }
    // Matrices of eight tokens by eight rows; of each its rows become lines.
#pragma unroll
    for (int nb = 0; nb < kRowBlocks; nb += 2) {
      const int row = nb * 8 + lane / 16 * 8 + lane % 8;
      store_matrices_transposed(
          weights_at(turn) + Shape::Weights::offset(row, warp * 2 + lane / 8 % 2),
          {Half<T>::pack(w[nb][0], w[nb][1]), Half<T>::pack(w[nb][2], w[nb][3]),
           Half<T>::pack(w[nb + 1][0], w[nb + 1][1]), Half<T>::pack(w[nb + 1][2], w[nb + 1][3])});
    }
    return exceeds;
  }

  // Raises the rows' maxima to what the scores have, scales what was added up so far, says what the
  // second group shall scale by, and weighs again. For all of the first group, behind a barrier.
  __device__ __forceinline__ void raise_maxima(const Scores& s, int turn, RowState& rows) const {
#pragma unroll
    for (int nb = 0; nb < kRowBlocks; ++nb) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float top = max_over_tokens(fmaxf(s[nb][j], s[nb][j + 2]));
        if (lane < 4) found(warp, row_of(nb) + j) = top;
      }
    }
    sync_warps(kFirstGroup, Shape::kGroupThreads);
    float top[kRowBlocks][2];
#pragma unroll
    for (int nb = 0; nb < kRowBlocks; ++nb) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = row_of(nb) + j;
        const float before = maximum(row);
        top[nb][j] = before;
#pragma unroll
        for (int i = 0; i < Shape::kGroupWarps; ++i) top[nb][j] = fmaxf(top[nb][j], found(i, row));
        const float scale = weight_in(before, top[nb][j]);
        if (threadIdx.x < Shape::kTellingThreads) output_scale(turn, row) = scale;
        rows.sum[nb][j] *= scale;
        if (top[nb][j] > -INFINITY) rows.base[nb][j] = top[nb][j];
      }
    }
    weigh(s, turn, rows);
    show_to_tensor_cores();
    sync_warps(kFirstGroup, Shape::kGroupThreads);
    if (threadIdx.x < Shape::kTellingThreads) {
#pragma unroll
      for (int nb = 0; nb < kRowBlocks; ++nb) {
#pragma unroll
        for (int j = 0; j < 2; ++j) maximum(row_of(nb) + j) = top[nb][j];
      }
    }
  }

  __device__ __forceinline__ void scale_output(int turn, Output& out) const {
#pragma unroll
    for (int nb = 0; nb < kRowBlocks; ++nb) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float scale = output_scale(turn, row_of(nb) + j);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          out[half][nb][j] *= scale;
          out[half][nb][j + 2] *= scale;
        }
      }
    }
  }

  __device__ __forceinline__ void add_values(int slot, int turn, Output& out) const {
    const Operand values = Operand::at(this->ring + slot * Shape::kSlotBytes);
    const Operand weights = Operand::at(weights_at(turn));
    begin_products(out[0]);
    begin_products(out[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int k = 0; k < Shape::kTile / 16; ++k) {
        const int first = half * Shape::Tokens::kBlockBytes + k * 16 * Shape::Tokens::kLine;
        GroupProduct<T, true>::multiply(out[half], values.after(first), weights.after(k * 32), 1);
      }
    }
    end_products();
  }

  // Sums of the rows' weights. For all of the first group.
  __device__ __forceinline__ void put_sums(const RowState& rows) const {
#pragma unroll
    for (int nb = 0; nb < kRowBlocks; ++nb) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float of_warp = sum_over_tokens(rows.sum[nb][j]);
        if (lane < 4) found(warp, row_of(nb) + j) = of_warp;
      }
    }
    sync_warps(kFirstGroup, Shape::kGroupThreads);
    if (threadIdx.x >= Shape::kTellingThreads) return;
#pragma unroll
    for (int nb = 0; nb < kRowBlocks; ++nb) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = row_of(nb) + j;
        row_sum(row) = found(0, row) + found(1, row) + found(2, row) + found(3, row);
      }
    }
  }

  // Where a column of a row of the state lies in the slot that serves the end, in bytes: apart in
  // banks for those who write columns of several rows and those who read vectors of one.
  static __device__ __forceinline__ uint32_t state_at(int row, int column) {
    return row * (D * 4) + (column * 4 ^ (row / 2 % 4 << 5));
  }

  __device__ __forceinline__ void put_output(int slot, const Output& out) const {
    const uint32_t state = this->ring + slot * Shape::kSlotBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int nb = 0; nb < kRowBlocks; ++nb) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int column = half * 64 + this->chunk() * 16 + c / 2 * 8 + lane / 4;
          store_shared(state + state_at(row_of(nb) + c % 2, column), out[half][nb][c]);
        }
      }
    }
  }

  // The end of a request or of the range: its state, for all threads, behind a barrier.
  __device__ __forceinline__ void hand_out(int slot) const {
    const uint32_t states = this->ring + slot * Shape::kSlotBytes;
    const int end = control.live_rows * kVectorsPerRow;
    for (int v = threadIdx.x; v < end; v += Shape::kThreads) {
      const int row = v / kVectorsPerRow, column = v % kVectorsPerRow * 4;
      State state;
      load_shared(state.out, states + state_at(row, column));
      state.top = maximum(row);
      state.sum = row_sum(row);
      if (control.current.parts == 1) {
        this->write(this->answer_at(control.current.request, v), state);
      } else {
        this->target_of(control.current, v).publish(0, state);
      }
    }
  }
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_WIDE_CUH_
