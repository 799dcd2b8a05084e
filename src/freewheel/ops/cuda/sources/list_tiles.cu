// SPDX-License-Identifier: Apache-2.0
// The tiles of a routing, by one block: as `list_tiles` in ops/cuda/quantised_experts.py.
//
// Lower experts come first, and an expert's pairs keep their order. Warps have pairs in a row: each
// counts its own by expert, then learns how many stand in front of them.
//
// Constants: EXPERTS (even), ROUNDS of 32 pairs a warp, TOKENS of a tile.

#define WARPS 16
#define THREADS (32 * WARPS)
#define EACH ((EXPERTS + 31) / 32)  // experts of a lane

// Where tiles of each expert begin, from how many it has; behind all, how many there are.
__device__ inline void add_up(int* tiles) {
  int sum = 0, first = lane() * EACH, last = min(first + EACH, EXPERTS);
  for (int e = first; e < last; e++) sum += tiles[e];
  int behind = sum;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    int more = lanes_before(behind, by);
    if (lane() >= by) behind += more;
  }
  if (lane() == 31) tiles[EXPERTS] = behind;
  int at = behind - sum;
  for (int e = first; e < last; e++) {
    int own = tiles[e];
    tiles[e] = at;
    at += own;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
list_tiles(const int* ids, int* experts, int* lanes, int pairs, int most) {
  SHARED_SPACE(space);
  int* starts = (int*)space;  // [EXPERTS + 1]
  unsigned short* counts = (unsigned short*)(space + (4 * EXPERTS + 19) / 16 * 16);
  unsigned short* own = counts + warp() * EXPERTS;
  for (int i = thread(); i < WARPS * EXPERTS / 2; i += THREADS) ((unsigned*)counts)[i] = 0;
  follow();
  int id[ROUNDS], rank[ROUNDS];
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    int pair = (warp() * ROUNDS + r) * 32 + lane();
    id[r] = pair < pairs ? ids[pair] : -1;
  }
  for (int i = thread(); i < most; i += THREADS) experts[i] = -1;
  for (int i = thread(); i < most * TOKENS; i += THREADS) lanes[i] = -1;
  block_sync();
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    unsigned alike = lanes_alike(id[r]);
    int before = id[r] < 0 ? 0 : own[id[r]];
    rank[r] = before + ones_in(alike & ((1u << lane()) - 1));
    warp_sync();
    if (id[r] >= 0 && first_one(alike) == lane()) own[id[r]] = before + ones_in(alike);
    warp_sync();
  }
  block_sync();
  for (int e = thread(); e < EXPERTS; e += THREADS) {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      int more = counts[w * EXPERTS + e];
      counts[w * EXPERTS + e] = sum;
      sum += more;
    }
    starts[e] = (sum + TOKENS - 1) / TOKENS;
  }
  block_sync();
  if (warp() == 0) add_up(starts);
  block_sync();
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    if (id[r] < 0) continue;
    int nth = own[id[r]] + rank[r], tile = starts[id[r]] + nth / TOKENS;
    if (nth % TOKENS == 0) experts[tile] = id[r];
    lanes[tile * TOKENS + nth % TOKENS] = (warp() * ROUNDS + r) * 32 + lane();
  }
}
