// SPDX-License-Identifier: Apache-2.0
// Products of bfloat16 tokens with FP8 weights in blocks of 128 x 128, by Hopper's instructions.
//
// A block multiplies 128 outputs by a tile of tokens over a share of the inputs. One thread has
// codes and tokens copied into two rings, and the first codes before the kernel in front has ended.
// Two groups of four warps multiply 64 outputs each: they read codes two at a time, and widen them
// in registers, where the instruction takes its left operand. A group waits for nothing but the
// rings: while one adds up and widens, the matrix units multiply for the other.
//
// Constants: TOKENS (32, 64 or 128), STAGES of tokens and CODES of codes that are on their way or
// read, WIDE (1: parts in float32, 0: results in bfloat16).

#define ROWS 128                       // outputs of a block
#define STEP 128                       // inputs at a time
#define WARPS 8                        // that multiply; one more copies
#define HANDING (TOKENS > 64)          // registers, by four warps of which one copies
#define THREADS (32 * WARPS + (HANDING ? 128 : 32))
#define STAGE (2 * STEP * TOKENS)      // bytes of a step's tokens
#define CODE_STAGE (ROWS * STEP)
#define PITCH (ROWS + 4)               // floats of a token's results, so that no banks conflict
#define SUMS (TOKENS / 2)              // of a thread

#if WIDE
typedef float Result;
#else
typedef unsigned short Result;  // the bits of a bfloat16
#endif

struct Rings {
  unsigned char *tokens, *codes;
  Arrival *tokens_full, *tokens_free, *codes_full, *codes_free;
};

struct Share {
  int output, token, first, steps;  // first output, token and step; how many steps
};

__device__ inline Rings open_rings(unsigned char* space) {
  unsigned char* start = space + (-(long long)space & 1023);
  Rings rings;
  rings.tokens = start;
  rings.codes = start + STAGES * STAGE;
  rings.tokens_full = (Arrival*)(rings.codes + CODES * CODE_STAGE);
  rings.tokens_free = rings.tokens_full + STAGES;
  rings.codes_full = rings.tokens_free + STAGES;
  rings.codes_free = rings.codes_full + CODES;
  return rings;
}

__device__ inline void open_barriers(const Rings& rings) {
  for (int i = 0; i < STAGES; i++) {
    open_counted(rings.tokens_full + i, 1);
    open_counted(rings.tokens_free + i, WARPS);
  }
  for (int i = 0; i < CODES; i++) {
    open_counted(rings.codes_full + i, 1);
    open_counted(rings.codes_free + i, WARPS);
  }
  publish();
}

__device__ inline void copy_codes(const Rings& rings, const Map& map, const Share& share,
                                  int step) {
  int slot = step % CODES;
  if (step >= CODES) await(rings.codes_free + slot, step / CODES - 1);
  expect(rings.codes_full + slot, CODE_STAGE);
  copy_box(rings.codes + slot * CODE_STAGE, map, (share.first + step) * STEP, share.output, 0, 0, 0,
           rings.codes_full + slot);
}

__device__ inline void copy_tokens(const Rings& rings, const Map& map, const Share& share,
                                   int step) {
  int slot = step % STAGES;
  if (step >= STAGES) await(rings.tokens_free + slot, step / STAGES - 1);
  expect(rings.tokens_full + slot, STAGE);
  for (int half = 0; half < 2; half++)
    copy_box(rings.tokens + slot * STAGE + half * (STAGE / 2), map,
             ((share.first + step) * 2 + half) * STEP, share.token, 0, 0, 0,
             rings.tokens_full + slot);
}

// All that a block reads, by one thread.
__device__ inline void feed(const Rings& rings, const Map& x, const Map& weight,
                            const Share& share) {
  wait_before();
  for (int step = 0; step < share.steps + STAGES; step++) {
    if (step < share.steps) copy_tokens(rings, x, share, step);
    int code = step - STAGES + CODES;
    if (step >= STAGES && code < share.steps) copy_codes(rings, weight, share, code);
  }
  let_next();
}

// Two bfloat16 each of four codes of e4m3, of 2^-120 of their values.
__device__ inline void move_bits(unsigned codes, unsigned& low_pair, unsigned& high_pair) {
  unsigned high = codes >> 4 & 0x07070707u, low = codes << 4 & 0xf0f0f0f0u;
  high |= codes & 0x80808080u;
  low_pair = bytes_of(low, high, 0x5140);
  high_pair = bytes_of(low, high, 0x7362);
}

// A step's codes of `row` and the row 8 below, for the thread's place in the left operand.
__device__ inline void read_codes(unsigned (&raw)[32], const unsigned char* codes, int row) {
  const unsigned char* own = codes + row * STEP + (lane() & 3) * 2;
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const unsigned short* upper = (const unsigned short*)(own + ((k ^ (row & 7)) << 4));
    const unsigned short* lower = upper + 8 * STEP / 2;
    move_bits(upper[0] | (unsigned)upper[4] << 16, raw[4 * k], raw[4 * k + 2]);
    move_bits(lower[0] | (unsigned)lower[4] << 16, raw[4 * k + 1], raw[4 * k + 3]);
  }
}

// By all lanes of a warp that have read what lies there.
__device__ inline void leave_free(Arrival* arrival) {
  warp_sync();
  if (lane() == 0) arrive(arrival);
}

__device__ inline void multiply_share(float (&total)[SUMS], const Rings& rings, const float* scale,
                                      int steps, int row) {
  float sums[SUMS], factor = scale[0];
  unsigned raw[32], left[32];
  await(rings.codes_full, 0);
  read_codes(raw, rings.codes, row);
  leave_free(rings.codes_free);
  for (int i = 0; i < SUMS; i++) total[i] = 0;
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    int slot = step % STAGES, code = (step + 1) % CODES;
    unsigned long long columns = swizzled_at(rings.tokens + slot * STAGE);
#pragma unroll
    for (int i = 0; i < 32; i++) left[i] = times(raw[i], 0x7b807b80u);  // 2^120
    await(rings.tokens_full + slot, step / STAGES);
    open_products();
#pragma unroll
    for (int k = 0; k < 8; k++)
      multiply(sums, left[4 * k], left[4 * k + 1], left[4 * k + 2], left[4 * k + 3],
               columns + (k / 4 * (STAGE / 2) + k % 4 * 32 >> 4), k > 0);
    close_products();
    float next = factor;
    if (step + 1 < steps) {  // beside the products
      next = scale[step + 1];
      await(rings.codes_full + code, (step + 1) / CODES);
      read_codes(raw, rings.codes + code * CODE_STAGE, row);
      leave_free(rings.codes_free + code);
    }
    await_products<0>(sums);
    leave_free(rings.tokens_free + slot);
#pragma unroll
    for (int i = 0; i < SUMS; i++) total[i] += sums[i] * factor;
    factor = next;
  }
}

#if WIDE
// A part: eight neighbours of a warp fill a sector of memory.
__device__ inline void leave(const float (&total)[SUMS], float* room, Result* out, int row,
                             const Share& share, int tokens, int outputs) {
  int n = share.output + row, left = tokens - share.token;
#pragma unroll
  for (int i = 0; i < SUMS; i++) {
    int m = i / 4 * 8 + (lane() & 3) * 2 + i % 2, below = i / 2 % 2 * 8;
    if (m < left && n + below < outputs)
      out[(long long)(share.token + m) * outputs + n + below] = total[i];
  }
}
#else
// Rounded, by way of `room`: shared memory that nobody reads or writes any more.
__device__ inline void leave(const float (&total)[SUMS], float* room, Result* out, int row,
                             const Share& share, int tokens, int outputs) {
  first_sync(32 * WARPS);
#pragma unroll
  for (int i = 0; i < SUMS / 4; i++) {
    float* at = room + (8 * i + 2 * (lane() & 3)) * PITCH + row;
    at[0] = total[4 * i], at[PITCH] = total[4 * i + 1];
    at[8] = total[4 * i + 2], at[PITCH + 8] = total[4 * i + 3];
  }
  first_sync(32 * WARPS);
  int n = share.output + 4 * lane();
#pragma unroll 4
  for (int m = warp(); m < TOKENS; m += WARPS) {
    if (share.token + m >= tokens || n >= outputs) continue;
    float4 four = *(const float4*)(room + m * PITCH + 4 * lane());
    uint2 two;
    two.x = rounded_pair(four.x, four.y), two.y = rounded_pair(four.z, four.w);
    *(uint2*)(out + (long long)(share.token + m) * outputs + n) = two;
  }
}
#endif

// Block (tile of tokens, part, tile of outputs), the last one first. `blocks` of inputs are shared
// by `parts`, `share` each but for the last; `scale_rows`: outputs that have a scale in common, a
// multiple of 128; `outputs` is a multiple of four.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    ring_products(MAP_PARAMETER x, MAP_PARAMETER weight, const float* scale, Result* out,
                  int tokens, int outputs, int blocks, int share, int parts, int scale_rows) {
  SHARED_SPACE(space);
  Rings rings = open_rings((unsigned char*)space);
  int tiles = (outputs + ROWS - 1) / ROWS, part = block() / tiles % parts;
  Share own = {block() % tiles * ROWS, block() / tiles / parts * TOKENS, part * share, 0};
  own.steps = min(share, blocks - own.first);
  if (warp() >= WARPS) {
    if (HANDING) give_registers<24>();
    bool first = warp() == WARPS && lane() == 0;
    if (first) {
      open_barriers(rings);
      for (int step = 0; step < min(CODES, own.steps); step++)
        copy_codes(rings, weight, own, step);
    }
    warp_sync();
    block_sync();
    if (first) feed(rings, x, weight, own);
  } else {
    if (HANDING) take_registers<240>();
    block_sync();
    int row = warp() * 16 + lane() / 4;
    const float* factors = scale + (long long)(own.output / scale_rows) * blocks + own.first;
    float total[SUMS];
    multiply_share(total, rings, factors, own.steps, row);
    out += (long long)part * tokens * outputs;
    leave(total, (float*)rings.tokens, out, row, own, tokens, outputs);
  }
}
