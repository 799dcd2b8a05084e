// SPDX-License-Identifier: Apache-2.0
// A mixture of FP8 experts for up to four tokens in one launch: as ops.quantised.block_experts.
//
// A block a multiprocessor stays from the first gate to the last output. One warp brings weights
// into a ring in shared memory, box by box, and goes on from gates and ups into the projection
// behind them, whose weights do not depend on what is between: memory does not idle while blocks
// wait for one another. Four warps multiply what has come, as the bytes that it is. Tokens are
// bfloat16, of eight digits: each is the sum of two numbers of e4m3, of four digits each, which are
// two columns of a product. So no weight is ever widened.
//
// A unit of the first half is 32 gates and their ups, rows in turn by eight. In the second half a
// block has 64 outputs, and goes through all experts in ascending order, shared ones in front: it
// needs no sum behind it, and a token's sum does not depend on its neighbours. Four more warps
// bring what is between the halves: tile by tile, as soon as all of its units are stored.
//
// Blocks wait for blocks, so all of them must be on the chip at once: one a multiprocessor.
//
// Constants: TOP_K, HIDDEN (a multiple of 512), WIDTH of an expert (of 256), EXTRA: of shared
// experts, STAGES, CLAMP.

#define TOKENS 4
#define MOST_PAIRS 32
#define BOX 8192                 // 64 rows of 128 bytes
#define STAGE (2 * BOX)
#define STEPS (HIDDEN / 256)     // stages of a unit of the first half
#define SHORT (WIDTH / 256)      // and of a tile in the second
#define UNITS (WIDTH / 32)       // of a tile's first half
#define RUNS (HIDDEN / 64)       // blocks that have outputs
#define COLUMNS (HIDDEN / 128)   // scales of a row
#define GRID (WIDTH / 128)
#define MOST (MOST_PAIRS + EXTRA)
#define SPOTS 4                  // of tokens between the halves
#define SPOT (8 * WIDTH)
#define MULTIPLIERS 4            // warps; as many more bring tokens, and one brings weights
#define EVERYONE (32 * (MULTIPLIERS + SPOTS + 1))

// Of each tile: warps that have stored their part of a unit. Behind them: warps that wait for none
// any more, the last of which clears it all for the next launch.
__device__ int arrivals[MOST + 1];

struct Tiles {
  int count;
  int experts[MOST];  // in ascending order; in front: -1, -2, ..: parts of the shared one
  int live[MOST];     // a bit for each token that chose it
  float shares[MOST][TOKENS];
};

struct Shared {
  Arrival full[STAGES], empty[STAGES];   // of the ring
  Arrival filled[SPOTS], free[SPOTS];    // of tokens between the halves
  Arrival listed;
  int largest[MULTIPLIERS + SPOTS][TOKENS];
  float factors[SPOTS][TOKENS];
  Tiles tiles;
};

// The experts that tokens chose, each once. One warp; lane i has pair i.
__device__ inline void list_experts(Tiles& tiles, const int* ids, const float* shares, int pairs) {
  int own = lane(), expert = -1, rank = EXTRA;
  float share = 0, sum = 0;
  if (own < pairs) expert = read_fresh(ids + own), share = shares[own];
  unsigned alike = lanes_alike(expert);
  bool leads = expert >= 0 && first_one(alike) == own;
  int leader = leads ? expert : 0x7fffffff;
#pragma unroll
  for (int i = 0; i < MOST_PAIRS; i++) rank += from_lane(leader, i) < expert;
  int token = own / TOP_K;
#pragma unroll
  for (int k = 0; k < TOP_K; k++) {
    int pair = token * TOP_K + k;
    float other = value_of(from_lane((int)bits_of(share), pair & 31));
    if (pair < 32 && alike >> pair & 1) sum += other;
  }
  if (expert >= 0) tiles.shares[rank][token] = sum;
  if (leads) {
    int live = 0;
    for (int t = 0; t < TOKENS && t * TOP_K < 32; t++)
      live |= (int)((alike >> t * TOP_K & ((1u << TOP_K) - 1)) != 0) << t;
    tiles.experts[rank] = expert, tiles.live[rank] = live;
  }
  if (own < EXTRA) {
    tiles.experts[own] = -1 - own, tiles.live[own] = (1 << pairs / TOP_K) - 1;
    for (int t = 0; t < TOKENS; t++) tiles.shares[own][t] = 1;
  }
  unsigned leading = lanes_with(leads);
  if (own == 0) tiles.count = EXTRA + ones_in(leading);
}

// A factor that brings the largest of some numbers between 2^7 and 2^8, and what undoes it.
struct Scale { float up, down; };
__device__ inline Scale scale_for(int largest) {  // its bits as bfloat16, without the sign
  int exponent = largest >> 7, raise = min(261 - exponent, 253);
  Scale scale = {value_of(raise << 23), value_of(254 - raise << 23)};
  if (exponent == 255) scale.down = value_of(0x7fc00000u);
  return scale;
}
__device__ inline int larger(int so_far, uint4 eight) {
  unsigned pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int i = 0; i < 4; i++)
    so_far = max(so_far, max((int)(pairs[i] & 0x7fff), (int)(pairs[i] >> 16 & 0x7fff)));
  return so_far;
}
__device__ inline int largest_of_eight_lanes(int own) {
#pragma unroll
  for (int mask = 1; mask < 8; mask *= 2) own = max(own, from_lane(own, lane() ^ mask));
  return own;
}

#define FINER 16.0f  // by which the second number of a token is raised
// Half `nth` of 16 inputs of a token, to its places: first the coarse numbers, then the fine ones.
__device__ inline void place_eight(unsigned char* sixteen, int nth, uint4 eight, float raise) {
  Eight x = widened(eight);
  unsigned coarse[2], fine[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float own[4];
    for (int j = 0; j < 4; j++) own[j] = x.of[4 * i + j] * raise;
    coarse[i] = codes_of(own[0], own[1], own[2], own[3]);
    Values taken = values_of(coarse[i]);
    for (int j = 0; j < 4; j++) own[j] = (own[j] - taken.of[j]) * FINER;
    fine[i] = codes_of(own[0], own[1], own[2], own[3]);
  }
  *(uint2*)(sixteen + nth * 8) = uint2{coarse[0], coarse[1]};
  *(uint2*)(sixteen + 16 + nth * 8) = uint2{fine[0], fine[1]};
}

// Where a token's inputs are, of which `nth` are the eighth part.
__device__ inline unsigned char* columns_of(unsigned char* columns, int nth, int token) {
  return columns + nth / 2 * 128 + token * 32;
}

// The tokens' columns; returns what undoes the scale of token lane() % 4. Warps 0 to 7.
__device__ inline float place_tokens(unsigned char* columns, Shared& own, const unsigned short* x,
                                     int tokens) {
  const int mine = HIDDEN / 512;
  int token = lane() / 8, first = warp() * (HIDDEN / 64) + lane() % 8, most = 0;
  uint4 held[mine];
#pragma unroll
  for (int i = 0; i < mine; i++) {
    held[i] = make_uint4(0, 0, 0, 0);
    if (token < tokens) held[i] = *((const uint4*)(x + token * HIDDEN) + first + 8 * i);
  }
#pragma unroll
  for (int i = 0; i < mine; i++) most = larger(most, held[i]);
  most = largest_of_eight_lanes(most);
  if (lane() % 8 == 0) own.largest[warp()][token] = most;
  first_sync(EVERYONE - 32);
  int other = 0;
  for (int i = 0; i < MULTIPLIERS + SPOTS; i++) {
    most = max(most, own.largest[i][token]);
    other = max(other, own.largest[i][lane() % 4]);
  }
  float raise = scale_for(most).up;
#pragma unroll
  for (int i = 0; i < mine; i++)
    place_eight(columns_of(columns, first + 8 * i, token), lane() % 2, held[i], raise);
  publish();
  first_sync(EVERYONE - 32);
  return scale_for(other).down;
}

// silu(gate) * up, clamped as ops.clamped does.
__device__ inline float between(float gate, float up, float limit) {
#if CLAMP
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
#endif
  return gate / (1 + expf(-gate)) * up;
}

// The units of a block: so many apart. Blocks without outputs have the first ones.
__device__ inline int first_unit(int blocks) { return (block() + blocks - RUNS) % blocks; }

// The warp that brings weights, in the order in which they are multiplied.
__device__ inline void bring_weights(Shared& own, unsigned char* ring, const Map& up,
                                     const Map& shared_up, const Map& down, const Map& shared_down,
                                     int blocks) {
  int nth = 0;
  auto next = [&](const Map& map, int k, int b, int c, int d, int e) {
    int stage = nth % STAGES;
    if (nth >= STAGES) await(own.empty + stage, nth / STAGES - 1);
    expect(own.full + stage, STAGE);
    for (int i = 0; i < 2; i++)
      copy_box(ring + stage * STAGE + i * BOX, map, k + 128 * i, b, c, d, e, own.full + stage);
    nth++;
  };
  int count = own.tiles.count;
  for (int unit = first_unit(blocks); unit < count * UNITS; unit += blocks) {
    int expert = own.tiles.experts[unit / UNITS], row = unit % UNITS * 4;
    const Map& map = expert < 0 ? shared_up : up;
    if (expert < 0) row += (-1 - expert) * (WIDTH / 8), expert = 0;
    for (int step = 0; step < STEPS; step++) next(map, step * 256, 0, 0, row, expert);
  }
  if (block() >= RUNS) return;
  for (int tile = 0; tile < count; tile++) {
    int expert = own.tiles.experts[tile], k = 0;
    const Map& map = expert < 0 ? shared_down : down;
    if (expert < 0) k = (-1 - expert) * WIDTH, expert = 0;
    for (int step = 0; step < SHORT; step++) next(map, k + step * 256, block() * 64, expert, 0, 0);
  }
}

// A warp that brings every so-many-th tile's tokens between the halves, as columns.
__device__ inline void bring_between(Shared& own, unsigned char* spots, const unsigned short* inner,
                                     int tokens) {
  int spot = warp() - MULTIPLIERS, token = lane() / 8, part = lane() % 8;
  for (int tile = spot, nth = 0; tile < own.tiles.count; tile += SPOTS, nth++) {
    if (lane() == 0) await_arrivals(arrivals + tile, UNITS * MULTIPLIERS);
    warp_sync();
    uint4 held[WIDTH / 64];
    int most = 0;
#pragma unroll
    for (int i = 0; i < WIDTH / 64; i++) {
      held[i] = make_uint4(0, 0, 0, 0);
      auto from = (const uint4*)(inner + ((long long)tile * tokens + token) * WIDTH);
      if (token < tokens) held[i] = read_fresh(from + part + 8 * i);
    }
#pragma unroll
    for (int i = 0; i < WIDTH / 64; i++) most = larger(most, held[i]);
    Scale scale = scale_for(largest_of_eight_lanes(most));
    if (nth > 0) await(own.free + spot, nth - 1);
#pragma unroll
    for (int i = 0; i < WIDTH / 64; i++)
      place_eight(columns_of(spots + spot * SPOT, part + 8 * i, token), part % 2, held[i],
                  scale.up);
    if (part == 0) own.factors[spot][token] = scale.down;
    publish();
    warp_sync();
    if (lane() == 0) arrive(own.filled + spot);
  }
  int ticket = lane() == 0 ? next_of(arrivals + MOST) : 0;
  if (from_lane(ticket, 0) == RUNS * SPOTS - 1)
    for (int i = lane(); i <= MOST; i += 32) arrivals[i] = 0;
}

// A lane's scales: of blocks of inputs `lane()` and `lane() + 32`, of gates and of ups.
struct Scales { float gate[2], up[2]; };
__device__ inline Scales scales_of(const Tiles& tiles, int unit, const float* up_scale,
                                   const float* shared_up_scale) {
  Scales scales = {{0, 0}, {0, 0}};
  if (unit >= tiles.count * UNITS) return scales;
  int expert = tiles.experts[unit / UNITS], line = unit % UNITS / 4, apart = GRID;
  const float* from = shared_up_scale;
  if (expert < 0) line += (-1 - expert) * GRID, apart = EXTRA * GRID;
  else from = up_scale + (long long)expert * (2 * GRID * COLUMNS);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int column = lane() + 32 * i;
    if (column < COLUMNS) {
      scales.gate[i] = from[line * COLUMNS + column];
      scales.up[i] = from[(line + apart) * COLUMNS + column];
    }
  }
  return scales;
}
__device__ inline float float_from(float value, int source) {
  return value_of((unsigned)from_lane((int)bits_of(value), source));
}

struct Ring { unsigned char* start; int nth; };
// The stage that has waited longest, times 256 inputs of the columns: each 128 of them apart.
__device__ inline void take(float (&first)[4], float (&second)[4], Shared& own, Ring& ring,
                            unsigned long long columns) {
  int stage = ring.nth % STAGES;
  await(own.full + stage, ring.nth / STAGES);
  unsigned long long rows = swizzled_at(ring.start + stage * STAGE);
  open_products();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    multiply(first, rows + (i * 32 >> 4), columns + (i * 256 >> 4), i > 0);
    multiply(second, rows + (BOX + i * 32 >> 4), columns + (1024 + i * 256 >> 4), i > 0);
  }
  close_products();
  await_products<0>(first), await_products<0>(second);
  if (lane() == 0) arrive(own.empty + stage);
  ring.nth++;
}

// The first half of the block's units.
__device__ inline void gates_and_ups(Shared& own, Ring& ring, const unsigned char* columns,
                                     float factor, const float* up_scale,
                                     const float* shared_up_scale, unsigned short* inner,
                                     int tokens, float limit, int blocks) {
  unsigned long long start = columns_at(columns, 0);
  int unit = first_unit(blocks), token = lane() % 4;
  Scales coming = scales_of(own.tiles, unit, up_scale, shared_up_scale);
  for (; unit < own.tiles.count * UNITS; unit += blocks) {
    Scales scales = coming;
    coming = scales_of(own.tiles, unit + blocks, up_scale, shared_up_scale);
    float gate = 0, up = 0;
    for (int step = 0; step < STEPS; step++) {
      float sums[2][4];
      take(sums[0], sums[1], own, ring, start + step * (2048 >> 4));
#pragma unroll
      for (int i = 0; i < 2; i++) {
        int nth = step * 2 + i;
        gate += (sums[i][0] + sums[i][1] / FINER) *
                float_from(nth < 32 ? scales.gate[0] : scales.gate[1], nth & 31);
        up += (sums[i][2] + sums[i][3] / FINER) *
              float_from(nth < 32 ? scales.up[0] : scales.up[1], nth & 31);
      }
    }
    int tile = unit / UNITS;
    float value = between(gate * factor, up * factor, limit);
    value = own.tiles.live[tile] >> token & 1 ? value * own.tiles.shares[tile][token] : 0;
    int n = unit % UNITS * 32 + warp() * 8 + lane() / 4;
    if (token < tokens)
      inner[(tile * tokens + token) * WIDTH + n] = (unsigned short)rounded_pair(value, 0);
    warp_sync();
    if (lane() == 0) add_arrival(arrivals + tile);
  }
}

// The second half: the block's outputs.
__device__ inline void outputs(Shared& own, Ring& ring, const unsigned char* spots,
                               const float* down_scale, const float* shared_down_scale,
                               unsigned short* out, int tokens) {
  float scales[(MOST + 31) / 32][GRID], upper = 0, lower = 0;
  int count = own.tiles.count, line = block() / 2, token = lane() % 4;
#pragma unroll
  for (int i = 0; i < (MOST + 31) / 32; i++) {
    int tile = lane() + 32 * i, expert = tile < count ? own.tiles.experts[tile] : 0;
    const float* from = down_scale + ((long long)expert * COLUMNS + line) * GRID;
    if (expert < 0) from = shared_down_scale + (line * EXTRA - 1 - expert) * GRID;
#pragma unroll
    for (int j = 0; j < GRID; j++) scales[i][j] = tile < count ? from[j] : 0;
  }
  for (int tile = 0; tile < count; tile++) {
    int spot = tile % SPOTS;
    await(own.filled + spot, tile / SPOTS);
    float factor = own.factors[spot][token], more[2] = {0, 0};
    unsigned long long columns = columns_at(spots + spot * SPOT, 0);
#pragma unroll
    for (int step = 0; step < SHORT; step++) {
      float sums[2][4];
      take(sums[0], sums[1], own, ring, columns + step * (2048 >> 4));
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float scale = scales[0][step * 2 + i];
#pragma unroll
        for (int j = 1; j < (MOST + 31) / 32; j++)
          scale = tile < 32 * j ? scale : scales[j][step * 2 + i];
        scale = float_from(scale, tile & 31);
        more[0] += (sums[i][0] + sums[i][1] / FINER) * scale;
        more[1] += (sums[i][2] + sums[i][3] / FINER) * scale;
      }
    }
    upper += more[0] * factor, lower += more[1] * factor;
    if (lane() == 0) arrive(own.free + spot);
  }
  unsigned short* to = out + token * HIDDEN + block() * 64 + warp() * 16 + lane() / 4;
  unsigned both = rounded_pair(upper, lower);
  if (token < tokens) to[0] = (unsigned short)both, to[8] = (unsigned short)(both >> 16);
}

extern "C" __global__ void __launch_bounds__(EVERYONE, 1)
joined_experts(const unsigned short* x, const float* up_scale, const float* down_scale,
               const float* shared_up_scale, const float* shared_down_scale, const int* ids,
               const float* shares, unsigned short* inner, unsigned short* out, MAP_PARAMETER up,
               MAP_PARAMETER down, MAP_PARAMETER shared_up, MAP_PARAMETER shared_down, float limit,
               int pairs, int blocks) {
  SHARED_SPACE(space);
  unsigned char* ring = (unsigned char*)space + (-shared_address(space) & 1023);  // [STAGES, STAGE]
  unsigned char* columns = ring + STAGES * STAGE;                                 // [HIDDEN, 8]
  unsigned char* spots = columns + 8 * HIDDEN;                                    // [SPOTS, SPOT]
  Shared& own = *(Shared*)(spots + SPOTS * SPOT);
  int tokens = pairs / TOP_K;
  if (thread() == 0) {
    fetch_map(up), fetch_map(down), fetch_map(shared_up), fetch_map(shared_down);
    for (int i = 0; i < STAGES; i++)
      open_counted(own.full + i, 1), open_counted(own.empty + i, MULTIPLIERS);
    for (int i = 0; i < SPOTS; i++)
      open_counted(own.filled + i, 1), open_counted(own.free + i, MULTIPLIERS);
    open_counted(&own.listed, 1);
    publish();
  }
  block_sync();
  wait_before();
  let_next();
  if (warp() == MULTIPLIERS + SPOTS) {
    list_experts(own.tiles, ids, shares, pairs);
    warp_sync();
    if (lane() == 0) {
      arrive(&own.listed);
      bring_weights(own, ring, up, shared_up, down, shared_down, blocks);
    }
    return;
  }
  float factor = place_tokens(columns, own, x, tokens);
  await(&own.listed, 0);
  if (warp() < MULTIPLIERS) {
    Ring taken = {ring, 0};
    gates_and_ups(own, taken, columns, factor, up_scale, shared_up_scale, inner, tokens, limit,
                  blocks);
    if (block() < RUNS) outputs(own, taken, spots, down_scale, shared_down_scale, out, tokens);
  } else if (block() < RUNS) {
    bring_between(own, spots, inner, tokens);
  }
}
