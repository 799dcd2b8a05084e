// SPDX-License-Identifier: Apache-2.0
// Into a layer on four streams, once its logits are there in parts: as ops.hyper.hyper_enter.
//
// A block has one token. Its warps share the parts and add them up in ascending order; all of them
// but the last collapse the streams and norm what that gives. The last one balances the token's mix,
// a row a lane, meanwhile.
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
  float total = 0, own[SHARE];
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
    int part = warp() * SHARE + i;
    long long cell = token * PARTS + part;
    own[i] = 0;
    if (part < PARTS && lane() < ROWS) own[i] = products[cell * ROWS + lane()];
    if (part < PARTS && lane() == ROWS) own[i] = squares[cell];
  }
#pragma unroll
  for (int i = 0; i < SHARE; i++) total += own[i];
  space[thread()] = total;
  block_sync();
  total = 0;
  for (int i = 0; i < WARPS; i++) total += space[32 * i + lane()];
  return total;
}

// `row` over its sum, then every column of four lanes' rows over its own.
__device__ inline void divide(float (&row)[STREAMS], float eps, bool rows) {
  if (rows) {
    float inverse = inverse_of(row[0] + row[1] + (row[2] + row[3]) + eps);
    for (int k = 0; k < STREAMS; k++) row[k] *= inverse;
  }
#pragma unroll
  for (int k = 0; k < STREAMS; k++) {
    float total = row[k] + xor_lane(row[k], 1);
    total += xor_lane(total, 2);
    row[k] *= inverse_of(total + eps);
  }
}

// One warp: the token's post and mix. (Four lanes have a row each, and the others do as they do.)
__device__ inline void balance(float logit, float inverse, const float* base, const float* scale,
                               float* post, float* mix, float eps) {
  int own = lane() % STREAMS;
  float at = of_lane(logit, STREAMS + own) * inverse;
  if (lane() < STREAMS) post[own] = 2 * sigmoid(at * scale[1] + base[STREAMS + own]);
  float row[STREAMS], most = 0, total = 0;
#pragma unroll
  for (int k = 0; k < STREAMS; k++) {
    int nth = (2 + own) * STREAMS + k;
    row[k] = of_lane(logit, nth) * inverse * scale[2] + base[nth];
    most = k ? max(most, row[k]) : row[k];
  }
#pragma unroll
  for (int k = 0; k < STREAMS; k++) total += row[k] = expf(row[k] - most);
#pragma unroll
  for (int k = 0; k < STREAMS; k++) row[k] = row[k] / total + eps;
  for (int i = 0; i < ITERATIONS; i++) divide(row, eps, i > 0);
  if (lane() < STREAMS) *(float4*)(mix + own * STREAMS) = make_float4(row[0], row[1], row[2], row[3]);
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
    balance(logit, inverse, base, scale, post + token * STREAMS, mix + token * STREAMS * STREAMS, eps);
    return;
  }
  float share = sigmoid(logit * inverse * scale[0] + base[min(lane(), ROWS - 1)]) + eps, square = 0;
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
