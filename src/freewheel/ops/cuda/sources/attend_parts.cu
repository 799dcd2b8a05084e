// SPDX-License-Identifier: Apache-2.0
// One part of an attention whose keys are its values, of at most 8 heads: 64 lanes of one of two
// lists, as the kernel in ops/cuda/sinks.py computes it.
//
// A block copies the rows of its lanes into shared memory whole. Keys stand on the left of both
// products, so 8 heads fill what stands on the right. A thread reads 16 bytes of a key at a time,
// and products take their inputs in the order in which they then lie: dimensions in the first one,
// keys in the second. Rows are 32 bytes apart more than they are long, so eight threads that read
// together find 16 bytes each in distinct banks.
//
// Constants: DIM of a head, a multiple of 256.

#define LANES 64
#define HEADS 8
#define PITCH (2 * DIM + 32)  // bytes from row to row
#define GROUPS (DIM / 256)    // of 64 dimensions that a warp sums up
#define HEAD 64               // bytes of shared memory in front of the keys
#define NOTHING value_of(0xff800000u)  // the score of what is not there

// Lanes that are there, in two words.
struct Live {
  unsigned of[2];
};
__device__ inline bool is_live(const Live& live, int row) {
  return (row < 32 ? live.of[0] : live.of[1]) >> row % 32 & 1;
}

__device__ inline unsigned word_of(const uint4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// Rows without a lane are zeros: their weight is 0, and no product may become NaN.
__device__ inline void clear_rows(unsigned char* keys, const Live& live) {
  for (int row = warp() * 16; row < warp() * 16 + 16; row++)
    for (int at = lane(); at < DIM / 8 && !is_live(live, row); at += 32)
      *(uint4*)(keys + row * PITCH + at * 16) = make_uint4(0, 0, 0, 0);
}

// Scores of keys lane / 4 and 8 further on of the warp's 16, of heads lane % 4 * 2 and the next.
__device__ inline void score(float (&scores)[4], const unsigned char* keys, const unsigned char* query,
                             const Live& live, float scale) {
  float sums[2][4] = {};
  int row = warp() * 16 + lane() / 4, quarter = lane() % 4;
  int place = quarter + (quarter & 2);
#pragma unroll
  for (int step = 0; step < DIM / 32; step++) {
    int at = (step / 2 * 8 + place + step % 2 * 2) * 16;
    uint4 one = *(const uint4*)(keys + row * PITCH + at);
    uint4 other = *(const uint4*)(keys + (row + 8) * PITCH + at);
    uint4 own = *(const uint4*)(query + lane() / 4 * PITCH + at);
    unsigned first[4] = {one.x, other.x, one.y, other.y};
    unsigned second[4] = {one.z, other.z, one.w, other.w};
    add_product(sums[0], first, own.x, own.y);
    add_product(sums[1], second, own.z, own.w);
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    scores[i] = is_live(live, row + i / 2 * 8) ? (sums[0][i] + sums[1][i]) * scale : NOTHING;
}

// Of both heads of a lane: the largest of the warp's keys, or their sum.
template <bool sum>
__device__ inline void reduce(float (&of)[2], const float (&values)[4]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    of[i] = sum ? values[i] + values[i + 2] : max(values[i], values[i + 2]);
    for (int mask = 4; mask < 32; mask *= 2) {
      float other = xor_lane(of[i], mask);
      of[i] = sum ? of[i] + other : max(of[i], other);
    }
  }
}

struct Room {
  float high[4][HEADS], total[4][HEADS];    // of a warp
  unsigned short weights[HEADS][LANES + 8];  // of 16 keys: those of one lane side by side
};

// The weights of all keys, for `mix`; high and total of the part.
__device__ inline void weigh(Room* room, const float (&scores)[4], float* high_out, float* total_out,
                             int heads) {
  int quarter = lane() % 4;
  float own[2], weights[4], shift[2];
  reduce<false>(own, scores);
  if (lane() < 4)
    for (int i = 0; i < 2; i++) room->high[warp()][2 * quarter + i] = own[i];
  block_sync();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int head = 2 * quarter + i;
    float high = max(max(room->high[0][head], room->high[1][head]),
                     max(room->high[2][head], room->high[3][head]));
    shift[i] = high == NOTHING ? 0 : high;
    if (thread() < 4 && head < heads) high_out[head] = high;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    weights[i] = expf(scores[i] - shift[i % 2]);
    int key = lane() / 4 + i / 2 * 8;
    room->weights[2 * quarter + i % 2][warp() * 16 + key % 4 * 4 + key / 4] =
        rounded_pair(weights[i], 0);
  }
  reduce<true>(own, weights);
  if (lane() < 4)
    for (int i = 0; i < 2; i++) room->total[warp()][2 * quarter + i] = own[i];
  block_sync();
  if (thread() < heads)
    total_out[thread()] = room->total[0][thread()] + room->total[1][thread()] +
                          (room->total[2][thread()] + room->total[3][thread()]);
}

// The warp's dimensions of all keys, weighed and summed.
__device__ inline void mix(float* out, const unsigned char* keys, const Room* room, int heads) {
  int own = lane() / 4, quarter = lane() % 4;
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    float sums[4][4] = {};
    int first = (warp() * GROUPS + group) * 64 + own * 8;
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      uint2 weights = *(const uint2*)(room->weights[own] + tile * 16 + quarter * 4);
      uint4 rows[4];
#pragma unroll
      for (int j = 0; j < 4; j++)
        rows[j] = *(const uint4*)(keys + (tile * 16 + quarter + 4 * j) * PITCH + first * 2);
#pragma unroll
      for (int t = 0; t < 4; t++) {
        unsigned w[4] = {word_of(rows[0], t), word_of(rows[1], t), word_of(rows[2], t),
                         word_of(rows[3], t)};
        unsigned left[4] = {bytes_of(w[0], w[1], 0x5410), bytes_of(w[0], w[1], 0x7632),
                            bytes_of(w[2], w[3], 0x5410), bytes_of(w[2], w[3], 0x7632)};
        add_product(sums[t], left, weights.x, weights.y);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int head = 2 * quarter + i;
      float4* to = (float4*)(out + head * DIM + first);
      if (head >= heads) continue;
      to[0] = make_float4(sums[0][i], sums[0][i + 2], sums[1][i], sums[1][i + 2]);
      to[1] = make_float4(sums[2][i], sums[2][i + 2], sums[3][i], sums[3][i + 2]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(128, 3)
attend_parts(const unsigned short* query, const unsigned short* keys, const int* slots,
             const unsigned short* entries, const int* entry_slots, float* part_out,
             float* high_out, float* total_out, float scale, int width, int others, int key_parts,
             int parts, int heads) {
  SHARED_SPACE(space);
  Arrival* arrival = (Arrival*)space;
  Live* found = (Live*)(space + 16);
  unsigned char *rows = (unsigned char*)space + HEAD, *own = rows + LANES * PITCH;
  follow();
  long long n = block() / parts, part = block() % parts, cell = (n * parts + part) * heads;
  bool more = part >= key_parts;
  int at = (more ? part - key_parts : part) * LANES + thread(), count = more ? others : width;
  const int* list = more ? entry_slots + n * others : slots + n * width;
  int slot = thread() < LANES && at < count ? list[at] : -1;
  unsigned there = lanes_with(slot >= 0);
  if (thread() < LANES && lane() == 0) found->of[warp()] = there;
  if (thread() == 0) {
    open_arrival(arrival);
    publish();
  }
  block_sync();
  Live live = *found;
  int lanes = ones_in(live.of[0]) + ones_in(live.of[1]);
  if (lanes == 0) {
    if (thread() < heads) {
      high_out[cell + thread()] = NOTHING;
      total_out[cell + thread()] = 0;
    }
    return;
  }
  if (thread() == 0) expect(arrival, (lanes + heads) * 2 * DIM);
  int head = thread() - LANES;
  if (slot >= 0)
    copy_in(rows + thread() * PITCH, (more ? entries : keys) + (long long)slot * DIM, 2 * DIM, arrival);
  else if (head >= 0 && head < heads)
    copy_in(own + head * PITCH, query + (n * heads + head) * DIM, 2 * DIM, arrival);
  clear_rows(rows, live);
  block_sync();
  await(arrival, 0);
  float scores[4];
  score(scores, rows, own, live, scale);
  block_sync();  // all have read the queries, and something else may lie there
  Room* room = (Room*)own;
  weigh(room, scores, high_out + cell, total_out + cell, heads);
  mix(part_out + cell * DIM, rows, room, heads);
}
