// SPDX-License-Identifier: Apache-2.0
// Copies of 16 bytes each that a barrier counts, tiles in shared memory whose rows of 128 bytes are
// turned, and products with them: what Hopper's warp groups do beside each other (PTX ISA,
// "cp.async", "wgmma").

typedef unsigned SharedPlace;  // in shared memory
__device__ inline SharedPlace shared_place(const void* p) { return shared_address(p); }

// 16 bytes, or zeros.
__device__ inline void copy_sixteen(SharedPlace to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0)
               : "memory");
}
__device__ inline void await_sixteens() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ inline void arrive_behind_copies(Arrival* arrival) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
               ::"r"(shared_address(arrival)) : "memory");
}
__device__ inline float power_of_two(float x) {
  float found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
}
// The first 256 threads wait for one another; `which`: 1 or 2.
__device__ inline void pair_sync(int which) {
  asm volatile("bar.sync %0, 256;" ::"r"(which) : "memory");
}
// Tiles whose 128 bytes of a row are turned by its number (PTX ISA, "128B swizzle"): rows by their
// columns, and as the transposed right factor.
__device__ inline unsigned long long turned_rows(SharedPlace at) {
  return (at >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ inline unsigned long long turned_values(SharedPlace at, int piece) {
  return (at >> 4 & 0x3fff) | (unsigned long long)(piece >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

#define F4(s, i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define F16(s, i) F4(s, i), F4(s, i + 4), F4(s, i + 8), F4(s, i + 12)
#define F64(s, i) F16(s, i), F16(s, i + 16), F16(s, i + 32), F16(s, i + 48)

// Scores [64, 32] (+)= 16 columns of queries times those of keys.
__device__ inline void multiply_keys(float (&s)[16], unsigned long long left,
                                     unsigned long long right, int more) {
  asm volatile(
      "{\n.reg .pred more;\nsetp.ne.b32 more, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, more, 1, 1, 0, 0;\n}"
      : F16(s, 0)
      : "l"(left), "l"(right), "r"(more));
}

// Sums [64, 256] += weights [64, 16] times the values of 16 keys.
__device__ inline void multiply_values(float (&s)[128], unsigned long long left,
                                       unsigned long long right) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19,"
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37,"
      "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55,"
      "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73,"
      "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91,"
      "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107,"
      "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122,"
      "%123, %124, %125, %126, %127"
      "}, %128, %129, 1, 1, 1, 0, 1;"
      : F64(s, 0), F64(s, 64)
      : "l"(left), "l"(right));
}

// All products but those of the last closing are done; what they found may not be read yet.
__device__ inline void await_older() {
  asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}
