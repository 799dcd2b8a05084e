// SPDX-License-Identifier: Apache-2.0
// What kernels of repacked MXFP4 experts have in common: numbers of a piece (ops/repacking.py) as
// fragments of a matrix instruction, those of a shared expert in FP8, and what lies between the two
// projections.

#define PIECE_BYTES 1088        // bytes of 16 rows of 128 inputs
#define PIECE_SCALES 1024  // where the codes end

#define PAIR_SIGNS 0x80008000u
#define FP4_BITS 0x81c081c0u  // signs, the last bits of exponents and the first of mantissas

struct Quad { unsigned of[4]; };

// Eight e2m1 of a word as pairs of 2^-126 times their values: inputs 0 and 1, 2 and 3, ..
__device__ inline Quad fp4_pairs(unsigned word) {
  return Quad{{word & FP4_BITS, turned(word, 6) & FP4_BITS, turned(word, 3) & FP4_BITS,
               (word & 0x001b001bu) * 0x4108u & FP4_BITS}};
}

// Whether a lane's scales, all and-ed behind `scale_marks`, can be met with one multiplication each.
__device__ inline unsigned scale_marks(unsigned scales) { return scales + 0x6161u; }
__device__ inline bool are_plain(unsigned marks) {
  return lanes_with((marks & 0x8080u) != 0x8080u) == 0;
}

// 2^(code - 127 - 30), twice, from byte `half` of two codes; times 2^126 if not `exact`, for codes
// 31 to 158.
template <bool exact>
__device__ inline unsigned fp4_factor(unsigned scales, unsigned half) {
  if (!exact) return bytes_of(scales, 0, half | 4 << 4 | half << 8 | 4 << 12) * 128 + 0x30003000u;
  int code = scales >> 8 * half & 255;
  unsigned bits = code == 255 ? 0x7fc0 : code > 30 ? (code - 30) << 7 : code > 22 ? 1 << (code - 24) : 0;
  return bits | bits << 16;
}

__device__ inline unsigned word_at(const uint4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// A word of a row's codes, multiplied by the row's scale.
template <bool exact>
__device__ inline Quad scaled_pairs(unsigned word, unsigned factor) {
  Quad pairs = fp4_pairs(word);
#pragma unroll
  for (int p = 0; p < 4; p++) {
    if (exact) pairs.of[p] = times(pairs.of[p], 0x7e807e80u);  // 2^126
    pairs.of[p] = times(pairs.of[p], factor);
  }
  return pairs;
}

// Eight e4m3 of two words as pairs of their values.
__device__ inline Quad fp8_pairs(unsigned first, unsigned second) {
  Quad pairs;
#pragma unroll
  for (int p = 0; p < 4; p++) {
    unsigned both = bytes_of(p < 2 ? first : second, 0, p % 2 ? 0x3424 : 0x1404);
    pairs.of[p] = times((both & PAIR_SIGNS) | (both >> 4 & 0x07f007f0u), 0x7b807b80u);  // 2^120
  }
  return pairs;
}

// Two sums += eight inputs of rows lane / 4 and 8 further on, times those of tokens: of the first
// four inputs, and of the others.
__device__ inline void add_rows(float (&even)[4], float (&odd)[4], const Quad& first,
                                const Quad& second, const uint4& tokens) {
  unsigned left[4] = {first.of[0], second.of[0], first.of[1], second.of[1]};
  add_product(even, left, tokens.x, tokens.y);
  unsigned next[4] = {first.of[2], second.of[2], first.of[3], second.of[3]};
  add_product(odd, next, tokens.z, tokens.w);
}

// silu(gate) * up, clamped as ops.clamped does.
template <bool clamped>
__device__ inline float swiglu(float gate, float up, float limit) {
  if (clamped) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  return gate / (1 + expf(-gate)) * up;
}
