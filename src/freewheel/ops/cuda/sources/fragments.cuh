// SPDX-License-Identifier: Apache-2.0
// Products of fragments that a warp holds in registers (PTX ISA, "mma.m16n8k16"), numbers in pairs
// of bfloat16, and reading what is read once.

__device__ inline void wait_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void let_next() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// 16 bytes at a multiple of 16, which no other thread wants.
__device__ inline uint4 read_once(const void* from) {
  uint4 four;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w) : "l"(from));
  return four;
}
// Past the first cache: see ops/cuda/chain.py.
__device__ inline int read_fresh(const int* from) { return __ldcg(from); }

__device__ inline int ones_in(unsigned bits) { return __popc(bits); }
// Byte i of the result is the one that digit i of `which` counts among those of low, then of high.
__device__ inline unsigned bytes_of(unsigned low, unsigned high, unsigned which) {
  return __byte_perm(low, high, which);
}

// Both numbers of a pair times those of another.
__device__ inline unsigned times(unsigned pair, unsigned other) {
  unsigned product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(other));
  return product;
}

// The nearest numbers, ties to even.
__device__ inline unsigned rounded_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Eight bfloat16 as floats, and the nearest ones of floats.
struct Eight { float of[8]; };
__device__ inline Eight widened(uint4 pairs) {
  unsigned of[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
  Eight wide;
#pragma unroll
  for (int i = 0; i < 8; i++)
    wide.of[i] = __uint_as_float(i % 2 ? of[i / 2] & 0xffff0000u : of[i / 2] << 16);
  return wide;
}
__device__ inline uint4 narrowed(const Eight& wide) {
  return make_uint4(rounded_pair(wide.of[0], wide.of[1]), rounded_pair(wide.of[2], wide.of[3]),
                    rounded_pair(wide.of[4], wide.of[5]), rounded_pair(wide.of[6], wide.of[7]));
}

// 1 / x, to the last bit but one; of an x that is no denormal number, nor so large that 1 / x is.
__device__ inline float inverse_of(float x) {
  float found;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
}

// The block's first `count` threads wait for one another: a multiple of 32.
__device__ inline void first_sync(int count) {
  asm volatile("bar.sync 1, %0;" ::"r"(count) : "memory");
}

// Sums [16, 8] += left [16, 16] times right [16, 8], of pairs.
__device__ inline void add_product(float (&sums)[4], const unsigned (&left)[4], unsigned right_low,
                                   unsigned right_high) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_low), "r"(right_high));
}

// The bits of a word, those of its end in front of the others.
__device__ inline unsigned turned(unsigned word, int by) { return __funnelshift_r(word, word, by); }

// Copies 16 bytes, both at multiples of 16, into shared memory; see `await_copies`.
__device__ inline void copy_piece(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
// All copies since the last closing belong together.
__device__ inline void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All copies of this thread but those of the last `open` closings are there.
template <int open>
__device__ inline void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(open) : "memory");
}

// A barrier in shared memory for those who arrive there and others who wait, turn by turn.
typedef unsigned long long Meeting;
__device__ inline void open_meeting(Meeting* meeting, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               ::"r"((unsigned)__cvta_generic_to_shared(meeting)), "r"(count) : "memory");
}
__device__ inline void arrive_at(Meeting* meeting) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               ::"r"((unsigned)__cvta_generic_to_shared(meeting)) : "memory");
}
__device__ inline void await_meeting(Meeting* meeting, int turn) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}"
      ::"r"((unsigned)__cvta_generic_to_shared(meeting)), "r"(turn & 1) : "memory");
}
