// SPDX-License-Identifier: Apache-2.0
// Boxes of a tensor that come into shared memory by themselves, barriers that several threads of a
// block cross, counters that blocks wait for, and FP8 products of operands that both lie in shared
// memory (PTX ISA, "cp.async.bulk.tensor", "mbarrier", "setmaxnreg", "wgmma").

// What the driver made of a tensor's address, sizes and strides: a parameter of a kernel.
struct alignas(64) Map { unsigned long long opaque[16]; };
#define MAP_PARAMETER __grid_constant__ const Map

// It is near when the first box is asked for.
__device__ inline void fetch_map(const Map& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
__device__ inline void open_counted(Arrival* arrival, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               ::"r"(shared_address(arrival)), "r"(count) : "memory");
}
// What this thread did before is seen by whoever awaits the barrier's turn.
__device__ inline void arrive(Arrival* arrival) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               ::"r"(shared_address(arrival)) : "memory");
}
// The box of a tensor of five dimensions that begins at (a, b, c, d, e), innermost first. Its rows
// have 128 bytes, and 16 bytes of a row are placed as `swizzled_at` reads them.
__device__ inline void copy_box(void* to, const Map& map, int a, int b, int c, int d, int e,
                                Arrival* arrival) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
      ::"r"(shared_address(to)), "l"(&map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e),
      "r"(shared_address(arrival)) : "memory");
}

// Rows or columns of 128 bytes for `multiply`, in lines that begin at a multiple of 1024.
__device__ inline unsigned long long swizzled_at(const void* start) {
  unsigned long long next_eight = 1024 >> 4, by_128 = 1;
  return (shared_address(start) >> 4 & 0x3fff) | 1ull << 16 | next_eight << 32 | by_128 << 62;
}
// The registers of a thread, from here on; by all four warps of a group.
template <int registers> __device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers> __device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
// 32 bytes of 64 rows times 8 columns, added to `s` if `more`.
__device__ inline void multiply(float (&s)[4], unsigned long long rows, unsigned long long columns,
                                int more) {
  asm volatile(
      "{\n.reg .pred more;\nsetp.ne.b32 more, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, more, 1, 1;\n}"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
      : "l"(rows), "l"(columns), "r"(more));
}
// The values of four codes of e4m3.
struct Values { float of[4]; };
__device__ inline Values values_of(unsigned codes) {
  unsigned low, high;
  Values found;
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high) : "r"(codes));
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
      : "=f"(found.of[0]), "=f"(found.of[1]) : "r"(low));
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
      : "=f"(found.of[2]), "=f"(found.of[3]) : "r"(high));
  return found;
}

// One more at `counter`: whoever awaits it sees what the warp stored before its last `warp_sync`.
__device__ inline void add_arrival(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ inline void await_arrivals(const int* counter, int count) {
  int seen;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  while (seen < count);
}
// What another block has stored.
__device__ inline uint4 read_fresh(const uint4* from) { return __ldcg(from); }
