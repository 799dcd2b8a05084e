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

// 32 bytes of 64 rows times 128 columns, added to `s` if `more`.
__device__ inline void multiply(float (&s)[64], unsigned a, unsigned b, unsigned c, unsigned d,
                                unsigned long long columns, int more) {
  asm volatile(
      "{\n.reg .pred more;\nsetp.ne.b32 more, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128" PRODUCT " {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16,"
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46,"
      "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61,"
      "%62, %63"
      "}, {%64, %65, %66, %67}, %68, more, 1, 1" ORDER ";\n}"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]),
        "+f"(s[7]), "+f"(s[8]), "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]),
        "+f"(s[13]), "+f"(s[14]), "+f"(s[15]), "+f"(s[16]), "+f"(s[17]), "+f"(s[18]),
        "+f"(s[19]), "+f"(s[20]), "+f"(s[21]), "+f"(s[22]), "+f"(s[23]), "+f"(s[24]),
        "+f"(s[25]), "+f"(s[26]), "+f"(s[27]), "+f"(s[28]), "+f"(s[29]), "+f"(s[30]),
        "+f"(s[31]), "+f"(s[32]), "+f"(s[33]), "+f"(s[34]), "+f"(s[35]), "+f"(s[36]),
        "+f"(s[37]), "+f"(s[38]), "+f"(s[39]), "+f"(s[40]), "+f"(s[41]), "+f"(s[42]),
        "+f"(s[43]), "+f"(s[44]), "+f"(s[45]), "+f"(s[46]), "+f"(s[47]), "+f"(s[48]),
        "+f"(s[49]), "+f"(s[50]), "+f"(s[51]), "+f"(s[52]), "+f"(s[53]), "+f"(s[54]),
        "+f"(s[55]), "+f"(s[56]), "+f"(s[57]), "+f"(s[58]), "+f"(s[59]), "+f"(s[60]),
        "+f"(s[61]), "+f"(s[62]), "+f"(s[63])
      : "r"(a), "r"(b), "r"(c), "r"(d), "l"(columns), "r"(more));
}

// 32 bytes of 64 rows times 64 columns, added to `s` if `more`.
__device__ inline void multiply(float (&s)[32], unsigned a, unsigned b, unsigned c, unsigned d,
                                unsigned long long columns, int more) {
  asm volatile(
      "{\n.reg .pred more;\nsetp.ne.b32 more, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64" PRODUCT " {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16,"
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, more, 1, 1" ORDER ";\n}"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]),
        "+f"(s[7]), "+f"(s[8]), "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]),
        "+f"(s[13]), "+f"(s[14]), "+f"(s[15]), "+f"(s[16]), "+f"(s[17]), "+f"(s[18]),
        "+f"(s[19]), "+f"(s[20]), "+f"(s[21]), "+f"(s[22]), "+f"(s[23]), "+f"(s[24]),
        "+f"(s[25]), "+f"(s[26]), "+f"(s[27]), "+f"(s[28]), "+f"(s[29]), "+f"(s[30]),
        "+f"(s[31])
      : "r"(a), "r"(b), "r"(c), "r"(d), "l"(columns), "r"(more));
}

// 32 bytes of 64 rows times 32 columns, added to `s` if `more`.
__device__ inline void multiply(float (&s)[16], unsigned a, unsigned b, unsigned c, unsigned d,
                                unsigned long long columns, int more) {
  asm volatile(
      "{\n.reg .pred more;\nsetp.ne.b32 more, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32" PRODUCT " {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, more, 1, 1" ORDER ";\n}"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]),
        "+f"(s[7]), "+f"(s[8]), "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]),
        "+f"(s[13]), "+f"(s[14]), "+f"(s[15])
      : "r"(a), "r"(b), "r"(c), "r"(d), "l"(columns), "r"(more));
}
