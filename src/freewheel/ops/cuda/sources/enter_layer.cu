// SPDX-License-Identifier: Apache-2.0
// Into a layer on four streams, once its logits are there in parts: as ops.hyper.hyper_enter.
//
// A block has one token. Its warps share the parts and add them up in ascending order; all of them
// but the last collapse the streams and norm what that gives. The last one balances the token's mix
// meanwhile. What the layer itself has is asked for before the kernel in front has ended.
//
// Constants: DIM, elements of a stream; PARTS of a logit; THREADS that collapse, of which 8 *
// THREADS divides DIM; ITERATIONS; WIDE (the norm's weight is in float32).

#define STREAMS 4
#define ROWS 24  // of logits: (2 + STREAMS) * STREAMS
#define WARPS (THREADS / 32 + 1)
#define SHARE ((PARTS + WARPS - 1) / WARPS)
#define VECTORS (DIM / (8 * THREADS))

__device__ inline float of_lane(float value, int source) {
  return value_of(from_lane(bits_of(value), source));
}

__device__ inline Eight gain_at(const void* gain, int at) {
#if WIDE
  float4 low = *(const float4*)((const float*)gain + at);
  float4 high = *(const float4*)((const float*)gain + at + 4);
  return Eight{{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
#else
  return widened(*(const uint4*)((const unsigned short*)gain + at));
#endif
}

__device__ inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// Lane `row` of every warp: that logit; lane ROWS: the sum of squares.
__device__ inline float sum_parts(const float* products, const float* squares, long long token,
                                  float* space) {
  const int first = warp() * SHARE, step = lane() < ROWS ? ROWS : 1;
  const float* from = lane() < ROWS ? products + (token * PARTS + first) * ROWS + lane()
                                    : squares + token * PARTS + first;
  float total = 0, own[SHARE];
#pragma unroll
  for (int i = 0; i < SHARE; i++, from += step)
    own[i] = first + i < PARTS && lane() <= ROWS ? *from : 0;
#pragma unroll
  for (int i = 0; i < SHARE; i++) total += own[i];
  space[thread()] = total;
  block_sync();
  total = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) total += space[32 * i + lane()];
  return total;
}

// Each column of the mix over its sum, or each row.
__device__ inline void divide(float (&mix)[STREAMS][STREAMS], float eps, bool columns) {
#pragma unroll
  for (int i = 0; i < STREAMS; i++) {
    float of[STREAMS];
#pragma unroll
    for (int k = 0; k < STREAMS; k++) of[k] = columns ? mix[k][i] : mix[i][k];
    float inverse = inverse_of(of[0] + of[1] + (of[2] + of[3]) + eps);
#pragma unroll
    for (int k = 0; k < STREAMS; k++) (columns ? mix[k][i] : mix[i][k]) *= inverse;
  }
}

// One warp: the token's post and mix. A lane has a logit; once rows are shares, every lane has them
// all: what balances them then waits for no other lane.
__device__ inline void balance(float logit, float inverse, float base, float post_scale,
                               float mix_scale, float* post, float* mix, float eps) {
  float at = logit * inverse;
  if (lane() / STREAMS == 1) post[lane() - STREAMS] = 2 * sigmoid(at * post_scale + base);
  float own = at * mix_scale + base, most = max(own, xor_lane(own, 1));
  own = expf(own - max(most, xor_lane(most, 2)));
  float total = own + xor_lane(own, 1);
  own = own / (total + xor_lane(total, 2)) + eps;
  float all[STREAMS][STREAMS];
#pragma unroll
  for (int i = 0; i < STREAMS; i++)
#pragma unroll
    for (int k = 0; k < STREAMS; k++) all[i][k] = of_lane(own, (2 + i) * STREAMS + k);
  divide(all, eps, true);
#pragma unroll 1
  for (int i = 1; i < ITERATIONS; i++) {
    divide(all, eps, false);
    divide(all, eps, true);
  }
#pragma unroll
  for (int i = 0; i < STREAMS; i++)
    if (lane() == i)
      *(float4*)(mix + i * STREAMS) = make_float4(all[i][0], all[i][1], all[i][2], all[i][3]);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 2)
enter_layer(const unsigned short* streams, const float* products, const float* squares,
            const float* base, const float* scale, const void* gain, unsigned short* out,
            float* post, float* mix, float norm_eps, float eps, float layer_eps) {
  SHARED_SPACE(space);
  float* sums = (float*)space;
  long long token = block();
  bool collapses = thread() < THREADS;
  Eight gains[VECTORS];
  uint4 values[STREAMS][VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++)
    if (collapses) gains[v] = gain_at(gain, (v * THREADS + thread()) * 8);
  float own_base = base[min(lane(), ROWS - 1)];
  float scales[3] = {scale[0], scale[1], scale[2]};
  follow();
#pragma unroll
  for (int j = 0; j < STREAMS; j++)
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
      if (collapses)
        values[j][v] =
            *(const uint4*)(streams + (token * STREAMS + j) * DIM + (v * THREADS + thread()) * 8);
  float logit = sum_parts(products, squares, token, sums);
  float inverse = 1 / sqrtf(of_lane(logit, ROWS) / (STREAMS * DIM) + norm_eps);
  if (!collapses) {
    balance(logit, inverse, own_base, scales[1], scales[2], post + token * STREAMS,
            mix + token * STREAMS * STREAMS, eps);
    return;
  }
  float share = sigmoid(logit * inverse * scales[0] + own_base) + eps, square = 0;
  uint4 x[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    Eight total = {};
#pragma unroll
    for (int j = 0; j < STREAMS; j++) {
      Eight own = widened(values[j][v]);
      float factor = of_lane(share, j);
#pragma unroll
      for (int i = 0; i < 8; i++) total.of[i] += factor * own.of[i];
    }
    x[v] = narrowed(total);
    total = widened(x[v]);
#pragma unroll
    for (int i = 0; i < 8; i++) square += total.of[i] * total.of[i];
  }
  for (int mask = 1; mask < 32; mask *= 2) square += xor_lane(square, mask);
  float* norms = sums + 32 * WARPS;
  if (lane() == 0) norms[warp()] = square;
  first_sync(THREADS);
  square = 0;
  for (int i = 0; i < THREADS / 32; i++) square += norms[i];
  float factor = 1 / sqrtf(square / DIM + layer_eps);
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    Eight own = widened(x[v]);
#pragma unroll
    for (int i = 0; i < 8; i++) own.of[i] = own.of[i] * factor * gains[v].of[i];
    *(uint4*)(out + token * DIM + (v * THREADS + thread()) * 8) = narrowed(own);
  }
}
