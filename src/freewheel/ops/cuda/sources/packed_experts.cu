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
// A shared expert in FP8, as wide as the others, may stand in front; its products are scaled behind
// every 128 inputs, in float32.
//
// Constants: DOWN (0: gates and ups, and what lies between; 1: the projection behind it), FEW (a
// block finds its tokens among all; else they are listed), TOP_K, HIDDEN and WIDTH of an expert,
// EXTRA (1: there is a shared one), TILES of 16 rows a warp (of gates and ups in turn), COLUMNS of 8
// tokens, SLICES, DEPTH of steps ahead (divides TILES; a step is 128 inputs of a tile), CLAMP, BLOCKS
// of a multiprocessor at least.

#define INPUTS (DOWN ? WIDTH : HIDDEN)
#define THREADS (32 * SLICES)
#define TOKENS (8 * COLUMNS)
#define CHUNKS (INPUTS / 128 / SLICES)  // of a warp
#define ROW (INPUTS / 2)       // bytes of a row's codes
#define FACTORS (INPUTS / 32)  // and of its scales
#define SPAN (DOWN ? 16 * TILES : 8 * TILES)  // outputs of a block

#define SIGNS 0x80008000u
#define SIZES 0x01c001c0u  // where the last bits of an exponent and the first of a mantissa are

struct Four { unsigned of[4]; };

// Eight e2m1 of a word as pairs of 2^-126 times their values: inputs 0 and 4, 1 and 5, .. A product
// moves a code to where its sign belongs, and to where the rest of it does.
__device__ inline Four pairs_of(unsigned word) {
  unsigned moved = word >> 6;  // signs of the last stand where they belong already
  return Four{{(word & 0x000f000fu) * 0x1040u & (SIGNS | SIZES),
               (word & 0x00f000f0u) * 0x0104u & (SIGNS | SIZES),
               (moved & 0x003c003cu) * 0x0410u & (SIGNS | SIZES),
               (word & SIGNS) | (moved & SIZES)}};
}

// Eight elements of a token, paired as `pairs_of` pairs inputs.
__device__ inline Four paired(uint4 eight) {
  return Four{{bytes_of(eight.x, eight.z, 0x5410), bytes_of(eight.x, eight.z, 0x7632),
               bytes_of(eight.y, eight.w, 0x5410), bytes_of(eight.y, eight.w, 0x7632)}};
}

struct Step {
  uint4 codes[2];      // of the rows lane / 4 and 8 further on
  unsigned scales[2];  // of four groups
};

// A thread's first bytes of its first row.
struct Weights {
  const unsigned char *codes, *scales;
};

// Rows between the first of tile 0 and of tile `i`.
__device__ inline long long row_of_tile(int i) {
  return DOWN ? 16 * i : i / 2 * 16 + i % 2 * WIDTH;
}

// The warp's chunk `nth` of a tile. Warps take chunks in turn, so together they read on in a row.
__device__ inline void load_step(Step& step, const Weights& own, int nth, int tile) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    long long row = row_of_tile(tile) + 8 * half;
    step.codes[half] = read_once(own.codes + row * ROW + nth * SLICES * 64);
    step.scales[half] = *(const unsigned*)(own.scales + row * FACTORS + nth * SLICES * 4);
  }
}

// Whether all scales of the warp's step can be met with one multiplication: codes 31 to 158.
__device__ inline bool is_plain(const Step& step) {
  unsigned plain = step.scales[0] + 0x61616161u & step.scales[1] + 0x61616161u & 0x80808080u;
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
typedef Four Chunk[COLUMNS][4];

// sums += a fragment of 16 rows times two words of the tokens' pairs.
__device__ inline void multiply_rows(float (&sums)[COLUMNS][4], const Four (&rows)[2],
                                     const Chunk& tokens, int word) {
#pragma unroll
  for (int p = 0; p < 4; p += 2) {
    unsigned left[4] = {rows[0].of[p], rows[1].of[p], rows[0].of[p + 1], rows[1].of[p + 1]};
#pragma unroll
    for (int k = 0; k < COLUMNS; k++)
      add_product(sums[k], left, tokens[k][word].of[p], tokens[k][word].of[p + 1]);
  }
}

template <bool exact>
__device__ inline void multiply_step(float (&sums)[COLUMNS][4], const Step& step,
                                     const Chunk& tokens) {
  unsigned factors[2] = {factor_of<exact>(step.scales[0]), factor_of<exact>(step.scales[1])};
#pragma unroll
  for (int word = 0; word < 4; word++) {
    Four rows[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      rows[half] = pairs_of(word_of(step.codes[half], word));
#pragma unroll
      for (int p = 0; p < 4; p++) {
        if (exact) rows[half].of[p] = times(rows[half].of[p], 0x7e807e80u);  // 2^126
        rows[half].of[p] = times(rows[half].of[p], factors[half]);
      }
    }
    multiply_rows(sums, rows, tokens, word);
  }
}

// A thread's elements of its tokens in a chunk. `x`: to those of chunk 0; null: there is no token.
typedef const unsigned short* Places[COLUMNS];
__device__ inline void load_chunk(Chunk& tokens, const Places& x, int chunk) {
#pragma unroll
  for (int k = 0; k < COLUMNS; k++)
#pragma unroll
    for (int word = 0; word < 4; word++) {
      uint4 eight = make_uint4(0, 0, 0, 0);
      if (x[k]) eight = *(const uint4*)(x[k] + chunk * 128 + word * 8);
      tokens[k][word] = paired(eight);
    }
}

// Eight e4m3 of two words as pairs of their values, paired as `pairs_of` does.
__device__ inline Four bytes_as_pairs(unsigned first, unsigned second) {
  Four pairs;
#pragma unroll
  for (int p = 0; p < 4; p++) {
    unsigned both = bytes_of(first, second, p << 4 | (4 + p) << 12);
    pairs.of[p] = times((both & SIGNS) | (both >> 4 & 0x07f007f0u), 0x7b807b80u);  // 2^120
  }
  return pairs;
}

// sums += the shared expert's rows from `own` on times a chunk; a thread has 32 bytes of a row.
__device__ inline void multiply_bytes(float (&sums)[COLUMNS][4], const unsigned char* own,
                                      float scale, const Chunk& tokens) {
  uint4 codes[2][2];
#pragma unroll
  for (int i = 0; i < 4; i++) codes[i / 2][i % 2] = read_once(own + i / 2 * 8 * INPUTS + i % 2 * 16);
  float part[COLUMNS][4] = {};
#pragma unroll
  for (int word = 0; word < 4; word++) {
    Four rows[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4& four = codes[half][word / 2];
      rows[half] = word % 2 ? bytes_as_pairs(four.z, four.w) : bytes_as_pairs(four.x, four.y);
    }
    multiply_rows(part, rows, tokens, word);
  }
#pragma unroll
  for (int i = 0; i < 4 * COLUMNS; i++) sums[i / 4][i % 4] += part[i / 4][i % 4] * (scale * 0x1p-30f);
}

// A warp's sums of the shared expert, `TILES` tiles of rows from `first` on.
__device__ inline void add_shared(Sums& sums, const unsigned char* codes, const float* scales,
                                  int first, const Places& x) {
#pragma unroll 1
  for (int chunk = warp(); chunk < INPUTS / 128; chunk += SLICES) {
    Chunk tokens;
    load_chunk(tokens, x, chunk);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      int row = first + (int)row_of_tile(i), block = row / 128;
      const unsigned char* own = codes + (long long)(row + lane() / 4) * INPUTS;
      multiply_bytes(sums[i], own + chunk * 128 + lane() % 4 * 32,
                     scales[block * (INPUTS / 128) + chunk], tokens);
    }
  }
}

// Which pairs a block of `FEW` computes: those of its own pair's expert, eight at a time. Returns
// the expert; -1 if an earlier pair's block has this one.
#define MOST ((8 * TOP_K + 31) / 32)  // pairs of a lane
__device__ inline int find_pairs(const int* ids, int own, int count, int* pairs) {
  int expert = read_fresh(ids + own), all[MOST], before = 0, rank = 0;
#pragma unroll
  for (int i = 0; i < MOST; i++) all[i] = read_fresh(ids + min(32 * i + lane(), count - 1));
  unsigned bits[MOST];
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    bits[i] = lanes_with(all[i] == expert && 32 * i + lane() < count);
    int ahead = own - 32 * i;
    before += ones_in(ahead >= 32 ? bits[i] : ahead <= 0 ? 0 : bits[i] & ((1u << ahead) - 1));
  }
  if (thread() < TOKENS) pairs[thread()] = -1;
  block_sync();
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    int place = rank + ones_in(bits[i] & ((1u << lane()) - 1)) - before;
    bool mine = bits[i] >> lane() & 1;
    if (mine && place >= 0 && place < TOKENS && warp() == 0) pairs[place] = 32 * i + lane();
    rank += ones_in(bits[i]);
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

struct Output {
  void* out;
  const int* pairs;
  const float* shares;
  int count;  // of pairs of experts that are not shared
  int first;  // row of the block
};

__device__ inline void write(const Output& to, const float* space, float limit) {
  for (int i = warp(); i < TILES * COLUMNS * 4 / (DOWN ? 1 : 2); i += SLICES) {
    int tile = i / (4 * COLUMNS), column = i / 4 % COLUMNS, nth = i % 4;
    int pair = to.pairs[8 * column + lane() % 4 * 2 + nth % 2];
    if (pair < 0) continue;
    int row = to.first + 16 * tile + lane() / 4 + nth / 2 * 8;
#if DOWN
    float share = pair < to.count ? to.shares[pair] : 1;
    ((float*)to.out)[(long long)pair * HIDDEN + row] = summed(space, tile, column, nth) * share;
#else
    float gate = summed(space, 2 * tile, column, nth), up = summed(space, 2 * tile + 1, column, nth);
    unsigned value = rounded_pair(between(gate, up, limit), 0);
    ((unsigned short*)to.out)[(long long)pair * WIDTH + row] = value;
#endif
  }
}

// A warp's chunks of an expert's inputs.
__device__ inline void add_packed(Sums& sums, Step (&ahead)[DEPTH], const Weights& own,
                                  const Places& x) {
#pragma unroll 1
  for (int nth = 0; nth < CHUNKS; nth++) {
    Chunk tokens;
    load_chunk(tokens, x, nth * SLICES + warp());
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      Step& step = ahead[i % DEPTH];
      if (is_plain(step))
        multiply_step<false>(sums[i], step, tokens);
      else
        multiply_step<true>(sums[i], step, tokens);
      int next = nth + (i + DEPTH) / TILES;
      if (next < CHUNKS) load_step(step, own, next, (i + DEPTH) % TILES);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
packed_experts(const unsigned short* x, const unsigned char* codes, const unsigned char* scales,
               const unsigned char* shared_codes, const float* shared_scales, const int* experts,
               const int* lanes, const float* shares, void* out, float limit, int count) {
  SHARED_SPACE(space);
  int* pairs = (int*)space;
  const int parts = (DOWN ? HIDDEN : WIDTH) / SPAN, tokens = count / TOP_K;
  int tile = block() / parts, first = block() % parts * SPAN;
  int extra = EXTRA ? (tokens + TOKENS - 1) / TOKENS : 0;  // tiles of the shared expert
  bool shared = EXTRA && tile < extra;
  if (!DOWN) wait_before();
  if (!DOWN && FEW) let_next();
  int expert = 0;
  if (shared) {
    int token = tile * TOKENS + thread();
    if (thread() < TOKENS) pairs[thread()] = token < tokens ? count + token : -1;
    block_sync();
  } else {
    tile -= extra;
    expert = FEW ? find_pairs(experts, tile, count, pairs) : list_pairs(experts, lanes, tile, pairs);
  }
  if (expert < 0) {
    if (DOWN) wait_before();
    return;
  }
  int group = lane() / 4, quarter = lane() % 4;
  long long line = (long long)expert * (DOWN ? HIDDEN : 2 * WIDTH) + first + group;
  Weights own = {codes + line * ROW + warp() * 64 + quarter * 16, scales + line * FACTORS + warp() * 4};
  Step ahead[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; d++)
    if (!shared) load_step(ahead[d], own, 0, d);
  if (DOWN) wait_before();
  Places mine;
#pragma unroll
  for (int k = 0; k < COLUMNS; k++) {
    int pair = pairs[8 * k + group];
    long long row = DOWN ? pair : pair < count ? pair / TOP_K : pair - count;
    mine[k] = pair < 0 ? nullptr : x + row * INPUTS + quarter * 32;
  }
  Output to = {out, pairs, shares, count, first};
  Sums sums = {};
  if (shared)
    add_shared(sums, shared_codes, shared_scales, first, mine);
  else
    add_packed(sums, ahead, own, mine);
  if (DOWN || !FEW) let_next();
  float* left = (float*)(space + 4 * TOKENS);
  leave(sums, left);
  block_sync();
  write(to, left, limit);
}
