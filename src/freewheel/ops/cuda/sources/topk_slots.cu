// SPDX-License-Identifier: Apache-2.0
// Top-k of one row by the blocks of one cluster: as ops.attention.topk_slots, bit for bit.
//
// A block keeps its part of the row in shared memory, as integers of the scores' order, and counts
// them by their upper 12 bits. Blocks read one another's counts, so each finds by itself in which
// bin the k-th best score lies, and how many scores of earlier blocks are above it. What is in that
// bin is listed, and counted by 12 more bits, and by the last 8, unless a bin is wanted whole. A
// block that has a row to itself compares a few keys directly. Then the place of every score that is
// kept is known: nothing depends on the order in which anything ran.
//
// Constants: THREADS a block, CLUSTER blocks a row, PAGE positions a page, VECTOR (rows begin at 16
// bytes and are a multiple of them long). `held`: scores of a block whose keys fit, a multiple of 4.

#define WARPS (THREADS / 32)
#define BINS 4096
#define GROUPS 64  // of 64 bins each: a warp holds two a lane
#define RUN 128    // neighbouring scores that a warp looks at together, four a lane
#define BATCH 4    // runs of a warp that are loaded at once
#define FEW 32     // keys that are compared directly
#define LAST_BINS 256
#define LISTED (BINS - LAST_BINS)  // keys of a block that its list has room for
#define WORTH 8192  // keys of a block from which a list is faster than another look at all

struct Keys { unsigned of[4]; };

// In the order of float32 x: NaN as -inf, -0 as 0. Never 0, which stands for no score.
__device__ inline unsigned ordered_key(float x) {
  unsigned bits = bits_of(without_nan(x) + 0.0f);
  return bits ^ (unsigned)((int)bits >> 31 | (int)0x80000000);
}

struct Part {
  const float* scores;  // of the row, from the block's first on
  unsigned* keys;       // of the first `held` of them
  int count, held;
};

struct Scores { float of[4]; };

// Four neighbours, of which those before `bound` are read.
__device__ inline Scores scores_at(const float* scores, int at, int bound) {
  Scores four = {{0, 0, 0, 0}};
#if VECTOR
  if (at < bound) {
    float4 read = *(const float4*)(scores + at);
    four = Scores{{read.x, read.y, read.z, read.w}};
  }
#else
  for (int i = 0; i < 4; i++)
    if (at + i < bound) four.of[i] = scores[at + i];
#endif
  return four;
}

__device__ inline Keys keys_of(const Scores& four, int at, int count) {
  Keys keys;
  for (int i = 0; i < 4; i++) keys.of[i] = ordered_key(four.of[i]);
  if (at + 4 > count)
    for (int i = 0; i < 4; i++) keys.of[i] = at + i < count ? keys.of[i] : 0;
  return keys;
}

__device__ inline Keys keys_at(const Part& part, int at) {
  if (at >= part.held) return keys_of(scores_at(part.scores, at, part.count), at, part.count);
  uint4 four = *(const uint4*)(part.keys + at);
  return Keys{{four.x, four.y, four.z, four.w}};
}

// Runs go round the warps while order does not matter.
struct Runs { Scores four[BATCH]; };

__device__ inline int place_of_run(int base, int nth) {
  return base + nth * WARPS * RUN + 4 * lane();
}

__device__ inline void load_runs(Runs& runs, const float* scores, int base, int bound) {
#pragma unroll
  for (int i = 0; i < BATCH; i++)
    runs.four[i] = scores_at(scores, place_of_run(base, i), bound);
}

// Keep the keys of a batch, and count them.
__device__ inline void hold_runs(const Runs& runs, const Part& part, int base, int* counts) {
#pragma unroll
  for (int i = 0; i < BATCH; i++) {
    int at = place_of_run(base, i);
    if (at >= part.count) return;
    Keys keys = keys_of(runs.four[i], at, part.count);
    if (at < part.held)
      *(uint4*)(part.keys + at) = make_uint4(keys.of[0], keys.of[1], keys.of[2], keys.of[3]);
    // No score falls into the first bin, which no score's key begins with.
    for (int j = 0; j < 4; j++) count_one(counts + (keys.of[j] >> 20));
  }
}

struct Place {
  int index, wanted, inside, above_before, inside_before;
};

// Among 64 counters of every block, highest first: the one that holds the `wanted`-th of what they
// count; how many of it are wanted, and are in it; and of earlier blocks' how many are above it,
// and are in it. One warp.
__device__ inline Place place_of(const int* counters, int wanted, int rank) {
  int2 all = make_int2(0, 0), earlier = make_int2(0, 0);
  for (int other = 0; other < CLUSTER; other++) {
    const int* own = counters + 2 * lane();
    int2 pair = CLUSTER == 1 ? *(const int2*)own : pair_of_block(own, other);
    all.x += pair.x, all.y += pair.y;
    if (other < rank) earlier.x += pair.x, earlier.y += pair.y;
  }
  int reaching = all.x + all.y;
  for (int by = 1; by < 32; by *= 2) {
    int more = lanes_behind(reaching, by);
    if (lane() + by < 32) reaching += more;
  }
  int behind = reaching - all.x - all.y;
  bool upper = wanted <= behind + all.y;
  int source = first_one(lanes_with(behind < wanted && wanted <= reaching));
  int before = lane() > source ? earlier.x + earlier.y : lane() == source && !upper ? earlier.y : 0;
  Place place;
  place.index = from_lane(2 * lane() + upper, source);
  place.wanted = from_lane(wanted - (upper ? behind : behind + all.y), source);
  place.inside = from_lane(upper ? all.y : all.x, source);
  place.above_before = warp_sum(before);
  place.inside_before = from_lane(upper ? earlier.y : earlier.x, source);
  return place;
}

// What the blocks of a row agree on as the search goes on.
struct Search {
  unsigned prefix;  // the upper bits of the k-th best key
  int wanted;       // how many of the keys that begin so are in
  int inside;       // how many there are
  int above_before, inside_before;  // above them, and of them, in earlier blocks
};

// A key of the list: its lower 20 bits, and above them the warp whose it is.
__device__ inline unsigned listed_key(unsigned entry, unsigned bin) {
  return bin << 20 | (entry & 0xfffff);
}

// How many of the lane's keys are above the bin; those in it go to `entries`.
__device__ inline int list_bin(const Part& part, unsigned bin, int* listed, unsigned* entries,
                               int begin, int end) {
  int above = 0;
  auto look = [&](const Keys& keys) {
    for (int i = 0; i < 4; i++) above += keys.of[i] >> 20 > bin;
    for (int i = 0; i < 4; i++)
      if (keys.of[i] >> 20 == bin)
        entries[next_of(listed)] = (keys.of[i] & 0xfffff) | (unsigned)warp() << 20;
  };
  int at = begin + 4 * lane(), held = min(end, part.held);
#pragma unroll 4
  for (; at < held; at += RUN) {
    uint4 four = *(const uint4*)(part.keys + at);
    look(Keys{{four.x, four.y, four.z, four.w}});
  }
  for (; at < end; at += RUN) look(keys_at(part, at));
  return above;
}

// Count the keys that begin with the prefix by the `bits` above `shift`: those listed, or the part's.
template <int shift, int bits>
__device__ inline void count_bins(const Part& part, const unsigned* entries, int listed,
                                  unsigned bin, int* counts, unsigned prefix, int begin, int end) {
  auto count = [&](unsigned key) {
    if (key >> (shift + bits) == prefix) count_one(counts + (key >> shift & ((1 << bits) - 1)));
  };
  for (int at = thread(); at < listed; at += THREADS) count(listed_key(entries[at], bin));
  if (listed >= 0) return;
  for (int at = begin + 4 * lane(); at < end; at += RUN) {
    Keys keys = keys_at(part, at);
    for (int i = 0; i < 4; i++) count(keys.of[i]);
  }
}

// From the counts of all blocks, the next `bits` of the prefix. Everyone knows it afterwards.
__device__ inline void narrow(int* counts, int* groups, Search* search, int rank, int bits) {
  block_sync();
  for (int group = warp(); group < GROUPS; group += WARPS) {
    int2 pair = make_int2(0, 0);
    if (group * (BINS / GROUPS) < 1 << bits)
      pair = *(const int2*)(counts + group * (BINS / GROUPS) + 2 * lane());
    int sum = warp_sum(pair.x + pair.y);
    if (lane() == 0) groups[group] = sum;
  }
  if (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    block_sync();
  }
  if (warp() == 0) {
    Place group = place_of(groups, search->wanted, rank);
    int first = group.index * (BINS / GROUPS);
    Place bin = place_of(counts + first, group.wanted, rank);
    if (lane() == 0) {
      search->prefix = search->prefix << bits | (unsigned)(first + bin.index);
      search->wanted = bin.wanted;
      search->inside = bin.inside;
      search->above_before += group.above_before + bin.above_before;
      search->inside_before = bin.inside_before;
    }
  }
  block_sync();
}

// The prefix of all 32 bits, of a search that has at most FEW keys left, all of them listed.
__device__ inline Search compare_few(const Search& search, const unsigned* entries) {
  unsigned own = lane() < search.inside ? listed_key(entries[lane()], search.prefix) : 0;
  int greater = 0, equal = 0;
  for (int i = 0; i < search.inside; i++) {
    unsigned other = listed_key(entries[i], search.prefix);
    greater += other > own, equal += other == own;
  }
  bool is_last = lane() < search.inside && greater < search.wanted &&
                 search.wanted <= greater + equal;
  int source = first_one(lanes_with(is_last));
  Search done = search;
  done.prefix = (unsigned)from_lane((int)own, source);
  done.wanted = search.wanted - from_lane(greater, source);
  done.inside = from_lane(equal, source);
  return done;
}

// How many are above the threshold, and equal to it: in earlier lanes and runs, and where lists go.
struct Taken {
  int above, tied, ties, origin;
  __device__ int place() const { return above + min(tied, ties) - origin; }
};

// Of four counts below 129, a byte each: the sums over earlier lanes; in `all`, over all lanes.
__device__ inline unsigned sums_before(unsigned counts, unsigned* all) {
  unsigned sums = counts;
  for (int by = 1; by < 32; by *= 2) {
    unsigned more = (unsigned)lanes_before((int)sums, by);
    if (lane() >= by) sums += more;
  }
  *all = (unsigned)from_lane((int)sums, 31);
  return sums - counts;
}

// Positions, from the part's first on, of a batch's keys that are kept, to their places in `kept`.
__device__ inline void keep_runs(const Part& part, int first, int end, unsigned threshold,
                                 Taken& taken, int* kept) {
  Keys keys[BATCH];
  unsigned over = 0, same = 0, all_over, all_same = 0, same_before = 0;
#pragma unroll
  for (int run = 0; run < BATCH; run++) {
    int at = first + run * RUN + 4 * lane();
    keys[run] = at < end ? keys_at(part, at) : Keys{{0, 0, 0, 0}};
    for (int i = 0; i < 4; i++) {
      over += (unsigned)(keys[run].of[i] > threshold) << 8 * run;
      same += (unsigned)(keys[run].of[i] == threshold) << 8 * run;
    }
  }
  unsigned over_before = sums_before(over, &all_over);
  bool some_tied = lanes_with(same);
  if (some_tied) same_before = sums_before(same, &all_same);
#pragma unroll
  for (int run = 0; run < BATCH; run++) {
    int at = first + run * RUN + 4 * lane();
    Taken own = taken;
    own.above += over_before >> 8 * run & 255, own.tied += same_before >> 8 * run & 255;
    int* to = kept + own.place();
    for (int i = 0; i < 4; i++) {
      if (keys[run].of[i] > threshold) *to++ = at + i;
      if (some_tied && keys[run].of[i] == threshold && own.tied++ < taken.ties) *to++ = at + i;
    }
    taken.above += all_over >> 8 * run & 255, taken.tied += all_same >> 8 * run & 255;
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1024 / THREADS)
topk_slots(const float* logits, const int* table, const int* rows, const int* kv_lens, int* out,
           int width, int length, int pages, int k, int held) {
  SHARED_SPACE(space);
  int* counts = (int*)space;               // [2, BINS], then [LAST_BINS]
  unsigned* entries = (unsigned*)counts + 2 * BINS + LAST_BINS;  // [LISTED]
  int* groups = counts + 3 * BINS;         // [3, GROUPS]
  int* warps_above = groups + 3 * GROUPS;  // [32]
  int* warps_tied = warps_above + 32;      // [32]
  int* listed = warps_tied + 32;           // [1]
  Search* common = (Search*)(listed + 1);
  int* kept = listed + 48;                 // [k]
  Part part;
  part.keys = (unsigned*)(kept + (k + 3) / 4 * 4);  // [held]
  part.held = held;
  int* own_pages = (int*)part.keys + held;          // of the part

  for (int at = 4 * thread(); at < 2 * BINS + LAST_BINS; at += 4 * THREADS)
    *(int4*)(counts + at) = make_int4(0, 0, 0, 0);
  if (thread() < 32) warps_above[thread()] = warps_tied[thread()] = 0;
  if (thread() == 0) *common = Search{0, k, 0, 0, 0}, *listed = 0;
  int query = block() / CLUSTER, rank = block() % CLUSTER, base = warp() * RUN;
  const float* row = logits + (long long)query * length;
  Runs runs;
  follow();
  // Where the part begins is known here: loads need not wait for the row's length.
  if (CLUSTER == 1) load_runs(runs, row, base, length);
  int whole = min(kv_lens[query], length);
  const int* table_row = table + (long long)rows[query / width] * pages;
  out += (long long)query * k;
  if (whole <= k) {  // of every block of the row alike
    for (int at = rank * THREADS + thread(); at < k; at += CLUSTER * THREADS)
      out[at] = at < whole ? table_row[at / PAGE] * PAGE + at % PAGE : -1;
    return;
  }
  int each = ((whole + CLUSTER - 1) / CLUSTER + 3) / 4 * 4;
  int start = min(rank * each, whole);
  part.scores = row + start;
  part.count = min(each, whole - start);
  if (CLUSTER > 1) load_runs(runs, part.scores, base, part.count);
  int first_page = start / PAGE, last_page = (start + part.count + PAGE - 1) / PAGE;
  int page = first_page + thread();
  int known = page < last_page ? table_row[page] : 0;
  block_sync();
  while (base < part.count) {
    hold_runs(runs, part, base, counts);
    base += BATCH * WARPS * RUN;
    if (base < part.count) load_runs(runs, part.scores, base, part.count);
  }
  // Stored this late, because who stores a number waits for it.
  if (page < last_page) own_pages[page - first_page] = known;
  for (page += THREADS; page < last_page; page += THREADS)
    own_pages[page - first_page] = table_row[page];

  int share = ((part.count + WARPS - 1) / WARPS + RUN - 1) / RUN * RUN;
  int begin = warp() * share, end = min(begin + share, part.count);
  narrow(counts, groups, common, rank, 12);
  int left = 20, bin = (int)common->prefix, above = 0, count = -1;  // count: of what is listed
  if (common->inside != common->wanted) {
    bool is_worth = CLUSTER == 1 || part.count >= WORTH;
    if (is_worth && counts[bin] <= LISTED) {
      above = list_bin(part, bin, listed, entries, begin, end);
      above = warp_sum(above);
      if (lane() == 0) warps_above[warp()] = above;
      block_sync();
      count = *listed;
    }
    if (CLUSTER > 1 || common->inside > FEW) {
      count_bins<8, 12>(part, entries, count, bin, counts + BINS, common->prefix, begin, end);
      narrow(counts + BINS, groups + GROUPS, common, rank, 12);
      left = 8;
      if (common->inside != common->wanted) {
        count_bins<0, 8>(part, entries, count, bin, counts + 2 * BINS, common->prefix, begin, end);
        narrow(counts + 2 * BINS, groups + 2 * GROUPS, common, rank, 8);
        left = 0;
      }
    }
  }
  if (CLUSTER > 1) cluster_arrive();  // nobody's counts are read any more
  Search search = *common;
  if (CLUSTER == 1 && left == 20 && search.inside != search.wanted) {
    search = compare_few(search, entries);
    left = 0;
  }

  // A bin that is wanted whole is above the threshold.
  bool all_in = search.inside == search.wanted;
  unsigned threshold = (search.prefix << left) - all_in;
  int ties = all_in ? 0 : search.wanted;
  int tied = 0;
  if (count >= 0) {
    for (int at = thread(); at < count; at += THREADS) {
      unsigned entry = entries[at], key = listed_key(entry, bin);
      if (key > threshold) count_one(warps_above + (entry >> 20));
      if (key == threshold) count_one(warps_tied + (entry >> 20));
    }
  } else {
    above = 0;
    for (int at = begin + 4 * lane(); at < end; at += RUN) {
      Keys keys = keys_at(part, at);
      for (int i = 0; i < 4; i++) above += keys.of[i] > threshold, tied += keys.of[i] == threshold;
    }
    above = warp_sum(above), tied = warp_sum(tied);
    if (lane() == 0) warps_above[warp()] = above, warps_tied[warp()] = tied;
  }
  block_sync();
  int first_above = search.above_before + (all_in ? search.inside_before : 0);
  int first_tied = all_in ? 0 : search.inside_before;
  above = warps_above[lane()], tied = warps_tied[lane()];
  int last_above = first_above + warp_sum(above), last_tied = first_tied + warp_sum(tied);
  above = first_above + warp_sum(lane() < warp() ? above : 0);
  tied = first_tied + warp_sum(lane() < warp() ? tied : 0);
  int origin = first_above + min(first_tied, ties);
  int beyond = last_above + min(last_tied, ties);
  Taken taken = {above, tied, ties, origin};
  // Whole warps go on together, since they add up.
  for (int at = begin; at < end; at += BATCH * RUN)
    keep_runs(part, at, end, threshold, taken, kept);
  block_sync();
  for (int at = thread(); at < beyond - origin; at += THREADS) {
    int position = start % PAGE + kept[at];
    out[origin + at] = own_pages[position / PAGE] * PAGE + position % PAGE;
  }
  if (CLUSTER > 1) cluster_wait();
}
