// The answers of requests, and the states that blocks hand each other of those that they share.
#ifndef STREAM_ATTENTION_DECODE_SHARE_CUH_
#define STREAM_ATTENTION_DECODE_SHARE_CUH_

#include "decode_work.cuh"

namespace stream_attention {

constexpr float kLn2 = 0.6931471805599453f;

template <class T, class E, class Shape, bool kWholePages>
class DecodeShare : protected DecodeWork<T, E, Shape, kWholePages> {
 protected:
  using Work = DecodeWork<T, E, Shape, kWholePages>;
  using Work::N, Work::kVectorsPerRow, Work::launch, Work::p, Work::lane, Work::warp, Work::control;

  using Work::Work;

  // How many blocks share the request at `at`, and the first of them.
  __device__ __forceinline__ Shared sharers(const Cursor& at, bool from_start,
                                            const Range& range) const {
    const bool to_end = at.in_request <= at.in_block;
    if (from_start && to_end) return Shared{at.request, control.block, 1, 0};
    if (range.parts > 0) {
      const int log2_size = slice_log2(control.live_rows * kVectorsPerRow, range.parts);
      return Shared{at.request, range.first_block, range.parts, log2_size};
    }
    const EqualCuts cuts(range.total, launch.blocks);
    const int count = tiles_of<Shape>(p, at.kv_len).count;
    Shared shared;
    shared.request = at.request;
    shared.first_block = from_start ? control.block : cuts.owner(range.before);
    const int last_block = to_end ? control.block : cuts.owner(range.before + count - 1);
    shared.parts = last_block - shared.first_block + 1;
    shared.log2_size = slice_log2(control.live_rows * kVectorsPerRow, shared.parts);
    return shared;
  }

  // A block has two regions: one for the request that it begins and others end, one for the
  // request that it does not begin.
  __device__ __forceinline__ Region region_of(const Shared& shared, int slice) const {
    const uint32_t of_block =
        control.lead * launch.blocks.divisor + shared.first_block + static_cast<uint32_t>(slice);
    const uint32_t index = 2 * of_block + (slice == 0 ? 1 : 0), items = launch.region_items;
    return Region(p.scratch + uint64_t{index * items} * kItemFloats, items);
  }

  // Asks for the memory that the block's slice of the request at hand comes through to be in L2;
  // for the lanes of a warp whose first one has noted how the request is shared. Who looks there
  // for what has not come yet would else have it fetched from memory, while the writer's store
  // waits. Where there is little to look at, that costs less than this.
  __device__ __forceinline__ void prefetch_region() const {
    constexpr int kManyItems = 256, kLineBytes = 128;
    if constexpr (Shape::kScarce) return;
    __syncwarp();
    const Shared& shared = control.current;
    const int items = shared.parts << shared.log2_size;
    if (shared.parts == 1 || items < kManyItems) return;
    const Region region = region_of(shared, control.block - shared.first_block);
    for (int line = lane; line < items * 16 / kLineBytes; line += 32) {
      prefetch_to_keep(reinterpret_cast<const char*>(region.outs) + line * kLineBytes);
    }
    for (int line = lane; line < items * 8 / kLineBytes; line += 32) {
      prefetch_to_keep(reinterpret_cast<const char*>(region.sums) + line * kLineBytes);
    }
  }

  // Where a state of four columns of a row, the `vector`-th of the block's, goes, if other blocks
  // share the request: to the block that merges it.
  __device__ __forceinline__ Region target_of(const Shared& shared, int vector) const {
    const int part = control.block - shared.first_block;
    const int size = 1 << shared.log2_size;
    const int item = (part << shared.log2_size) + (vector & (size - 1));
    return region_of(shared, vector >> shared.log2_size).from(item);
  }

  // Parts that a lane reads at once. More of them, where vectors are few, take longer than more
  // lanes do.
  static constexpr int kMostTaken = N > 8 ? 4 : 2;

  // This block's slice of the answer of a shared request. A warp takes some vectors, and a lane one
  // part of each, or more if then fewer rounds do; the order of additions depends on the shape
  // alone.
  __device__ void merge_slice(const Shared& shared) const {
    const int vectors = control.live_rows * kVectorsPerRow;
    const int log2_size = shared.log2_size;
    const int slice = control.block - shared.first_block, size = 1 << log2_size;
    const int begin = slice << log2_size;
    const Region region = region_of(shared, slice);
    // Powers of two, lest anything be divided: this is on the way to every answer.
    int log2_lanes = min(5, max(31 - __clz(shared.parts), 5 - log2_size));
    while (kMostTaken > 2 && log2_lanes > 0 && Shape::kWarps << (5 - log2_lanes) < size &&
           kMostTaken << (log2_lanes - 1) >= shared.parts) {
      --log2_lanes;
    }
    const int log2_columns = 5 - log2_lanes;
    for (int round = warp << log2_columns; round < size; round += Shape::kWarps << log2_columns) {
      const int column = round + (lane & ((1 << log2_columns) - 1)), vector = begin + column;
      const bool live = column < size && vector < vectors;
      const Answer answer = answer_at(shared.request, live ? vector : 0);
      State state = empty_state();
      for (int start = lane >> log2_columns; start - (lane >> log2_columns) < shared.parts;
           start += kMostTaken << log2_lanes) {
        int items[kMostTaken], count = 0;
#pragma unroll
        for (int i = 0; i < kMostTaken; ++i) {
          const int part = start + (i << log2_lanes);
          items[i] = (part << log2_size) + column;
          count += live && part < shared.parts;
        }
        State states[kMostTaken];
        region.take(count, items, states);
        // Of all lanes at once, so that each state is scaled but once.
        float top = state.top;
#pragma unroll
        for (int i = 0; i < kMostTaken; ++i) top = fmaxf(top, states[i].top);
        top = max_across_lanes(top, 1 << log2_columns);
        scale(state, weight_in(state.top, top));
        state.top = top;
#pragma unroll
        for (int i = 0; i < kMostTaken; ++i) {
          add_weighted(state, states[i], weight_in(states[i].top, top));
        }
      }
      sum_across_lanes(state, 1 << log2_columns);
      if (lane >> log2_columns == 0 && live) write(answer, state);
    }
  }

  // Natural logarithm of the sum of weights.
  static __device__ __forceinline__ float log_of(const State& state) {
    const float power = log2f(state.sum);
    if constexpr (Shape::kInvariant) return __fmul_rn(__fadd_rn(state.top, power), kLn2);
    return (state.top + power) * kLn2;
  }

  // Where four elements of a row's answer go, and what they still need.
  struct Answer {
    T* out;
    float* lse;   // null: somebody else's, or not wanted
    float sink;   // none: minus infinity
  };

  __device__ __forceinline__ Answer answer_at(int request, int vector) const {
    const int row = control.row_start + vector / kVectorsPerRow;
    const int column = vector % kVectorsPerRow * 4;
    const int token = launch.group(row);
    const int q_head = control.head * p.group + row - token * p.group;
    const int64_t place = static_cast<int64_t>(request) * p.qo_len + token;
    Answer answer;
    answer.out = static_cast<T*>(p.out) + place * p.out_token_stride +
                 static_cast<int64_t>(q_head) * p.out_head_stride + column;
    answer.lse = p.lse == nullptr || column > 0
                     ? nullptr
                     : p.lse + place * p.lse_token_stride + q_head * p.lse_head_stride;
    answer.sink = p.attn_sink == nullptr ? -INFINITY : p.attn_sink[q_head];
    return answer;
  }

  // Four elements of one row's answer.
  __device__ __forceinline__ void write(const Answer& answer, State state) const {
    const bool empty = state.sum == 0.f;
    if (p.attn_sink != nullptr && !empty) {
      // Not sooner: that would be a wait for it ahead of the parts.
      const float power = __fmul_rn(answer.sink, kLog2E);
      const State sink{make_float4(0.f, 0.f, 0.f, 0.f), power, 1.f};
      if constexpr (Shape::kInvariant) {
        state = add_rounded(state, sink);
      } else {
        add(state, sink);
      }
    }
    float inverse = empty ? 0.f : __fdividef(1.f, state.sum);
    if constexpr (sizeof(E) == 1) inverse *= control.value_scale;
    uint2 words;
    words.x = empty ? 0u : Half<T>::pack(state.out.x * inverse, state.out.y * inverse);
    words.y = empty ? 0u : Half<T>::pack(state.out.z * inverse, state.out.w * inverse);
    *reinterpret_cast<uint2*>(answer.out) = words;
    if (answer.lse != nullptr) *answer.lse = empty ? -INFINITY : log_of(state);
  }
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_SHARE_CUH_
