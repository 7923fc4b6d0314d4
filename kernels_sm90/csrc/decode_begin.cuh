// How a block begins: its range of tiles, its first rows of q, and a full ring.
#ifndef STREAM_ATTENTION_DECODE_BEGIN_CUH_
#define STREAM_ATTENTION_DECODE_BEGIN_CUH_

#include <type_traits>

#include "decode_invariant.cuh"
#include "decode_query.cuh"
#include "stream_attention/global_memory.cuh"

namespace stream_attention {

// What a block does between products, by whether requests are batch-invariant.
template <class T, class E, class Shape, bool kWholePages>
using DecodeParts = std::conditional_t<Shape::kInvariant, DecodeSpans<T, E, Shape, kWholePages>,
                                       DecodeQuery<T, E, Shape, kWholePages>>;

template <class T, class E, class Shape, bool kWholePages>
class DecodeBegin : protected DecodeParts<T, E, Shape, kWholePages> {
 protected:
  using Parts = DecodeParts<T, E, Shape, kWholePages>;
  using typename Parts::ChunkPlace;
  using Parts::kAhead, Parts::kSubs, Parts::kFp8;
  using Parts::launch, Parts::p, Parts::lane, Parts::warp, Parts::control;

  using Parts::Parts;

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
      typename Parts::Hint hints[kAhead + 1];
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
      const auto own_query = this->query_sources(at.request);
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
      // What came of hints has told the slots' barriers: this is waited for here.
      constexpr bool kTold = kHints && Shape::kAllTogether;
      this->copy_first(places, 0, !(kTold && in_threads));
      if (kTold && in_threads) wait_copies<0>();
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

  Range range;  // as it was found
  ChunkPlace place;
};

}  // namespace stream_attention

#endif  // STREAM_ATTENTION_DECODE_BEGIN_CUH_
