// SPDX-License-Identifier: Apache-2.0
// From one layer on four streams into the next, for many tokens: closes the layer that is left, and
// multiplies what it gives by the weights of the layer that is entered, as ops.cuda.crossing does.
//
// A block takes 32 elements of every stream, a warp 16 tokens. A thread closes eight elements of two
// tokens, and what it gives is its fragment of the product: nothing changes hands. A float32 weight
// is the sum of three bfloat16 numbers (ops.cuda.wide_products); a block splits its own while it
// waits for the kernel before. The sum over a stream's elements is kept apart, as matrix units cut
// off the last bits of long ones.
//
// Constants: DIM, elements of a stream, a multiple of 32.

#define STREAMS 4
#define ROWS 24  // of weights: (2 + STREAMS) * STREAMS
#define SLICE 32
#define WARPS 8
#define TILE 16
#define PARTS (DIM / SLICE)

__device__ inline float upper_half(float x) { return value_of(bits_of(x) & 0xffff0000u); }

// The upper halves of two floats.
__device__ inline unsigned upper_halves(float first, float second) {
  return bytes_of(bits_of(first), bits_of(second), 0x7632);
}

// Weights of the block's slice, in thirds, where `multiply_stream` reads them.
__device__ inline void split_weights(const float* weight, int part, uint4* space) {
#pragma unroll
  for (int pass = 0; pass < 2; pass++) {
    int item = pass * 32 * WARPS + thread();  // a lane, of eight rows, of a stream
    if (item >= 32 * ROWS / 8 * STREAMS) return;
    int eight = item / 32, stream = eight / (ROWS / 8), row = eight % (ROWS / 8) * 8 + lane() / 4;
    const float* own = weight + ((long long)row * STREAMS + stream) * DIM + part * SLICE;
    float4 first = *(const float4*)(own + lane() % 4 * 8);
    float4 second = *(const float4*)(own + lane() % 4 * 8 + 4);
    float rest[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (int third = 0; third < 3; third++) {
      space[(eight * 3 + third) * 32 + lane()] =
          make_uint4(upper_halves(rest[0], rest[1]), upper_halves(rest[2], rest[3]),
                     upper_halves(rest[4], rest[5]), upper_halves(rest[6], rest[7]));
#pragma unroll
      for (int i = 0; i < 8; i++) rest[i] -= upper_half(rest[i]);
    }
  }
}

typedef float Sums[ROWS / 8][4];

// sums += a stream's 32 elements of 16 tokens times its weights.
__device__ inline void multiply_stream(Sums& sums, const uint4 (&own)[2], const uint4* weights) {
  unsigned low[4] = {own[0].x, own[1].x, own[0].y, own[1].y};
  unsigned high[4] = {own[0].z, own[1].z, own[0].w, own[1].w};
#pragma unroll
  for (int eight = 0; eight < ROWS / 8; eight++) {
    float part[4] = {0, 0, 0, 0};
#pragma unroll
    for (int third = 2; third >= 0; third--) {
      uint4 right = weights[(eight * 3 + third) * 32 + lane()];
      add_product(part, low, right.x, right.y);
      add_product(part, high, right.z, right.w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sums[eight][i] += part[i];
  }
}

// Eight elements of one token, of every stream.
struct Token {
  uint4 y, streams[STREAMS];
  float4 post, mix[STREAMS];
};

__device__ inline void load_token(Token& own, const unsigned short* y, const unsigned short* streams,
                                  const float* post, const float* mix, long long token, int at) {
  own.y = *(const uint4*)(y + token * DIM + at);
  own.post = *(const float4*)(post + token * STREAMS);
#pragma unroll
  for (int j = 0; j < STREAMS; j++) {
    own.streams[j] = *(const uint4*)(streams + (token * STREAMS + j) * DIM + at);
    own.mix[j] = *(const float4*)(mix + (token * STREAMS + j) * STREAMS);
  }
}

__device__ inline float nth_of(const float4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// A token's next streams; adds their squares to `square`.
__device__ inline void close_token(const Token& own, uint4 (&next)[STREAMS], float& square) {
  Eight added = widened(own.y), old[STREAMS];
#pragma unroll
  for (int j = 0; j < STREAMS; j++) old[j] = widened(own.streams[j]);
#pragma unroll
  for (int k = 0; k < STREAMS; k++) {
    Eight total;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      total.of[i] = nth_of(own.post, k) * added.of[i];
#pragma unroll
      for (int j = 0; j < STREAMS; j++) total.of[i] += nth_of(own.mix[j], k) * old[j].of[i];
    }
    next[k] = narrowed(total);
    Eight rounded = widened(next[k]);
#pragma unroll
    for (int i = 0; i < 8; i++) square += rounded.of[i] * rounded.of[i];
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
close_slices(const unsigned short* y, const unsigned short* streams, const float* post,
             const float* mix, const float* weight, unsigned short* out, float* products,
             float* squares, int count) {
  SHARED_SPACE(space);
  int part = block() % PARTS, tile = block() / PARTS * WARPS + warp();
  split_weights(weight, part, (uint4*)space);
  block_sync();
  wait_before();
  if (tile * TILE >= count) return;
  int first = tile * TILE + lane() / 4, at = part * SLICE + lane() % 4 * 8;
  Token own[2] = {};
#pragma unroll
  for (int half = 0; half < 2; half++)
    if (first + 8 * half < count)
      load_token(own[half], y, streams, post, mix, first + 8 * half, at);
  let_next();
  uint4 next[2][STREAMS];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    long long token = first + 8 * half;
    float square = 0;
    close_token(own[half], next[half], square);
    square += xor_lane(square, 1);
    square += xor_lane(square, 2);
    if (token >= count) continue;
#pragma unroll
    for (int k = 0; k < STREAMS; k++)
      *(uint4*)(out + (token * STREAMS + k) * DIM + at) = next[half][k];
    if (lane() % 4 == 0) squares[token * PARTS + part] = square;
  }
  Sums sums = {};
#pragma unroll
  for (int k = 0; k < STREAMS; k++) {
    uint4 both[2] = {next[0][k], next[1][k]};
    multiply_stream(sums, both, (const uint4*)space + k * (ROWS / 8) * 3 * 32);
  }
#pragma unroll
  for (int eight = 0; eight < ROWS / 8; eight++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      long long token = first + i / 2 * 8;
      int row = eight * 8 + lane() % 4 * 2 + i % 2;
      if (token < count) products[(token * PARTS + part) * ROWS + row] = sums[eight][i];
    }
}
