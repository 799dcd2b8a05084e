// SPDX-License-Identifier: Apache-2.0
// Copies into shared memory that a barrier there counts, and products of a warp group's 64 rows
// with columns in shared memory: what Hopper has for itself (PTX ISA, "cp.async.bulk", "wgmma").

__device__ inline unsigned shared_address(const void* p) {
  return (unsigned)__cvta_generic_to_shared(p);
}

typedef unsigned long long Arrival;  // a barrier in shared memory, for one copy at a time

__device__ inline void open_arrival(Arrival* arrival) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrival)) : "memory");
}
// What one thread wrote, barriers and columns, is to be seen by copies and products.
__device__ inline void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void expect(Arrival* arrival, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(shared_address(arrival)), "r"(bytes) : "memory");
}
// Both addresses, and `bytes`, are multiples of 16.
__device__ inline void copy_in(void* to, const void* from, int bytes, Arrival* arrival) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(arrival)) : "memory");
}
__device__ inline void await(Arrival* arrival, int turn) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}"
      ::"r"(shared_address(arrival)), "r"(turn & 1) : "memory");
}

__device__ inline void group_sync(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// Columns for `multiply`: those of eight neighbours beside each other, 16 bytes of each at a time.
__device__ inline unsigned long long columns_at(const void* start, int row_bytes) {
  unsigned long long apart = 128 >> 4, next_eight = row_bytes * 8 >> 4;
  return (shared_address(start) >> 4 & 0x3fff) | apart << 16 | next_eight << 32;
}
#if FP8
#define PRODUCT "k32.f32.e4m3.e4m3"
#define ORDER
#else
#define PRODUCT "k16.f32.bf16.bf16"
#define ORDER ", 0"
#endif
__device__ inline void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void close_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// All products but those of the last `open` closings are done: what `sums` holds may be read.
template <int open, int n>
__device__ inline void await_products(float (&sums)[n]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(open) : "memory");
  for (int i = 0; i < n; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

// 32 bytes of 64 rows times so many columns, added to `s` if `more`.
#define TEN(n) "%" #n "0,%" #n "1,%" #n "2,%" #n "3,%" #n "4,%" #n "5,%" #n "6,%" #n "7,%" #n "8,%" #n "9,"
#define SIXTEEN "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define THIRTY "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," TEN(1) TEN(2)
#define SIXTY THIRTY TEN(3) TEN(4) TEN(5)
#define NINETY SIXTY TEN(6) TEN(7) TEN(8)
#define SUM8(i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3]), "+f"(s[i + 4]), \
                "+f"(s[i + 5]), "+f"(s[i + 6]), "+f"(s[i + 7])
#define SUM32(i) SUM8(i), SUM8(i + 8), SUM8(i + 16), SUM8(i + 24)
#define MULTIPLY(columns, n, places, left, right, flag, ...)                                   \
  __device__ inline void multiply(float (&s)[n], unsigned a, unsigned b, unsigned c, unsigned d, \
                                  unsigned long long at, int more) {                           \
    asm volatile("{\n.reg .pred more;\nsetp.ne.b32 more, " flag ", 0;\n"                       \
                 "wgmma.mma_async.sync.aligned.m64n" #columns PRODUCT " {" places "}, {" left  \
                 "}, " right ", more, 1, 1" ORDER ";\n}"                                       \
                 : __VA_ARGS__                                                                 \
                 : "r"(a), "r"(b), "r"(c), "r"(d), "l"(at), "r"(more));                        \
  }
MULTIPLY(32, 16, SIXTEEN, "%16,%17,%18,%19", "%20", "%21", SUM8(0), SUM8(8))
MULTIPLY(64, 32, THIRTY "%30,%31", "%32,%33,%34,%35", "%36", "%37", SUM32(0))
MULTIPLY(128, 64, SIXTY "%60,%61,%62,%63", "%64,%65,%66,%67", "%68", "%69", SUM32(0), SUM32(32))
MULTIPLY(192, 96, NINETY "%90,%91,%92,%93,%94,%95", "%96,%97,%98,%99", "%100", "%101", SUM32(0),
         SUM32(32), SUM32(64))
MULTIPLY(256, 128, NINETY TEN(9) TEN(10) TEN(11) "%120,%121,%122,%123,%124,%125,%126,%127",
         "%128,%129,%130,%131", "%132", "%133", SUM32(0), SUM32(32), SUM32(64), SUM32(96))
