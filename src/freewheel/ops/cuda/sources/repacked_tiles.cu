// SPDX-License-Identifier: Apache-2.0
// One projection of repacked MXFP4 experts, for tiles of their tokens that were listed: as
// ops.repacking.repacked_experts. More of an expert's tokens than eight meet what was unpacked.
//
// Every slice of the inputs has a warp; their sums are added in ascending order.
//
// Scales and what comes of them are 2^30 too small, and sums are multiplied at the end. Where a
// scale is beyond 2^-96 .. 2^31, a step multiplies twice. (What is below 2^-132 then is lost.)
//
// A shared expert in FP8, as wide as the others, may stand in front; its products are scaled behind
// every 128 inputs, in float32.
//
// Constants: DOWN (0: gates and ups, and what lies between; 1: the projection behind it), FEW (a
// block finds its tokens, of which there are eight at most, itself; else they are listed), TOP_K,
// HIDDEN and WIDTH of an expert, EXTRA (1: there is a shared one), TILES of 16 rows a warp, COLUMNS
// of 8 tokens, SLICES, DEPTH of steps ahead (divides TILES; a step is a piece), CLAMP, BLOCKS of a
// multiprocessor at least.

#define INPUTS (DOWN ? WIDTH : HIDDEN)
#define THREADS (32 * SLICES)
#define TOKENS (8 * COLUMNS)
#define CHUNKS (INPUTS / 128 / SLICES)  // of a warp
#define ROWS ((DOWN ? HIDDEN : 2 * WIDTH) / 16)  // tiles of an expert
#define TILE (INPUTS / 128 * PIECE_BYTES)
#define SPAN (DOWN ? 16 * TILES : 8 * TILES)  // outputs of a block

struct Step {
  uint4 codes[2];   // of rows lane / 4 and 8 further on
  unsigned scales;  // of both
};

// The warp's chunk `nth` of a tile. Warps take chunks in turn, so together they read on.
__device__ inline void load_step(Step& step, const unsigned char* own, int nth, int tile) {
  const unsigned char* piece = own + tile * TILE + nth * SLICES * PIECE_BYTES;
#pragma unroll
  for (int half = 0; half < 2; half++) step.codes[half] = read_once(piece + half * 512 + lane() * 16);
  step.scales = *(const unsigned short*)(piece + PIECE_SCALES + lane() * 2);
}

typedef float Sums[TILES][COLUMNS][4];
typedef uint4 Chunk[COLUMNS][4];

template <bool exact>
__device__ inline void multiply_step(float (&sums)[COLUMNS][4], const Step& step,
                                     const Chunk& tokens) {
  unsigned factors[2] = {fp4_factor<exact>(step.scales, 0), fp4_factor<exact>(step.scales, 1)};
#pragma unroll
  for (int word = 0; word < 4; word++) {
    Quad first = scaled_pairs<exact>(word_at(step.codes[0], word), factors[0]);
    Quad second = scaled_pairs<exact>(word_at(step.codes[1], word), factors[1]);
#pragma unroll
    for (int k = 0; k < COLUMNS; k++) add_rows(sums[k], sums[k], first, second, tokens[k][word]);
  }
}

// A thread's elements of its tokens in a chunk. `x`: to those of chunk 0; null: there is no token.
typedef const unsigned short* Places[COLUMNS];
__device__ inline void load_chunk(Chunk& tokens, const Places& x, int chunk) {
#pragma unroll
  for (int k = 0; k < COLUMNS; k++)
#pragma unroll
    for (int word = 0; word < 4; word++) {
      tokens[k][word] = make_uint4(0, 0, 0, 0);
      if (x[k]) tokens[k][word] = *(const uint4*)(x[k] + chunk * 128 + word * 8);
    }
}

// A thread's rows of a tile, as the checkpoint counts them: its first, and its second.
__device__ inline int row_of(int tile, int half) {
  return DOWN ? tile * 16 + lane() / 4 * 2 + half : tile * 8 + lane() / 4 + half * WIDTH;
}

// sums += a chunk of a tile of the shared expert times one of its tokens.
__device__ inline void multiply_bytes(float (&sums)[COLUMNS][4], const unsigned char* codes,
                                      const float* scales, int tile, int chunk,
                                      const Chunk& tokens) {
  uint4 own[2][2];
  float factors[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    long long row = row_of(tile, half);
    const unsigned char* from = codes + row * INPUTS + chunk * 128 + lane() % 4 * 32;
    own[half][0] = read_once(from);
    own[half][1] = read_once(from + 16);
    factors[half] = scales[row / 128 * (INPUTS / 128) + chunk] * 0x1p-30f;
  }
  float part[COLUMNS][4] = {};
#pragma unroll
  for (int word = 0; word < 4; word++) {
    Quad rows[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4& four = own[half][word / 2];
      rows[half] = word % 2 ? fp8_pairs(four.z, four.w) : fp8_pairs(four.x, four.y);
    }
#pragma unroll
    for (int k = 0; k < COLUMNS; k++) add_rows(part[k], part[k], rows[0], rows[1], tokens[k][word]);
  }
#pragma unroll
  for (int i = 0; i < 4 * COLUMNS; i++)
    sums[i / 4][i % 4] += part[i / 4][i % 4] * factors[i % 4 / 2];
}

// A warp's sums of the shared expert, `TILES` tiles from `first` on.
__device__ inline void add_shared(Sums& sums, const unsigned char* codes, const float* scales,
                                  int first, const Places& x) {
#pragma unroll 1
  for (int chunk = warp(); chunk < INPUTS / 128; chunk += SLICES) {
    Chunk tokens;
    load_chunk(tokens, x, chunk);
#pragma unroll
    for (int i = 0; i < TILES; i++)
      multiply_bytes(sums[i], codes, scales, first + i, chunk, tokens);
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
  int first;  // tile of the block
};

__device__ inline void write(const Output& to, const float* space, float limit) {
  for (int i = warp(); i < TILES * COLUMNS * 2; i += SLICES) {
    int tile = i / (2 * COLUMNS), column = i / 2 % COLUMNS, nth = i % 2;
    int pair = to.pairs[8 * column + lane() % 4 * 2 + nth];
    if (pair < 0) continue;
    int row = row_of(to.first + tile, 0);
    float one = summed(space, tile, column, nth), two = summed(space, tile, column, nth + 2);
#if DOWN
    float share = pair < to.count ? to.shares[pair] : 1;
    *(float2*)((float*)to.out + (long long)pair * HIDDEN + row) = float2{one * share, two * share};
#else
    unsigned value = rounded_pair(swiglu<CLAMP>(one, two, limit), 0);
    ((unsigned short*)to.out)[(long long)pair * WIDTH + row] = value;
#endif
  }
}

// A warp's chunks of an expert's inputs.
__device__ inline void add_packed(Sums& sums, Step (&ahead)[DEPTH], const unsigned char* own,
                                  const Places& x) {
#pragma unroll 1
  for (int nth = 0; nth < CHUNKS; nth++) {
    Chunk tokens;
    load_chunk(tokens, x, nth * SLICES + warp());
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      Step& step = ahead[i % DEPTH];
      if (are_plain(scale_marks(step.scales)))
        multiply_step<false>(sums[i], step, tokens);
      else
        multiply_step<true>(sums[i], step, tokens);
      int next = nth + (i + DEPTH) / TILES;
      if (next < CHUNKS) load_step(step, own, next, (i + DEPTH) % TILES);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
repacked_tiles(const unsigned short* x, const unsigned char* pieces,
               const unsigned char* shared_codes, const float* shared_scales, const int* experts,
               const int* lanes, const float* shares, void* out, float limit, int count) {
  SHARED_SPACE(space);
  int* pairs = (int*)space;
  const int parts = (DOWN ? HIDDEN : WIDTH) / SPAN, tokens = count / TOP_K;
  int entry = block() / parts, first = block() % parts * TILES;
  int extra = EXTRA ? (tokens + TOKENS - 1) / TOKENS : 0;  // entries of the shared expert
  bool shared = EXTRA && entry < extra;
  if (!DOWN) wait_before();
  if (!DOWN && FEW) let_next();
  int expert = 0;
  if (shared) {
    int token = entry * TOKENS + thread();
    if (thread() < TOKENS) pairs[thread()] = token < tokens ? count + token : -1;
    block_sync();
  } else {
    entry -= extra;
    expert = FEW ? find_pairs(experts, entry, count, pairs) : list_pairs(experts, lanes, entry, pairs);
  }
  if (expert < 0) {
    if (DOWN) wait_before();
    return;
  }
  int group = lane() / 4, quarter = lane() % 4;
  const unsigned char* own = pieces + ((long long)expert * ROWS + first) * TILE + warp() * PIECE_BYTES;
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
