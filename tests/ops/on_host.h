// SPDX-License-Identifier: Apache-2.0
// The words of ops/cuda/sources/parts.cuh for a machine without a GPU: the threads of a cluster are
// fibres that take turns, each running until it meets a barrier that others have not reached.
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

using std::max;
using std::min;

struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct Barrier {
  int members = 0, arrived = 0, turn = 0;
  void arrive() {
    if (++arrived == members) arrived = 0, turn++;
  }
};

struct Vote {
  Barrier barrier;
  int value[32];
};

struct Gathered {
  Barrier barrier;
  unsigned value[128][4];
};

struct Fibre {
  ucontext_t context;
  std::vector<char> stack;
  int thread, block, cluster_turn;
  bool done;
};

struct Blocks {
  std::vector<Fibre> fibres;
  std::vector<Barrier> inner;  // of a block
  std::vector<Barrier> firsts;  // of the first threads of one
  std::vector<Barrier> pairs;  // of a block's first 256 threads: three each
  std::vector<Vote> votes;     // of a warp
  std::vector<Gathered> rows;  // of four warps
  Barrier all;
  std::vector<char*> spaces;
  int first, per_block;
  Fibre* running;
  ucontext_t home;
  std::function<void()> body;
};
static Blocks* now;

inline void pass() { swapcontext(&now->running->context, &now->home); }
inline void meet(Barrier& barrier) {
  int turn = barrier.turn;
  barrier.arrive();
  while (barrier.turn == turn) pass();
}
inline int thread() { return now->running->thread; }
inline int lane() { return thread() & 31; }
inline int warp() { return thread() >> 5; }
inline int block() { return now->running->block; }
inline void block_sync() { meet(now->inner[block() - now->first]); }
inline void warp_sync() {
  meet(now->votes[((block() - now->first) * now->per_block + thread()) / 32].barrier);
}
inline void cluster_arrive() {
  now->running->cluster_turn = now->all.turn;
  now->all.arrive();
}
inline void cluster_wait() {
  int turn = now->running->cluster_turn;
  while (now->all.turn == turn) pass();
}

// What every lane of the warp gave, in `all`.
inline void exchange(int value, int* all) {
  Vote& vote = now->votes[((block() - now->first) * now->per_block + thread()) / 32];
  vote.value[lane()] = value;
  meet(vote.barrier);
  memcpy(all, vote.value, sizeof vote.value);
  meet(vote.barrier);
}
inline unsigned lanes_with(bool flag) {
  int all[32];
  exchange(flag, all);
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) bits |= (unsigned)all[i] << i;
  return bits;
}
inline unsigned lanes_alike(int value) {
  int all[32];
  exchange(value, all);
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) bits |= (unsigned)(all[i] == value) << i;
  return bits;
}
inline int warp_sum(int value) {
  int all[32], sum = 0;
  exchange(value, all);
  for (int one : all) sum += one;
  return sum;
}
inline int from_lane(int value, int source) {
  int all[32];
  exchange(value, all);
  return all[source & 31];
}
inline int lanes_behind(int value, int by) { return from_lane(value, min(lane() + by, 31)); }
inline int lanes_before(int value, int by) { return from_lane(value, max(lane() - by, 0)); }
inline unsigned warp_most(unsigned value) {
  int all[32];
  exchange(value, all);
  unsigned most = 0;
  for (int one : all) most = max(most, (unsigned)one);
  return most;
}
inline unsigned warp_least(unsigned value) { return ~warp_most(~value); }
inline int first_one(unsigned bits) { return std::countr_zero(bits); }
inline void count_one(int* counter) { ++*counter; }
inline void add_to(int* sum, int more) { *sum = (int)((unsigned)*sum + (unsigned)more); }
inline int swap_if(int* at, int expected, int value) {
  int there = *at;
  if (there == expected) *at = value;
  return there;
}
inline void lower(int* at, int value) { *at = min(*at, value); }
inline void set_bits(unsigned* at, unsigned bits) { *at |= bits; }
inline int next_of(int* counter) { return (*counter)++; }
inline float without_nan(float x) { return std::fmax(x, -INFINITY); }
inline unsigned bits_of(float value) { return std::bit_cast<unsigned>(value); }
inline void follow() {}
inline void fetch(const void*) {}

#define SHARED_SPACE(name) char* name = now->spaces[block() - now->first]
inline int2 pair_of_block(const int* own, int rank) {
  auto offset = (const char*)own - now->spaces[block() - now->first];
  return *(const int2*)(now->spaces[rank] + offset);
}
inline float4 four_of_block(const float* own, int rank) {
  auto offset = (const char*)own - now->spaces[block() - now->first];
  return *(const float4*)(now->spaces[rank] + offset);
}

inline float value_of(unsigned bits) { return std::bit_cast<float>(bits); }
inline float relu(float x) { return x < 0 ? 0 : x; }
inline float clipped(float x) { return x > 0 ? min(x, 1.0f) : 0; }
inline float xor_lane(float value, int mask) {
  return value_of(from_lane(bits_of(value), lane() ^ mask));
}

inline float e4m3(unsigned code) {
  int exponent = code >> 3 & 15, digits = code & 7;
  if ((code & 127) == 127) return NAN;
  float size = exponent ? std::ldexp(8 + digits, exponent - 10) : std::ldexp(digits, -9);
  return code & 128 ? -size : size;
}
inline unsigned code_of(float x) {
  if (x != x) return 127;
  float size = std::fabs(x);
  unsigned best = 0;
  for (unsigned code = 1; code < 127; code++) {
    float off = std::fabs(size - e4m3(code)), now = std::fabs(size - e4m3(best));
    if (off < now || (off == now && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(x) ? 128 : 0);
}
inline unsigned codes_of(float a, float b, float c, float d) {
  return code_of(a) | code_of(b) << 8 | code_of(c) << 16 | code_of(d) << 24;
}

// Copies are over when they begin. An arrival: how many make a turn, how many are still to come,
// and in the upper half the turns that are over.
typedef unsigned long long Arrival;
inline void open_counted(Arrival* arrival, int count) { *arrival = count | count << 16; }
inline void open_arrival(Arrival* arrival) { open_counted(arrival, 1); }
inline void arrive(Arrival* arrival) {
  bool last = (*arrival >> 16 & 0xffff) == 1;
  if (!last) *arrival -= 1 << 16;
  else *arrival = (*arrival & 0xffff) * 0x10001 | ((*arrival >> 32) + 1) << 32;
}
inline void publish() {}
inline void expect(Arrival* arrival, int) { arrive(arrival); }
inline void copy_in(void* to, const void* from, int bytes, Arrival*) { memcpy(to, from, bytes); }
inline void await(Arrival* arrival, int turn) {
  while ((*arrival >> 32 & 1) == (turn & 1)) pass();
}
inline unsigned shared_address(const void* p) { return (unsigned)(uintptr_t)p; }

// A tensor of bytes: what the driver is told of one. What lies outside of it is zero.
struct Map {
  const unsigned char* start;
  unsigned long long sizes[5], strides[5];
  unsigned box[5];
};
#define MAP_PARAMETER const Map&
inline void fetch_map(const Map&) {}
inline void copy_box(void* to, const Map& map, int a, int b, int c, int d, int e, Arrival*) {
  int from[5] = {a, b, c, d, e};
  unsigned long long at[5], line = 0;
  for (at[4] = 0; at[4] < map.box[4]; at[4]++)
    for (at[3] = 0; at[3] < map.box[3]; at[3]++)
      for (at[2] = 0; at[2] < map.box[2]; at[2]++)
        for (at[1] = 0; at[1] < map.box[1]; at[1]++, line++)
          for (at[0] = 0; at[0] < map.box[0]; at[0]++) {
            bool inside = true;
            unsigned long long offset = 0;
            for (int i = 0; i < 5; i++)
              inside &= from[i] + at[i] < map.sizes[i],
                  offset += (from[i] + at[i]) * map.strides[i];
            uintptr_t place = (uintptr_t)to + line * 128 + at[0];
            *(unsigned char*)(place ^ (place >> 7 & 7) << 4) = inside ? map.start[offset] : 0;
          }
}
inline Gathered& own_rows() {
  return now->rows[(block() - now->first) * ((now->per_block + 127) / 128) + thread() / 128];
}
inline void group_sync(int) { meet(own_rows().barrier); }
static int column_bytes;  // 0: of columns in swizzled lines
static int piece_bytes;
inline unsigned long long columns_at(const void* start, int row_bytes) {
  column_bytes = row_bytes;
  return (uintptr_t)start >> 4;
}
inline void open_products() {}
inline void close_products() {}
template <int open, int n> void await_products(float (&)[n]) {}

// Rows in swizzled lines of 128 bytes, and columns, both in shared memory.
inline unsigned long long swizzled_at(const void* start) { return columns_at(start, 0); }
template <int> void give_registers() {}
template <int> void take_registers() {}
// 16 bytes, the `half`th of two, of a column.
inline const unsigned char* sixteen_of(unsigned long long columns, int column, int half) {
  uintptr_t start = columns << 4, at = start + column * 128 + half * 16;
  if (column_bytes) at = start + column / 8 * 8 * column_bytes + column % 8 * 16 + half * 128;
  return (const unsigned char*)(column_bytes ? at : at ^ (at >> 7 & 7) << 4);
}
inline float e4m3_at(uintptr_t place) {
  static const std::vector<float> known = [] {
    std::vector<float> all;
    for (unsigned code = 0; code < 256; code++) all.push_back(e4m3(code));
    return all;
  }();
  return known[*(const unsigned char*)place];
}
inline void multiply(float (&sums)[4], unsigned long long rows, unsigned long long columns,
                     int more) {
  for (int i = 0; i < 4; i++) {
    int row = thread() % 128 / 32 * 16 + lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
    float sum = more ? sums[i] : 0;
    for (int k = 0; k < 32; k++) {
      uintptr_t place = (rows << 4) + row * 128 + k;
      sum += e4m3_at(place ^ (place >> 7 & 7) << 4) *
             e4m3_at((columns << 4) + k / 16 * 128 + column * 16 + k % 16);
    }
    sums[i] = sum;
  }
  meet(own_rows().barrier);
}

#ifdef FP8
// The fragments of a matrix instruction, as the PTX ISA draws them for wgmma.
template <int n>
void multiply(float (&sums)[n], unsigned a, unsigned b, unsigned c, unsigned d,
              unsigned long long columns, int more) {
  Gathered& rows = own_rows();
  unsigned own[4] = {a, b, c, d};
  memcpy(rows.value[thread() % 128], own, sizeof own);
  meet(rows.barrier);
  for (int i = 0; i < n; i++) {
    int row = lane() / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
    float sum = more ? sums[i] : 0;
    for (int word = 0; word < 8; word++) {
      int from = thread() % 128 / 32 * 32 + row % 8 * 4 + word % 4;
      unsigned left = rows.value[from][row / 8 + word / 4 * 2], other;
      memcpy(&other, sixteen_of(columns, column, word / 4) + word % 4 * 4, 4);
      for (int at = 0; at < 32; at += FP8 ? 8 : 16)
        sum += FP8 ? e4m3(left >> at & 255) * e4m3(other >> at & 255)
                   : value_of(left >> at << 16) * value_of(other >> at << 16);
    }
    sums[i] = sum;
  }
  meet(rows.barrier);
}
#endif

// What fragments.cuh says.
inline void wait_before() {}
inline void let_next() {}
inline uint4 read_once(const void* from) { return *(const uint4*)from; }
inline int read_fresh(const int* from) { return *from; }
inline uint4 read_fresh(const uint4* from) { return *from; }
inline void add_arrival(int* counter) { ++*counter; }
inline void await_arrivals(const int* counter, int count) {
  while (*counter < count) pass();
}
struct Values { float of[4]; };
inline Values values_of(unsigned codes) {
  Values found;
  for (int i = 0; i < 4; i++) found.of[i] = e4m3(codes >> 8 * i & 255);
  return found;
}
inline int ones_in(unsigned bits) { return std::popcount(bits); }
inline unsigned bytes_of(unsigned low, unsigned high, unsigned which) {
  unsigned long long both = low | (unsigned long long)high << 32;
  unsigned found = 0;
  for (int i = 0; i < 4; i++) found |= (both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return found;
}
inline unsigned nearest_half(float x) {
  unsigned bits = bits_of(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned rounded_pair(float low, float high) {
  return nearest_half(low) | nearest_half(high) << 16;
}
struct Eight { float of[8]; };
inline Eight widened(uint4 pairs) {
  unsigned of[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
  Eight wide;
  for (int i = 0; i < 8; i++) wide.of[i] = value_of(i % 2 ? of[i / 2] & 0xffff0000u : of[i / 2] << 16);
  return wide;
}
inline uint4 narrowed(const Eight& wide) {
  return make_uint4(rounded_pair(wide.of[0], wide.of[1]), rounded_pair(wide.of[2], wide.of[3]),
                    rounded_pair(wide.of[4], wide.of[5]), rounded_pair(wide.of[6], wide.of[7]));
}
inline unsigned turned(unsigned word, int by) { return std::rotr(word, by); }
inline void copy_piece(void* to, const void* from) { memcpy(to, from, 16); }
inline void close_copies() {}
template <int open> void await_copies() {}
typedef unsigned long long Meeting;  // members, arrived, turns that are over
inline void open_meeting(unsigned long long* own, int count) {
  *own = (unsigned long long)count << 48;
}
inline void arrive_at(unsigned long long* own) {
  *own += 1ull << 32;
  if ((*own >> 32 & 0xffff) == *own >> 48) *own = (*own & 0xffff0000ffffffffull) + 1;
}
inline void await_meeting(unsigned long long* own, int turn) {
  while ((unsigned)*own <= (unsigned)turn) pass();
}
inline float inverse_of(float x) { return 1 / x; }
inline void first_sync(int count) {
  Barrier& barrier = now->firsts[block() - now->first];
  barrier.members = count;
  meet(barrier);
}
inline unsigned times(unsigned pair, unsigned other) {
  float low = value_of(pair << 16) * value_of(other << 16);
  float high = value_of(pair & 0xffff0000u) * value_of(other & 0xffff0000u);
  return nearest_half(low) | nearest_half(high) << 16;
}
inline void add_product(float (&sums)[4], const unsigned (&left)[4], unsigned right_low,
                        unsigned right_high) {
  int rows[4][32], columns[2][32];
  for (int i = 0; i < 4; i++) exchange(left[i], rows[i]);
  exchange(right_low, columns[0]), exchange(right_high, columns[1]);
  for (int i = 0; i < 4; i++)
    for (int word = 0; word < 8; word++) {  // words 0 to 3: inputs 0 to 7, the others: 8 to 15
      unsigned a = rows[i / 2 + word / 4 * 2][lane() / 4 * 4 + word % 4];
      unsigned b = columns[word / 4][(lane() % 4 * 2 + i % 2) * 4 + word % 4];
      sums[i] += value_of(a << 16) * value_of(b << 16);
      sums[i] += value_of(a & 0xffff0000u) * value_of(b & 0xffff0000u);
    }
}

// What turned.cuh says. The fragments of wgmma's sums and left factors are those of `mma`.
typedef unsigned long long SharedPlace;
inline SharedPlace shared_place(const void* p) { return (SharedPlace)p; }
inline void copy_sixteen(SharedPlace to, const void* from, bool real) {
  real ? memcpy((void*)to, from, 16) : memset((void*)to, 0, 16);
}
inline void await_sixteens() {}
inline void await_older() {}
inline void arrive_behind_copies(Arrival* arrival) { arrive(arrival); }
inline float power_of_two(float x) { return std::exp2(x); }
inline void pair_sync(int which) { meet(now->pairs[(block() - now->first) * 3 + which]); }
inline unsigned long long turned_rows(SharedPlace at) { return at >> 4; }
inline unsigned long long turned_values(SharedPlace at, int piece) {
  piece_bytes = piece;
  return at >> 4;
}
inline float turned(unsigned long long at) {
  return value_of(*(const unsigned short*)(at ^ (at >> 7 & 7) << 4) << 16);
}
inline void multiply_keys(float (&s)[16], unsigned long long left, unsigned long long right, int more) {
  auto in_row = [](int row, int k) { return row / 8 * 1024 + row % 8 * 128 + k * 2; };
  int first = thread() % 128 / 32 * 16 + lane() / 4;
  float own[2][16];
  for (int i = 0; i < 32; i++)
    own[i / 16][i % 16] = turned((left << 4) + in_row(first + i / 16 * 8, i % 16));
  for (int i = 0; i < 16; i++) {
    if (!more) s[i] = 0;
    for (int k = 0; k < 16; k++)
      s[i] += own[i / 2 % 2][k] * turned((right << 4) + in_row(i / 4 * 8 + lane() % 4 * 2 + i % 2, k));
  }
}
inline void multiply_values(float (&s)[128], unsigned long long left, unsigned long long right) {
  int first = thread() % 128 / 32 * 16 + lane() / 4;
  for (int k = 0; k < 16; k++)
    for (int i = 0; i < 128; i++) {
      int row = first + i / 2 % 2 * 8, column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
      s[i] += turned((left << 4) + row / 8 * 1024 + row % 8 * 128 + k * 2) *
              turned((right << 4) + column / 64 * piece_bytes + k * 128 + column % 64 * 2);
    }
}
inline void enter() {
  now->body();
  now->running->done = true;
  pass();
}

// Run `body` in `blocks` blocks of `threads`, `cluster` of them at a time.
inline void run_blocks(int blocks, int cluster, int threads, int bytes, std::function<void()> body) {
  std::vector<std::unique_ptr<char[]>> memory;
  Blocks own;
  now = &own;
  own.body = std::move(body);
  own.per_block = threads;
  own.fibres.resize(cluster * threads);
  for (int i = 0; i < cluster; i++) {
    memory.emplace_back(new char[bytes + 1024]);
    own.spaces.push_back((char*)(((uintptr_t)memory.back().get() + 1023) / 1024 * 1024));
  }
  for (own.first = 0; own.first < blocks; own.first += cluster) {
    own.inner.assign(cluster, {threads});
    own.firsts.assign(cluster, {});
    own.pairs.assign(3 * cluster, {256});
    own.votes.assign(cluster * threads / 32, {{32}, {}});
    own.rows.assign(cluster * ((threads + 127) / 128), {{128}, {}});
    own.all = {cluster * threads};
    for (char* space : own.spaces) memset(space, 0xa5, bytes);
    for (int i = 0; i < cluster * threads; i++) {
      Fibre& fibre = own.fibres[i];
      fibre.stack.resize(1 << 16);
      fibre.thread = i % threads, fibre.block = own.first + i / threads, fibre.done = false;
      getcontext(&fibre.context);
      fibre.context.uc_stack.ss_sp = fibre.stack.data();
      fibre.context.uc_stack.ss_size = fibre.stack.size();
      makecontext(&fibre.context, enter, 0);
    }
    for (bool left = true; left;) {
      left = false;
      for (Fibre& fibre : own.fibres) {
        if (fibre.done) continue;
        left = true, own.running = &fibre;
        swapcontext(&own.home, &fibre.context);
      }
    }
  }
}
