// SPDX-License-Identifier: Apache-2.0
// What the kernels in this folder say to the machine. Each of them is compiled behind this text, by
// NVRTC on a device and, where tests run without one, by a C++ compiler behind another text that
// means the same.

#define SHARED_SPACE(name) extern __shared__ __align__(1024) unsigned char name[]

__device__ inline int thread() { return threadIdx.x; }
__device__ inline int lane() { return threadIdx.x & 31; }
__device__ inline int warp() { return threadIdx.x >> 5; }
__device__ inline int block() { return blockIdx.x; }

__device__ inline void block_sync() { __syncthreads(); }
__device__ inline void warp_sync() { __syncwarp(); }
__device__ inline unsigned lanes_with(bool flag) { return __ballot_sync(~0u, flag); }
// The lanes that gave what this one gave.
__device__ inline unsigned lanes_alike(int value) { return __match_any_sync(~0u, value); }
__device__ inline int warp_sum(int value) { return __reduce_add_sync(~0u, value); }
__device__ inline int from_lane(int value, int source) { return __shfl_sync(~0u, value, source); }
__device__ inline float xor_lane(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
__device__ inline int lanes_behind(int value, int by) { return __shfl_down_sync(~0u, value, by); }
__device__ inline int lanes_before(int value, int by) { return __shfl_up_sync(~0u, value, by); }
__device__ inline int first_one(unsigned bits) { return __ffs(bits) - 1; }
__device__ inline void count_one(int* counter) { atomicAdd(counter, 1); }
__device__ inline void add_to(int* sum, int more) { atomicAdd(sum, more); }
__device__ inline int next_of(int* counter) { return atomicAdd(counter, 1); }
// What was there; where that is `expected`, `value` is put there.
__device__ inline int swap_if(int* at, int expected, int value) {
  return atomicCAS(at, expected, value);
}
__device__ inline void lower(int* at, int value) { atomicMin(at, value); }
__device__ inline void set_bits(unsigned* at, unsigned bits) { atomicOr(at, bits); }
// NaN becomes -inf.
__device__ inline float without_nan(float x) { return fmaxf(x, __uint_as_float(0xff800000u)); }
__device__ inline unsigned bits_of(float value) { return __float_as_uint(value); }

// Let the next kernel begin, then wait for the end of the one before: see ops/cuda/chain.py.
__device__ inline void follow() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Blocks of a cluster: everyone's writes to shared memory are seen by all once all have arrived.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Two counters at `own` in the shared memory of block `rank` of the cluster.
__device__ inline int2 pair_of_block(const int* own, int rank) {
  unsigned local = (unsigned)__cvta_generic_to_shared(own), there;
  int2 pair;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(local), "r"(rank));
  asm volatile("ld.shared::cluster.v2.s32 {%0, %1}, [%2];"
               : "=r"(pair.x), "=r"(pair.y) : "r"(there) : "memory");
  return pair;
}

// Bring the line at `address` on towards the L2 cache.
__device__ inline void fetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// NaN stays NaN.
__device__ inline float relu(float x) {
  asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
  return x;
}
// Within 0 and 1; NaN becomes 0. It costs half of what `relu` does.
__device__ inline float clipped(float x) { return __saturatef(x); }
__device__ inline float value_of(unsigned bits) { return __uint_as_float(bits); }

// The nearest e4m3 of four floats, ties to even, the first in the lowest byte.
__device__ inline unsigned codes_of(float a, float b, float c, float d) {
  unsigned short low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return low | (unsigned)high << 16;
}

// The highest and the lowest of what the warp's lanes gave.
__device__ inline unsigned warp_most(unsigned value) { return __reduce_max_sync(~0u, value); }
__device__ inline unsigned warp_least(unsigned value) { return __reduce_min_sync(~0u, value); }

// Four floats at `own` in the shared memory of block `rank` of the cluster.
__device__ inline float4 four_of_block(const float* own, int rank) {
  unsigned local = (unsigned)__cvta_generic_to_shared(own), there;
  float4 four;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(local), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w) : "r"(there) : "memory");
  return four;
}
