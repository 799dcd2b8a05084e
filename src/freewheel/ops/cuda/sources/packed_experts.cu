// SPDX-License-Identifier: Apache-2.0
// One projection of MXFP4 experts, for some of each expert's tokens: as ops.quantised.mxfp4_experts.
//
// Sixteen bytes of a row are the 32 inputs that share a scale, and one thread reads them. A word of
// them is eight inputs, which become four pairs in registers: inputs p and p + 4 are 16 bits apart,
// so both are moved at once, and the tokens' elements are paired alike. A pair is multiplied by its
// scale, exactly, so the four threads that share a row may hold four groups of it, and a product
// adds up inputs of all of them. Every slice of the inputs has a warp; their sums are added in
// ascending order.
//
// Scales and what comes of them are 2^30 too small, and sums are multiplied at the end. Where a
// scale is beyond 2^-96 .. 2^31, a step multiplies twice. (What is below 2^-132 then is lost.)
//
// Constants: DOWN (0: gates and ups, and what lies between; 1: the projection behind it), FEW (a
// block finds its tokens among all; else they are listed), TOP_K, INPUTS and WIDTH of the hidden
// layer, HIDDEN, TILES of 16 rows a warp (of gates and ups in turn), COLUMNS of 8 tokens, SLICES,
// CHUNKS of 128 inputs a step, DEPTH of steps ahead (divides TILES), CLAMP, BLOCKS of a
// multiprocessor at least.

#define INPUTS (DOWN ? WIDTH : HIDDEN)
#define THREADS (32 * SLICES)
#define TOKENS (8 * COLUMNS)
#define STEPS (INPUTS / (128 * CHUNKS * SLICES))
#define ROW (INPUTS / 2)     // bytes of a row's codes
#define FACTORS (INPUTS / 32)  // and of its scales
#define SPAN (DOWN ? 16 * TILES : 8 * TILES)  // outputs of a block

#define SIGNS 0x80008000u
#define SIZES 0x01c001c0u  // where the last bits of an exponent and the first of a mantissa are

struct Four { unsigned of[4]; };

// Eight e2m1 of a word as pairs of 2^-126 times their values: inputs 0 and 4, 1 and 5, ..
__device__ inline Four pairs_of(unsigned word) {
  unsigned low = apart(word >> 6);
  Four pairs;
  pairs.of[0] = (word << 12 & SIGNS) | (word << 6 & SIZES);
  pairs.of[1] = (word << 8 & SIGNS) | (word << 2 & SIZES);
  pairs.of[2] = (word << 4 & SIGNS) | (low << 4 & SIZES);
  pairs.of[3] = (word & SIGNS) | (low & SIZES);
  return pairs;
}

// Eight elements of a token, paired as `pairs_of` pairs inputs.
__device__ inline Four paired(uint4 eight) {
  return Four{{bytes_of(eight.x, eight.z, 0x5410), bytes_of(eight.x, eight.z, 0x7632),
               bytes_of(eight.y, eight.w, 0x5410), bytes_of(eight.y, eight.w, 0x7632)}};
}

struct Step {
  uint4 codes[CHUNKS][2];      // of the rows lane / 4 and 8 further on
  unsigned scales[CHUNKS][2];  // of four groups
};

// A thread's first bytes of its first row.
struct Weights {
  const unsigned char *codes, *scales;
};

// Rows between the first of tile 0 and of tile `i`.
__device__ inline long long row_of_tile(int i) {
  return DOWN ? 16 * i : i / 2 * 16 + i % 2 * WIDTH;
}

__device__ inline void load_step(Step& step, const Weights& own, int nth, int tile) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    long long row = row_of_tile(tile) + 8 * half;
    const unsigned char* scales = own.scales + row * FACTORS + nth * 4 * CHUNKS;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
      step.codes[c][half] = read_once(own.codes + row * ROW + (nth * CHUNKS + c) * 64);
#if CHUNKS == 2
    uint2 both = *(const uint2*)scales;
    step.scales[0][half] = both.x, step.scales[1][half] = both.y;
#else
    step.scales[0][half] = *(const unsigned*)scales;
#endif
  }
}

// Whether all scales of the warp's step can be met with one multiplication: codes 31 to 158.
__device__ inline bool is_plain(const Step& step) {
  unsigned plain = 0x80808080u;
#pragma unroll
  for (int i = 0; i < 2 * CHUNKS; i++) plain &= step.scales[i / 2][i % 2] + 0x61616161u;
  return lanes_with(plain != 0x80808080u) == 0;
}

// 2^(code - 127 - 30), twice, from a group's code; times 2^126 if not `exact`, for codes 31 to 158.
template <bool exact>
__device__ inline unsigned factor_of(unsigned scales) {
  unsigned which = lane() & 3;
  if (!exact) return bytes_of(scales, 0, which | 4 << 4 | which << 8 | 4 << 12) * 128 + 0x30003000u;
  int code = scales >> 8 * which & 255;
  unsigned bits = code == 255 ? 0x7fc0 : code > 30 ? (code - 30) << 7 : code > 22 ? 1 << (code - 24) : 0;
  return bits | bits << 16;
}

__device__ inline unsigned word_of(const uint4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

typedef float Sums[TILES][COLUMNS][4];
typedef Four Tokens[CHUNKS][COLUMNS][4];

template <bool exact>
__device__ inline void multiply_step(float (&sums)[COLUMNS][4], const Step& step,
                                     const Tokens& tokens) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    unsigned factors[2] = {factor_of<exact>(step.scales[c][0]), factor_of<exact>(step.scales[c][1])};
#pragma unroll
    for (int word = 0; word < 4; word++) {
      Four rows[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        rows[half] = pairs_of(word_of(step.codes[c][half], word));
#pragma unroll
        for (int p = 0; p < 4; p++) {
          if (exact) rows[half].of[p] = times(rows[half].of[p], 0x7e807e80u);  // 2^126
          rows[half].of[p] = times(rows[half].of[p], factors[half]);
        }
      }
#pragma unroll
      for (int p = 0; p < 4; p += 2) {
        unsigned left[4] = {rows[0].of[p], rows[1].of[p], rows[0].of[p + 1], rows[1].of[p + 1]};
#pragma unroll
        for (int k = 0; k < COLUMNS; k++)
          add_product(sums[k], left, tokens[c][k][word].of[p], tokens[c][k][word].of[p + 1]);
      }
    }
  }
}

// A thread's elements of its tokens: 32 of each chunk. `x`: to the first; null: there is no token.
__device__ inline void load_tokens(Tokens& tokens, const unsigned short* const (&x)[COLUMNS],
                                   int nth) {
#pragma unroll
  for (int k = 0; k < COLUMNS; k++)
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int word = 0; word < 4; word++) {
        uint4 eight = make_uint4(0, 0, 0, 0);
        if (x[k]) eight = *(const uint4*)(x[k] + (nth * CHUNKS + c) * 128 + word * 8);
        tokens[c][k][word] = paired(eight);
      }
}

// Which pairs a block of `FEW` computes: those of its own pair's expert, eight at a time. Returns
// the expert; -1 if an earlier pair's block has this one.
__device__ inline int find_pairs(const int* ids, int own, int count, int* pairs) {
  int expert = read_fresh(ids + own), before = 0, rank = 0;
  if (thread() < TOKENS) pairs[thread()] = -1;
  block_sync();
  for (int pass = 0; pass < 2; pass++) {
    rank = 0;
    for (int at = 0; at < count; at += 32) {
      int pair = at + lane();
      bool same = pair < count && read_fresh(ids + min(pair, count - 1)) == expert;
      unsigned bits = lanes_with(same), lower = (1u << lane()) - 1;
      if (pass == 0) {
        int ahead = own - at;
        before += ones_in(ahead >= 32 ? bits : ahead <= 0 ? 0 : bits & ((1u << ahead) - 1));
      } else {
        int place = rank + ones_in(bits & lower) - before;
        if (same && place >= 0 && place < TOKENS && warp() == 0) pairs[place] = pair;
      }
      rank += ones_in(bits);
    }
  }
  block_sync();
  return before % TOKENS ? -1 : expert;
}

__device__ inline int list_pairs(const int* experts, const int* lanes, int tile, int* pairs) {
  if (thread() < TOKENS) pairs[thread()] = read_fresh(lanes + tile * TOKENS + thread());
  int expert = read_fresh(experts + tile);
  block_sync();
  return expert;
}

// silu(gate) * up, clamped as ops.clamped does.
__device__ inline float between(float gate, float up, float limit) {
#if CLAMP
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
#endif
  return gate / (1 + expf(-gate)) * up;
}

// A warp's sums to shared memory, for `summed`.
__device__ inline void leave(const Sums& sums, float* space) {
#pragma unroll
  for (int i = 0; i < TILES * COLUMNS * 4; i++)
    space[(warp() * TILES * COLUMNS * 4 + i) * 32 + lane()] =
        sums[i / (4 * COLUMNS)][i / 4 % COLUMNS][i % 4];
}
__device__ inline float summed(const float* space, int tile, int column, int nth) {
  float total = 0;
  for (int slice = 0; slice < SLICES; slice++)
    total += space[((slice * TILES + tile) * COLUMNS * 4 + column * 4 + nth) * 32 + lane()];
  return total * 0x1p30f;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
packed_experts(const unsigned short* x, const unsigned char* codes, const unsigned char* scales,
               const int* experts, const int* lanes, const float* shares, void* out, float limit,
               int count) {
  SHARED_SPACE(space);
  int* pairs = (int*)space;
  float* left = (float*)(space + 4 * TOKENS);
  int parts = (DOWN ? HIDDEN : WIDTH) / SPAN, tile = block() / parts, first = block() % parts * SPAN;
  if (!DOWN) wait_before();
  if (!DOWN && FEW) let_next();
  int expert = FEW ? find_pairs(experts, tile, count, pairs) : list_pairs(experts, lanes, tile, pairs);
  if (expert < 0) {
    if (DOWN) wait_before();
    return;
  }
  int group = lane() / 4, quarter = lane() % 4;
  long long line = (long long)expert * (DOWN ? HIDDEN : 2 * WIDTH) + first + group;
  int begin = warp() * STEPS * CHUNKS;  // chunks before the warp's own
  Weights own = {codes + line * ROW + begin * 64 + quarter * 16, scales + line * FACTORS + begin * 4};
  Step ahead[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; d++)
    if (d / TILES < STEPS) load_step(ahead[d], own, d / TILES, d % TILES);
  if (DOWN) wait_before();
  const unsigned short* mine[COLUMNS];
#pragma unroll
  for (int k = 0; k < COLUMNS; k++) {
    int pair = pairs[8 * k + group];
    long long row = DOWN ? pair : pair / TOP_K;
    mine[k] = pair < 0 ? nullptr : x + row * INPUTS + begin * 128 + quarter * 32;
  }
  Sums sums = {};
#pragma unroll 1
  for (int nth = 0; nth < STEPS; nth++) {
    Tokens tokens;
    load_tokens(tokens, mine, nth);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      Step& step = ahead[i % DEPTH];
      if (is_plain(step))
        multiply_step<false>(sums[i], step, tokens);
      else
        multiply_step<true>(sums[i], step, tokens);
      int next = nth + (i + DEPTH) / TILES;
      if (next < STEPS) load_step(step, own, next, (i + DEPTH) % TILES);
    }
  }
  if (DOWN || !FEW) let_next();
  leave(sums, left);
  block_sync();
  for (int i = warp(); i < TILES * COLUMNS * 4 / (DOWN ? 1 : 2); i += SLICES) {
    int at = i / (4 * COLUMNS), column = i / 4 % COLUMNS, nth = i % 4;
    int pair = pairs[8 * column + 2 * quarter + nth % 2];
    long long row = first + 16 * at + group + nth / 2 * 8;
    if (pair < 0) continue;
#if DOWN
    ((float*)out)[(long long)pair * HIDDEN + row] = summed(left, at, column, nth) * shares[pair];
#else
    float gate = summed(left, 2 * at, column, nth), up = summed(left, 2 * at + 1, column, nth);
    ((unsigned short*)out)[(long long)pair * WIDTH + row] = rounded_pair(between(gate, up, limit), 0);
#endif
  }
}
