// SPDX-License-Identifier: Apache-2.0
// The token after each query that filters, by the blocks of one cluster: as ops.choosing.choose. For
// other queries, the best of what the kernel in front found in each part of the vocabulary.
//
// The blocks keep the query's scores in shared memory, so that these are read once. What is kept of
// the tokens is a prefix of them by descending score: the keys above a threshold, and of those that
// equal it the lowest ids. The threshold is where what lies from it on up first weighs as much as is
// wanted, and is found digit by digit, from sums by digit of all blocks: for top-k a token weighs
// one, for top-p its share, and among equals the lowest ids are found by the same search. Weights
// are whole numbers, so a sum is the same in whatever order it was made. The first digit is how far
// a score is from the highest, which spreads scores over more bins than their first bits would.
//
// A token whose noise cannot lift it above the best one so far is passed over before its noise is
// known: it is at most -log(tail), see ops.choosing.gumbel.
//
// Constants: THREADS a block, CLUSTER blocks a query, STOPS ids of a row, VECTOR (queries begin at 16
// bytes and are a multiple of them long).

#define WARPS (THREADS / 32)
#define DIGIT 11
#define BINS (1 << DIGIT)
#define GROUPS 32  // of bins: one a lane
#define BATCH 4    // times four neighbours that a thread loads at once
#define MOST_IDS (1 << 2 * DIGIT)

typedef unsigned long long Mass;  // in units of 2^-32
#define ONE_TOKEN (1ull << 16)    // what a token weighs where tokens are counted

struct Query {
  const float* logits;  // of the block's tokens
  int first, count;     // of these: the first one's id, and how many there are
  int size;             // of the vocabulary
  const int* stops;     // null: none is barred
  float warm;
  long long seed;
  int position;
};

struct Four { float of[4]; };

// Tokens `at` to `at + 3` of the block, of which those before its end are read.
__device__ inline Four logits_at(const Query& query, int at) {
  Four four = {{0, 0, 0, 0}};
#if VECTOR
  if (at < query.count) {
    float4 read = *(const float4*)(query.logits + at);
    four = Four{{read.x, read.y, read.z, read.w}};
  }
#else
  for (int i = 0; i < 4; i++)
    if (at + i < query.count) four.of[i] = query.logits[at + i];
#endif
  return four;
}

// The score of token `at` of the block: -inf where it is barred.
__device__ inline float score_of(const Query& query, float logit, int at) {
  if (query.stops)
    for (int nth = 0; nth < STOPS; nth++)
      if (query.stops[nth] == query.first + at) logit = value_of(0xff800000u);
  return query.warm == 1 ? logit : logit / query.warm;
}

// In the order of float32 x: NaN as -inf, -0 as 0.
__device__ inline unsigned ordered_key(float x) {
  unsigned bits = bits_of(without_nan(x) + 0.0f);
  return bits ^ (unsigned)((int)bits >> 31 | (int)0x80000000);
}

__device__ inline float score_of_key(unsigned key) {
  return value_of(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

__device__ inline unsigned avalanche(unsigned x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

// Of a query's noise, what does not depend on the token.
__device__ inline unsigned noise_key(const Query& query) {
  unsigned low = (unsigned)query.seed, high = (unsigned)(query.seed >> 32);
  unsigned key = avalanche(avalanche(low + 0x9e3779b9u) ^ high);
  return avalanche(key ^ (unsigned)query.position * 0x9e3779b1u);
}

// A token and what it is worth; -inf: none.
struct Best { float value; int id; };

// `best`, or a sampled token behind it if that is worth more.
__device__ inline void consider(Best& best, const Query& query, unsigned key, float score, int id) {
  float short_of = score - best.value;
  if (!(short_of > -23.0f)) return;  // noise is below 22.9
  unsigned mixed = avalanche(avalanche(key ^ (unsigned)id * 0x85ebca6bu) + key);
  float tail = fminf(((float)mixed + 0.5f) * 0x1p-32f, 1 - 0x1p-24f);
  if (tail > 1.001f * expf(short_of)) return;
  float value = score - logf(-log1pf(-tail));
  if (value > best.value) best = Best{value, id};
}

__device__ inline Best better(const Best& one, const Best& other) {
  bool second = other.value > one.value || (other.value == one.value && other.id < one.id);
  return second ? other : one;
}

__device__ inline Mass mass_of_lane(Mass mass, int source) {
  unsigned high = from_lane((int)(mass >> 32), source), low = from_lane((int)mass, source);
  return (Mass)high << 32 | low;
}
__device__ inline Mass mass_behind(Mass mass, int by) {
  unsigned high = lanes_behind((int)(mass >> 32), by), low = lanes_behind((int)mass, by);
  return (Mass)high << 32 | low;
}

__device__ inline int2 pair_at(const int2* own, int rank) {
  return CLUSTER == 1 ? *own : pair_of_block((const int*)own, rank);
}

struct Search {
  unsigned prefix;  // the upper digits of the threshold
  Mass wanted;      // how much is wanted of the keys that begin so
  Mass inside;      // how much there is
};

struct Space {
  int2 bins[2][BINS];      // weights by digit, in units of 2^-16 and of 2^-32
  int2 groups[2][GROUPS];  // sums of neighbouring bins: upper and lower half
  int2 best[1];            // of the block
  int2 warps[32];
  Search search;
};
static_assert(sizeof(Space) == 33568, "as cluster_choice.py counts");

// Which lane's `own` a sum from the last lane on first reaches `wanted`: the lane, and what is
// wanted of it.
__device__ inline int reaching_lane(Mass own, Mass& wanted) {
  Mass sum = own;
  for (int by = 1; by < 32; by *= 2) {
    Mass more = mass_behind(sum, by);
    if (lane() + by < 32) sum += more;
  }
  int source = first_one(lanes_with(sum - own < wanted && wanted <= sum));
  wanted -= mass_of_lane(sum - own, source);
  return source;
}

// What is wanted of all that weighs `total`, if that is a share of it less `excess`.
__device__ inline Mass share_of(Mass total, Mass excess, float share) {
  double wanted = (double)(total - excess) * share;
  Mass whole = (Mass)wanted;
  return max((Mass)1, whole + (whole < wanted));
}

// One digit more of the threshold. One warp; `share` below 1: the wanted is yet unknown.
__device__ inline void narrow_by_lanes(Space* space, int turn, int bits, float share, Mass excess) {
  Mass own = 0;
  for (int rank = 0; rank < CLUSTER; rank++) {
    int2 pair = pair_at(space->groups[turn] + lane(), rank);
    own += (Mass)(unsigned)pair.x << 32 | (unsigned)pair.y;
  }
  Mass wanted = space->search.wanted;
  if (share < 1) {
    Mass total = own;
    for (int by = 16; by; by /= 2) total += mass_of_lane(total, lane() ^ by);
    wanted = share_of(total, excess, share);
  }
  int group = reaching_lane(own, wanted);
  Mass two[2] = {0, 0};
  for (int rank = 0; rank < CLUSTER; rank++)
    for (int i = 0; i < 2; i++) {
      int2 pair = pair_at(space->bins[turn] + group * (BINS / GROUPS) + 2 * lane() + i, rank);
      two[i] += ((Mass)(unsigned)pair.x << 16) + (unsigned)pair.y;
    }
  int source = reaching_lane(two[0] + two[1], wanted);
  Mass first = mass_of_lane(two[0], source), second = mass_of_lane(two[1], source);
  bool upper = wanted <= second;
  unsigned bin = group * (BINS / GROUPS) + 2 * source + upper;
  if (lane() == 0)
    space->search = Search{space->search.prefix << bits | bin, upper ? wanted : wanted - second,
                           upper ? second : first};
}

__device__ inline void clear_bins(int2* bins) {
  for (int at = thread(); at < BINS; at += THREADS) bins[at] = make_int2(0, 0);
}

// Count those `among` by a digit of every block's, then narrow the search. The other turn's bins are
// cleared.
template <class Among, class Weigh>
__device__ inline void narrow(Space* space, const Query& query, const float* scores, int& turn,
                              int shift, int bits, float share, Mass excess, const Among& among,
                              const Weigh& weigh) {
  unsigned prefix = space->search.prefix;
  for (int at = thread(); at < query.count; at += THREADS) {
    if (!among.has(scores[at])) continue;
    unsigned key = weigh.key_of(scores[at], query.first + at), high, low;
    if ((unsigned long long)key >> (shift + bits) != prefix) continue;
    weigh.weigh(scores[at], key, high, low);
    int2* bin = space->bins[turn] + (key >> shift & ((1 << bits) - 1));
    if (high) add_to(&bin->x, (int)high);
    if (low) add_to(&bin->y, (int)low);
  }
  block_sync();
  for (int group = warp(); group < GROUPS; group += WARPS) {
    const int2* own = space->bins[turn] + group * (BINS / GROUPS) + 2 * lane();
    Mass sum = 0;
    for (int i = 0; i < 2; i++) sum += ((Mass)(unsigned)own[i].x << 16) + (unsigned)own[i].y;
    for (int by = 16; by; by /= 2) sum += mass_of_lane(sum, lane() ^ by);
    if (lane() == 0) space->groups[turn][group] = make_int2((int)(sum >> 32), (int)sum);
  }
  cluster_arrive();
  cluster_wait();
  clear_bins(space->bins[1 - turn]);
  if (warp() == 0) narrow_by_lanes(space, turn, bits, share, excess);
  block_sync();
  turn = 1 - turn;
}

__device__ inline void begin_search(Space* space, unsigned prefix, Mass wanted) {
  block_sync();
  if (thread() == 0) space->search = Search{prefix, wanted, 0};
  block_sync();
}

struct Everyone {
  __device__ bool has(float) const { return true; }
};

// Sixty-fourths by which a score is below `most`; all that are far below are in the last.
#define STEPS 64.0f
__device__ inline int steps_below(float score, float most) {
  float gap = (most - score) * STEPS;
  return gap < BINS - 1 ? (int)gap : BINS - 1;  // also where both are infinite
}

struct AtSteps {
  float most;
  int steps;
  __device__ bool has(float score) const { return steps_below(score, most) == steps; }
};

// As `weigh` says, by steps.
template <class Weigh>
struct BySteps {
  float most;
  Weigh weigher;
  __device__ unsigned key_of(float score, int) const {
    return BINS - 1 - steps_below(score, most);
  }
  __device__ void weigh(float score, unsigned, unsigned& high, unsigned& low) const {
    weigher.weigh(score, weigher.key_of(score, 0), high, low);
  }
};

// From the top: the key at which `wanted`, or a share of all less `excess`, is reached.
template <class Weigh>
__device__ inline Search search_keys(Space* space, const Query& query, const float* scores,
                                     int& turn, float most, Mass wanted, float share, Mass excess,
                                     const Weigh& weigh) {
  begin_search(space, 0, wanted);
  BySteps<Weigh> by_steps = {most, weigh};
  narrow(space, query, scores, turn, 0, DIGIT, share, excess, Everyone(), by_steps);
  AtSteps among = {most, BINS - 1 - (int)space->search.prefix};
  // Most often all keys there begin alike: those of scores a step further on either side do.
  unsigned upper = ordered_key(most - (among.steps - 1) / STEPS) >> 21;
  unsigned lower = ordered_key(most - (among.steps + 2) / STEPS) >> 21;
  bool alike = upper == lower && among.steps < BINS - 1;
  begin_search(space, alike ? upper : 0, space->search.wanted);
  if (!alike) narrow(space, query, scores, turn, 21, 11, 1, 0, among, weigh);
  narrow(space, query, scores, turn, 10, 11, 1, 0, among, weigh);
  narrow(space, query, scores, turn, 0, 10, 1, 0, among, weigh);
  return space->search;
}

struct Count {
  __device__ unsigned key_of(float score, int) const { return ordered_key(score); }
  __device__ void weigh(float, unsigned, unsigned& high, unsigned& low) const { high = 1, low = 0; }
};

// A token's share over the likeliest one's, in two pieces.
struct Shares {
  float most;
  unsigned lowest;  // keys below it weigh nothing
  __device__ unsigned key_of(float score, int) const { return ordered_key(score); }
  __device__ void weigh(float score, unsigned key, unsigned& high, unsigned& low) const {
    high = score == most ? 1 << 16 : 0, low = 0;
    if (key < lowest || !(score - most > -24) || high) return;
    float share = expf(score - most) * 0x1p16f;
    high = (unsigned)share;
    low = (unsigned)((share - (float)high) * 0x1p16f + 0.5f);
  }
  __device__ Mass of_key(unsigned key) const {
    unsigned high, low;
    weigh(score_of_key(key), key, high, low);
    return ((Mass)high << 16) + low;
  }
};

// Among those whose key is `equal`, the lowest ids first.
struct Ids {
  unsigned equal;
  __device__ unsigned key_of(float, int id) const { return MOST_IDS - 1 - id; }
  __device__ void weigh(float score, unsigned, unsigned& high, unsigned& low) const {
    high = ordered_key(score) == equal, low = 0;
  }
};

struct Kept {
  unsigned key;  // what is above it is kept,
  int last;      // and what equals it up to this id
};

struct Filter { int top_k; float top_p, min_p; };

// What `filter` leaves of scores of which `most` is the highest, above -inf.
__device__ inline Kept kept_by(const Filter& filter, Space* space, const Query& query,
                               const float* scores, float most) {
  int turn = 0;
  unsigned key = 0;
  Mass ties = query.size, equals = 0;
  if (filter.top_k > 0 && filter.top_k < query.size) {
    Mass wanted = filter.top_k * ONE_TOKEN;
    Search found = search_keys(space, query, scores, turn, most, wanted, 1, 0, Count());
    key = found.prefix, ties = found.wanted / ONE_TOKEN, equals = found.inside / ONE_TOKEN;
  }
  if (filter.top_p < 1) {
    Shares shares = {most, key};
    Mass excess = key ? (equals - ties) * shares.of_key(key) : 0;
    Search found =
        search_keys(space, query, scores, turn, most, 0, filter.top_p, excess, shares);
    Mass each = shares.of_key(found.prefix), some = (found.wanted + each - 1) / each;
    ties = found.prefix == key ? min(ties, some) : some;
    key = found.prefix, equals = found.inside / each;
  }
  if (filter.min_p > 0) {
    unsigned floor = ordered_key(most + logf(filter.min_p));
    if (floor > key) key = floor, ties = equals = 0;
  }
  if (ties >= equals) return Kept{key, query.size};
  begin_search(space, 0, ties * ONE_TOKEN);
  narrow(space, query, scores, turn, DIGIT, DIGIT, 1, 0, Everyone(), Ids{key});
  narrow(space, query, scores, turn, 0, DIGIT, 1, 0, Everyone(), Ids{key});
  return Kept{key, MOST_IDS - 1 - (int)space->search.prefix};
}

// The best of all blocks' threads, and whether any of them is `broken`. Everyone knows it after.
__device__ inline Best best_of_all(Space* space, Best best, bool& broken) {
  if (lanes_with(broken)) best = Best{value_of(0x7f800000u), -1};
  for (int by = 16; by; by /= 2)
    best = better(best, Best{xor_lane(best.value, by), from_lane(best.id, lane() ^ by)});
  if (lane() == 0) space->warps[warp()] = make_int2((int)bits_of(best.value), best.id);
  block_sync();
  Best all = {value_of(0xff800000u), 0x7fffffff};
  for (int i = 0; i < WARPS; i++) {
    int2 pair = space->warps[i];
    all = better(all, Best{value_of((unsigned)pair.x), pair.y});
  }
  if (CLUSTER > 1) {
    if (thread() == 0) space->best[0] = make_int2((int)bits_of(all.value), all.id);
    cluster_arrive();
    cluster_wait();
    for (int rank = 0; rank < CLUSTER; rank++) {
      int2 pair = pair_at(space->best, rank);
      all = better(all, Best{value_of((unsigned)pair.x), pair.y});
    }
    cluster_arrive();  // before anyone writes there again, or ends
    cluster_wait();
  } else {
    block_sync();
  }
  broken = all.id < 0;
  return all;
}

// Of a query that does not filter, by one warp: the best of its parts, NaN where one is broken.
__device__ inline int best_of_parts(const float* values, const int* ids, int parts) {
  Best best = {value_of(0xff800000u), 0x7fffffff};
  bool broken = false;
  for (int part = lane(); part < parts; part += 32) {
    broken |= values[part] != values[part];
    best = better(best, Best{values[part], ids[part]});
  }
  for (int by = 16; by; by /= 2)
    best = better(best, Best{xor_lane(best.value, by), from_lane(best.id, lane() ^ by)});
  return lanes_with(broken) || best.value == value_of(0xff800000u) ? -1 : best.id;
}

// The scores of the block's tokens, all of them kept; the best of them, and whether one is NaN.
__device__ inline Best load_scores(const Query& query, float* scores, bool& broken) {
  Best best = {value_of(0xff800000u), 0x7fffffff};
  for (int base = 4 * thread(); base < query.count; base += 4 * BATCH * THREADS) {
    Four read[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) read[i] = logits_at(query, base + 4 * i * THREADS);
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      for (int j = 0; j < 4; j++) {
        int at = base + 4 * i * THREADS + j;
        if (at >= query.count) break;
        float score = score_of(query, read[i].of[j], at);
        broken |= score != score;
        scores[at] = score;
        if (score > best.value) best = Best{score, query.first + at};
      }
  }
  return best;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1024 / THREADS)
choose_tokens(const float* logits, const int* positions, const int* rows, const float* temperature,
              const int* top_k, const float* top_p, const float* min_p, const long long* seeds,
              const int* stop_ids, const int* minimum_lens, const float* part_values,
              const int* part_ids, int* out, int choices, int size, int parts) {
  SHARED_SPACE(memory);
  Space* space = (Space*)memory;
  float* scores = (float*)(space + 1);
  follow();
  int nth = block() / CLUSTER, rank = block() % CLUSTER;
  long long row = rows[nth / choices];
  Filter filter = {top_k[row], top_p[row], min_p[row]};
  float warm = temperature[row];
  bool limited = filter.top_k > 0 && filter.top_k < size;
  if (!(warm > 0 && (limited || filter.top_p < 1 || filter.min_p > 0))) {  // all blocks alike
    if (rank == 0 && warp() == 0) {
      long long first = (long long)nth * parts;
      int id = best_of_parts(part_values + first, part_ids + first, parts);
      if (lane() == 0) out[nth] = id;
    }
    return;
  }
  int each = ((size + CLUSTER - 1) / CLUSTER + 3) / 4 * 4;
  Query query;
  query.first = min(rank * each, size), query.count = min(each, size - query.first);
  query.logits = logits + (long long)nth * size + query.first, query.size = size;
  query.warm = warm, query.seed = seeds[row], query.position = positions[nth];
  query.stops = query.position + 1 < minimum_lens[row] ? stop_ids + row * STOPS : nullptr;
  const Best none = {value_of(0xff800000u), 0x7fffffff};
  clear_bins(space->bins[0]);
  bool broken = false;
  Best best = load_scores(query, scores, broken);
  Best all = best_of_all(space, best, broken);
  if (!broken && all.value > none.value) {
    Kept kept = kept_by(filter, space, query, scores, all.value);
    unsigned key = noise_key(query);
    best = none;
    for (int at = thread(); at < query.count; at += THREADS) {
      float score = scores[at];
      int id = query.first + at;
      unsigned own = ordered_key(score);
      if (own > kept.key || (own == kept.key && id <= kept.last))
        consider(best, query, key, score, id);
    }
    all = best_of_all(space, best, broken);
  }
  if (rank == 0 && thread() == 0) out[nth] = broken || all.value == none.value ? -1 : all.id;
}
