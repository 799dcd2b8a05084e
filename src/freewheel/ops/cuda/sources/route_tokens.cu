// SPDX-License-Identifier: Apache-2.0
// The experts of a token, by one block: as ops.dense.route and ops.clamped.route_best.
//
// A thread adds up the parts of one expert's logit, so that all of them are on their way at once; a
// warp finds how strong a group is, and the first one the experts, best first. Of equals the lowest
// index is taken, of groups as of experts.
//
// Constants: EXPERTS; THREADS, a multiple of 32 and no fewer; PARTS of a logit; GROUPS (at most 32)
// of which TOP_GROUPS are kept; TOP_K (at most 32); NORMALISE; SOFTPLUS (the score is its root).

#define SIZE (EXPERTS / GROUPS)
#define EACH ((EXPERTS + 31) / 32)  // experts of a lane
#define NOTHING 0x007fffffu         // the key of -inf

__device__ inline float score_of(float logit) {
#if SOFTPLUS
  return sqrtf(max(logit, 0.0f) + log1pf(expf(-fabsf(logit))));
#else
  return 1 / (1 + expf(-logit));
#endif
}

// In the order of floats: NaN as -inf, -0 as 0.
__device__ inline unsigned key_of(float x) {
  unsigned bits = x == x ? bits_of(x == 0 ? 0.0f : x) : 0xff800000u;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ inline float value_of_key(unsigned key) {
  return value_of(key >> 31 ? key ^ 0x80000000u : ~key);
}

// One warp: the sum of the two best of a group's keys.
__device__ inline float strength_of(const unsigned* keys) {
  unsigned best = 0, second = 0;
  for (int i = lane(); i < SIZE; i += 32) {
    unsigned key = keys[i];
    second = max(second, min(best, key));
    best = max(best, key);
  }
  unsigned top = warp_most(best);
  int winner = first_one(lanes_with(best == top));
  unsigned next = warp_most(lane() == winner ? second : best);
  return value_of_key(top) + value_of_key(next);
}

// One warp: bit g if group g is among the TOP_GROUPS strongest.
__device__ inline unsigned kept_groups(const float* strengths) {
  unsigned own = key_of(strengths[min(lane(), GROUPS - 1)]);
  int stronger = 0;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    unsigned other = from_lane(own, g);
    stronger += other > own || (other == own && g < lane());
  }
  return lanes_with(lane() < GROUPS && stronger < TOP_GROUPS);
}

// One warp: lane k gets the k-th best expert.
__device__ inline int best_experts(unsigned (&key)[EACH]) {
  int id = 0;
#pragma unroll
  for (int k = 0; k < TOP_K; k++) {
    unsigned most = 0, place = ~0u;
#pragma unroll
    for (int i = 0; i < EACH; i++) most = max(most, key[i]);
    most = warp_most(most);
#pragma unroll
    for (int i = EACH - 1; i >= 0; i--)
      if (key[i] == most) place = i * 32 + lane();
    place = warp_least(place);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (place == i * 32 + lane()) key[i] = 0;
    if (lane() == k) id = place;
  }
  return id;
}

extern "C" __global__ void __launch_bounds__(THREADS)
route_tokens(const float* parts, const float* bias, float* weights, int* ids, float scale,
             int count) {
  SHARED_SPACE(space);
  float* scores = (float*)space;
  unsigned* keys = (unsigned*)space + THREADS;
  float* strengths = (float*)space + 2 * THREADS;  // [32]
  int expert = min(thread(), EXPERTS - 1);
  long long token = block();
  float own_bias = bias[expert];
  follow();
  float own[PARTS], logit = 0;
#pragma unroll
  for (int p = 0; p < PARTS; p++) own[p] = parts[(p * (long long)count + token) * EXPERTS + expert];
#pragma unroll
  for (int p = 0; p < PARTS; p++) logit += own[p];
  float score = score_of(logit);
  scores[thread()] = score;
  keys[thread()] = thread() < EXPERTS ? key_of(score + own_bias) : 0;
  block_sync();
  if (TOP_GROUPS < GROUPS) {
    for (int g = warp(); g < GROUPS; g += THREADS / 32) {
      float strength = strength_of(keys + g * SIZE);
      if (lane() == 0) strengths[g] = strength;
    }
    block_sync();
  }
  if (warp() != 0) return;
  unsigned kept = TOP_GROUPS < GROUPS ? kept_groups(strengths) : ~0u, key[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int at = i * 32 + lane();
    key[i] = at >= EXPERTS ? 0 : kept >> at / SIZE & 1 ? keys[at] : NOTHING;
  }
  int id = best_experts(key);
  float weight = lane() < TOP_K ? scores[id] : 0, total = weight;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) total += xor_lane(total, mask);
  if (NORMALISE) weight = weight / (total + 1e-20f);
  if (lane() < TOP_K) {
    weights[token * TOP_K + lane()] = weight * scale;
    ids[token * TOP_K + lane()] = id;
  }
}
