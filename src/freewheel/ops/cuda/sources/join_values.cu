// SPDX-License-Identifier: Apache-2.0
// Runs of a query's lanes joined, and their values projected: ops.cuda.runs.join, then
// ops.latents.expand_values.
//
// A cluster has a head of TOKENS tokens. Each of its blocks joins SLICE of the latent's elements,
// rounds them as a mixture of its own would be rounded, and multiplies them by its rows of the
// weight, which it has asked for before the kernel in front has ended; then it adds up its share of
// what all blocks found.
//
// Constants: RANK (512), VALUE (128), HEADS, PARTS (at most 32), TOKENS (a multiple of 8).

#define CLUSTER 8
#define SLICE (RANK / CLUSTER)
#define STEPS (SLICE / 16)
#define THREADS 256
#define ROW (SLICE + 8)  // of shared memory, so that rows begin in other banks
#define CELLS (TOKENS * SLICE / THREADS)  // of a thread

static_assert(VALUE == 128 && SLICE % 16 == 0 && TOKENS * SLICE % THREADS == 0, "");

struct Space {
  float sums[TOKENS][VALUE];
  float share[TOKENS][PARTS];
  unsigned short joined[TOKENS][ROW];
};

__device__ inline long long cell_of(int token, int part, int head) {
  return ((long long)token * PARTS + part) * HEADS + head;
}

// A warp: the factors of a token's parts in its mixture. 0: it may never have been written.
__device__ inline void weigh_parts(const float* high, const float* total, int token, int head,
                                   float* share) {
  int part = min(lane(), PARTS - 1);
  float own = total[cell_of(token, part, head)], most = high[cell_of(token, part, head)];
  bool full = own > 0 && lane() < PARTS, wrong = own != own && lane() < PARTS;
  float high_own = most = full ? most : value_of(0xff800000u);
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) most = max(most, xor_lane(most, mask));
  float factor = full ? expf(high_own - most) : 0, sum = wrong ? own : full ? own * factor : 0;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) sum += xor_lane(sum, mask);
  if (lane() < PARTS) share[lane()] = sum != sum ? sum : full ? factor / sum : 0;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 2)
join_values(const float* mixed, const float* high, const float* total, const unsigned short* weight,
            unsigned short* out, int count) {
  SHARED_SPACE(space);
  Space& own = *(Space*)space;
  int rank = block() % CLUSTER, head = block() / CLUSTER % HEADS;
  int first = block() / CLUSTER / HEADS * TOKENS, g = lane() / 4, t = lane() % 4;
  // A warp has 16 values; of its fragment's rows the first eight are the even ones.
  unsigned left[STEPS][4];
  const unsigned short* from =
      weight + ((long long)head * RANK + rank * SLICE) * VALUE + warp() * 16 + 2 * g;
#pragma unroll
  for (int s = 0; s < STEPS; s++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int c = s * 16 + half * 8 + 2 * t;
      unsigned low = *(const unsigned*)(from + c * VALUE);
      unsigned next = *(const unsigned*)(from + (c + 1) * VALUE);
      left[s][2 * half] = bytes_of(low, next, 0x5410);
      left[s][2 * half + 1] = bytes_of(low, next, 0x7632);
    }
  follow();
  float value[CELLS][PARTS];
#pragma unroll
  for (int i = 0; i < CELLS; i++) {
    int n = (i * THREADS + thread()) / SLICE, c = thread() % SLICE;
    if (first + n < count)
#pragma unroll
      for (int p = 0; p < PARTS; p++)
        value[i][p] = mixed[cell_of(first + n, p, head) * RANK + rank * SLICE + c];
  }
  for (int n = warp(); n < TOKENS; n += THREADS / 32)
    if (first + n < count) weigh_parts(high, total, first + n, head, own.share[n]);
  block_sync();
#pragma unroll
  for (int i = 0; i < CELLS; i++) {
    int n = (i * THREADS + thread()) / SLICE, c = thread() % SLICE;
    float sum = 0;
    if (first + n < count)
#pragma unroll
      for (int p = 0; p < PARTS; p++)
        if (own.share[n][p] != 0) sum += own.share[n][p] * value[i][p];
    own.joined[n][c] = rounded_pair(sum, 0);
  }
  block_sync();
#pragma unroll
  for (int n = 0; n < TOKENS; n += 8) {
    float sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      const unsigned short* right = own.joined[n + g] + s * 16 + 2 * t;
      add_product(sums, left[s], *(const unsigned*)right, *(const unsigned*)(right + 8));
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
      own.sums[n + 2 * t + i % 2][warp() * 16 + 2 * g + i / 2] = sums[i];
  }
  cluster_arrive();
  cluster_wait();
  for (int item = thread(); item < TOKENS * VALUE / CLUSTER / 4; item += THREADS) {
    int n = item / (VALUE / CLUSTER / 4);
    int v = rank * (VALUE / CLUSTER) + item % (VALUE / CLUSTER / 4) * 4;
    float4 sum = make_float4(0, 0, 0, 0), of[CLUSTER];
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) of[i] = four_of_block(&own.sums[n][v], i);
#pragma unroll
    for (int i = 0; i < CLUSTER; i++)
      sum.x += of[i].x, sum.y += of[i].y, sum.z += of[i].z, sum.w += of[i].w;
    if (first + n < count) {
      uint2 pairs = {rounded_pair(sum.x, sum.y), rounded_pair(sum.z, sum.w)};
      *(uint2*)(out + ((first + n) * (long long)HEADS + head) * VALUE + v) = pairs;
    }
  }
  cluster_arrive();  // nobody ends while others read there
  cluster_wait();
}
