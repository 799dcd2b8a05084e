// SPDX-License-Identifier: Apache-2.0
// Top-k of one row by one block that holds it in registers: as ops.attention.topk_slots, bit for bit.
//
// Scores become integers of their order, four neighbours a thread, then the next four of each. They
// are counted by their upper 12 bits, so every warp can find in which bin the k-th best lies; the
// few that are there are compared with one another, and many are counted by further bits first.
// Then each thread knows which of its scores are kept, and their places by adding up those before
// it: nothing depends on the order in which anything ran.
//
// Constants: THREADS (a multiple of 32, 128 at least), FOURS of a thread, PAGE positions a page (a
// multiple of 4), VECTOR (rows begin at 16 bytes and are a multiple of them long).

#define WARPS (THREADS / 32)
#define BINS 4096
#define OWN (THREADS >= 1024 ? 4 : THREADS >= 512 ? 8 : THREADS >= 256 ? 16 : 32)  // of a thread
#define FEW (THREADS / 4)  // keys that are compared directly, by four threads each

// In the order of float32 x: NaN as -inf, -0 as 0. Never 0, which stands for no score.
__device__ inline unsigned ordered_key(float x) {
  unsigned bits = bits_of(without_nan(x) + 0.0f);
  return bits ^ (unsigned)((int)bits >> 31 | (int)0x80000000);
}

struct Search {
  unsigned prefix;  // the upper bits of the k-th best key
  int wanted;       // how many of the keys that begin so are kept
  int inside;       // how many there are
};

struct alignas(16) Space {
  int counts[BINS];
  int reaching[THREADS];  // of a thread's bins, and of those behind it in its warp
  int totals[32];         // of warps
  int taken[FOURS][32];   // of warps: above the threshold, and equal to it above bit 16
  unsigned list[FEW];
  int listed;
  unsigned threshold;
  int ties;
};

__device__ inline void clear_counts(Space& space) {
  for (int at = 4 * thread(); at < BINS; at += 4 * THREADS)
    *(int4*)(space.counts + at) = make_int4(0, 0, 0, 0);
}

// From what all threads counted, the next bits of the prefix. Every warp finds them.
__device__ inline void narrow(Space& space, Search& search, int bits) {
  block_sync();
  int own = 0;
  for (int i = 0; i < OWN && thread() * OWN < BINS; i += 4) {
    int4 four = *(const int4*)(space.counts + thread() * OWN + i);
    own += four.x + four.y + four.z + four.w;
  }
  int reaching = own;
  for (int by = 1; by < 32; by *= 2) {
    int more = lanes_behind(reaching, by);
    if (lane() + by < 32) reaching += more;
  }
  space.reaching[thread()] = reaching;
  if (lane() == 0) space.totals[warp()] = reaching;
  block_sync();
  int total = lane() < WARPS ? space.totals[lane()] : 0, until = total;
  for (int by = 1; by < WARPS; by *= 2) {
    int more = lanes_behind(until, by);
    if (lane() + by < 32) until += more;
  }
  int source = first_one(lanes_with(until - total < search.wanted && search.wanted <= until));
  int wanted = search.wanted - from_lane(until - total, source);
  reaching = space.reaching[source * 32 + lane()];
  int behind = lanes_behind(reaching, 1);
  if (lane() == 31) behind = 0;
  int holder = first_one(lanes_with(behind < wanted && wanted <= reaching));
  wanted -= from_lane(behind, holder);
  int first = (source * 32 + holder) * OWN, bin = 0, inside = 0;
#pragma unroll
  for (int i = OWN - 1; i >= 0; i--) {
    int count = space.counts[first + i];
    bool is_here = inside == 0 && wanted <= count, is_above = inside == 0 && wanted > count;
    if (is_here) bin = first + i, inside = count;
    if (is_above) wanted -= count;
  }
  search = Search{search.prefix << bits | (unsigned)bin, wanted, inside};
}

// Count those keys that begin with the prefix by the `bits` above `shift`.
__device__ inline void count_bins(Space& space, const unsigned (&keys)[FOURS][4], unsigned prefix,
                                  int shift, int bits) {
  block_sync();  // nobody reads the counts before
  clear_counts(space);
  block_sync();
#pragma unroll
  for (int i = 0; i < 4 * FOURS; i++) {
    unsigned key = keys[i / 4][i % 4];
    if (key >> (shift + bits) == prefix)
      count_one(space.counts + (key >> shift & ((1u << bits) - 1)));
  }
}

// The whole of the k-th best key, and how many that equal it are kept, where at most FEW begin
// with the prefix, above `left` more bits.
__device__ inline void compare_few(Space& space, const unsigned (&keys)[FOURS][4], Search& search,
                                   int left) {
#pragma unroll
  for (int i = 0; i < 4 * FOURS; i++) {
    unsigned key = keys[i / 4][i % 4];
    if (key >> left == search.prefix) space.list[next_of(&space.listed)] = key;
  }
  block_sync();
  if (warp() * 8 < search.inside) {
    unsigned own = space.list[thread() / 4];  // 0 behind the last
    int greater = 0, equal = 0;
    for (int at = lane() % 4 * 4; at < search.inside; at += 16) {
      uint4 four = *(const uint4*)(space.list + at);
      greater += (four.x > own) + (four.y > own) + (four.z > own) + (four.w > own);
      equal += (four.x == own) + (four.y == own) + (four.z == own) + (four.w == own);
    }
    int both = greater | equal << 16;
    both += from_lane(both, lane() ^ 1), both += from_lane(both, lane() ^ 2);
    greater = both & 0xffff, equal = both >> 16;
    // Of equal ones all write the same.
    if (own && greater < search.wanted && search.wanted <= greater + equal)
      space.threshold = own, space.ties = search.wanted - greater;
  }
  block_sync();
  search.prefix = space.threshold, search.wanted = space.ties;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
topk_short(const float* logits, const int* table, const int* rows, const int* kv_lens, int* out,
           int width, int length, int pages, int k) {
  SHARED_SPACE(bytes);
  Space& space = *(Space*)bytes;
  int* kept = (int*)(&space + 1);  // [k]
  clear_counts(space);
  if (thread() < FEW) space.list[thread()] = 0;
  for (int at = thread(); at < 32 * FOURS; at += THREADS) space.taken[at / 32][at % 32] = 0;
  if (thread() == 0) space.listed = 0;
  int query = block();
  const float* row = logits + (long long)query * length;
  follow();
  unsigned keys[FOURS][4];
#pragma unroll
  for (int f = 0; f < FOURS; f++) {
    int at = 4 * (f * THREADS + thread());
#if VECTOR
    float4 four = make_float4(0, 0, 0, 0);
    if (at < length) four = *(const float4*)(row + at);
    keys[f][0] = bits_of(four.x), keys[f][1] = bits_of(four.y);
    keys[f][2] = bits_of(four.z), keys[f][3] = bits_of(four.w);
#else
    for (int i = 0; i < 4; i++) keys[f][i] = at + i < length ? bits_of(row[at + i]) : 0;
#endif
  }
  int whole = min(kv_lens[query], length);
  const int* own_pages = table + (long long)rows[query / width] * pages;
  int slots[FOURS];  // of four neighbours the first one's
#pragma unroll
  for (int f = 0; f < FOURS; f++) {
    int at = 4 * (f * THREADS + thread());
    slots[f] = at < whole ? own_pages[at / PAGE] * PAGE + at % PAGE : 0;
  }
  out += (long long)query * k;
  if (whole <= k) {
    for (int at = thread(); at < k; at += THREADS)
      out[at] = at < whole ? own_pages[at / PAGE] * PAGE + at % PAGE : -1;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4 * FOURS; i++) {
    int at = 4 * (i / 4 * THREADS + thread()) + i % 4;
    unsigned& key = keys[i / 4][i % 4];
    key = at < whole ? ordered_key(value_of(key)) : 0;
  }
  block_sync();
  // No score falls into the first bin, which no score's key begins with.
#pragma unroll
  for (int i = 0; i < 4 * FOURS; i++)
    if (keys[i / 4][i % 4]) count_one(space.counts + (keys[i / 4][i % 4] >> 20));

  Search search = {0, k, 0};
  narrow(space, search, 12);
  int left = 20;
  if (search.inside != search.wanted && search.inside > FEW) {
    count_bins(space, keys, search.prefix, 8, 12);
    narrow(space, search, 12);
    left = 8;
    if (search.inside != search.wanted && search.inside > FEW) {
      count_bins(space, keys, search.prefix, 0, 8);
      narrow(space, search, 8);
      left = 0;
    }
  }
  bool all_in = search.inside == search.wanted;
  if (left && !all_in) {
    compare_few(space, keys, search, left);
    left = 0;
  }
  // A bin that is wanted whole is above the threshold.
  unsigned threshold = (search.prefix << left) - all_in;
  int ties = all_in ? 0 : search.wanted, before[FOURS];
#pragma unroll
  for (int f = 0; f < FOURS; f++) {
    int taken = 0;
    for (int i = 0; i < 4; i++)
      taken += (keys[f][i] > threshold) + ((keys[f][i] == threshold) << 16);
    int until = taken;
    for (int by = 1; by < 32; by *= 2) {
      int more = lanes_before(until, by);
      if (lane() >= by) until += more;
    }
    if (lane() == 31) space.taken[f][warp()] = until;
    before[f] = until - taken;
  }
  block_sync();
  int earlier = 0;  // in all fours before
#pragma unroll
  for (int f = 0; f < FOURS; f++) {
    int taken = space.taken[f][lane()];
    int here = earlier + before[f] + warp_sum(lane() < warp() ? taken : 0);
    if (f + 1 < FOURS) earlier += warp_sum(taken);
    int tied = here >> 16, place = (here & 0xffff) + min(tied, ties);
    for (int i = 0; i < 4; i++) {
      bool is_kept = keys[f][i] > threshold;
      if (keys[f][i] == threshold) is_kept = tied++ < ties;
      if (is_kept) kept[place++] = slots[f] + i;
    }
  }
  block_sync();
  for (int at = thread(); at < k; at += THREADS) out[at] = kept[at];
}
