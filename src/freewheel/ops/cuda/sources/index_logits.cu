// SPDX-License-Identifier: Apache-2.0
// Index logits: as ops.attention.index_logits over keys in bfloat16, or ops.packed.fp8_index_logits
// over packed keys, in which a query is rounded to FP8 too.
//
// A warp group scores 64 keys at a time for all queries of its block, so a key is read once. Keys
// come by bulk copies, several on their way; they meet the queries as rows from registers, where
// 16 bytes are read at once. So bytes are multiplied in another order than they lie in, the same on
// both sides: of every 128 bytes, a step takes word `step` of each 16. Sums over heads are made in
// one order whatever the number of queries.
//
// Constants: FP8, HEADS (32 or 64), QUERIES of a block, JOINED of them in one product (1, or 2 of an
// even number), BUFFERS of products, GROUPS of four warps, STAGES of keys on their way, PAGE (a
// multiple of 64), BLOCKS of a multiprocessor at least.

#define DIM 128
#define ROW (FP8 ? DIM : 2 * DIM)  // bytes of a key
#define KEYS 64
#define SCALES (FP8 ? 4 * KEYS : 0)
#define STAGE (KEYS * ROW + SCALES)
#define THREADS (128 * GROUPS)
#define PAGE_BYTES (PAGE * (ROW + (FP8 ? 4 : 0)))
#define STEPS (ROW / 32)
#define CHUNKS (ROW / 64)  // of 16 bytes, of a key and thread
#define SUMS (JOINED * HEADS / 2)
#define BATCH 4  // heads that 16 lanes load at once

// No product of FP8 rows is larger. Products are divided by it, so that clipping, which is cheaper,
// cuts off what is negative and nothing else. (NaN is in the scales.)
#define LARGEST (FP8 ? 0x1p25f : 1.0f)

// Where 4 bytes stand that are word `word` of 16 bytes `chunk` of a query's head.
__device__ inline int place_of_word(int head, int chunk, int word) {
  int step = chunk / 8 * 4 + word;
  int sixteen = 2 * step + chunk % 8 / 4;
  return head / 8 * (8 * ROW) + sixteen * 128 + head % 8 * 16 + chunk % 4 * 4;
}

__device__ inline float half_of(unsigned pair, int nth) {
  return value_of(nth ? pair & 0xffff0000u : pair << 16);
}

// One head's share of 16 lanes, 8 values each, to its places; returns the factor of its products.
__device__ inline float place_head(unsigned char* columns, int head, uint4 eight) {
  unsigned pair[4] = {eight.x, eight.y, eight.z, eight.w};
  int part = lane() & 15;
#if FP8
  float most = 0, x[8];
  bool unknown = false;
  for (int i = 0; i < 8; i++) {
    x[i] = half_of(pair[i / 2], i & 1);
    unknown |= x[i] != x[i];
    most = max(most, x[i] < 0 ? -x[i] : x[i]);
  }
  for (int mask = 1; mask < 16; mask *= 2) most = max(most, xor_lane(most, mask));
  unsigned strange = lanes_with(unknown);
  if (strange >> (lane() & 16) & 0xffff) most = value_of(0x7fc00000u);
  float scale = most == 0 ? 1 : most / 448;
  scale = scale < 0x1p-126f ? 0x1p-126f : scale;
  float inverse = 1 / scale;
  for (int i = 0; i < 8; i++) {  // x / scale, rounded once (P. Markstein, 1990)
    float near = x[i] * inverse;
    x[i] = fmaf(fmaf(-near, scale, x[i]), inverse, near);
  }
  for (int i = 0; i < 2; i++) {
    unsigned codes = codes_of(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    *(unsigned*)(columns + place_of_word(head, part / 2, part % 2 * 2 + i)) = codes;
  }
  return scale * LARGEST;
#else
  for (int i = 0; i < 4; i++)
    *(unsigned*)(columns + place_of_word(head, part, i)) = pair[i];
  return 1;
#endif
}

template <int n> struct Number { static constexpr int value = n; };

struct Heads {
  uint4 eight[BATCH];  // a lane's values
  float gate[BATCH];
};

// Of the block's heads, every so-many-th from `nth` on.
__device__ inline Heads load_heads(const unsigned short* query, const float* gates, int nth,
                                   int first, int width, int query_token, int query_head,
                                   int gate_token) {
  Heads heads;
#pragma unroll
  for (int i = 0; i < BATCH; i++) {
    int w = first + nth / HEADS, head = nth % HEADS;
    heads.eight[i] = make_uint4(0, 0, 0, 0), heads.gate[i] = 0;
    if (w < width && nth < QUERIES * HEADS) {
      const unsigned short* own = query + (long long)w * query_token + head * query_head;
      heads.eight[i] = *(const uint4*)(own + (lane() & 15) * 8);
      heads.gate[i] = gates[(long long)w * gate_token + head];
    }
    nth += THREADS / 16;
  }
  return heads;
}

struct Tiles {
  int first, apart, count;  // of a warp group: blocks of 64 keys
};

// Begin to copy the group's `nth` block. One warp; `page`: of the block, in every lane.
__device__ inline void begin_copy(const unsigned char* keys, const Tiles& tiles, int nth, int page,
                                  unsigned char* ring, Arrival* arrivals) {
  if (lane() != 0) return;
  int inner = (tiles.first + nth * tiles.apart) % (PAGE / KEYS), stage = nth % STAGES;
  const unsigned char* own = keys + (long long)page * PAGE_BYTES;
  unsigned char* to = ring + stage * STAGE;
  expect(arrivals + stage, STAGE);
  int together = PAGE == KEYS ? STAGE : KEYS * ROW;
  copy_in(to, own + inner * KEYS * ROW, together, arrivals + stage);
  if (together < STAGE)
    copy_in(to + KEYS * ROW, own + PAGE * ROW + inner * SCALES, SCALES, arrivals + stage);
}

struct Rows {
  uint4 upper[CHUNKS], lower[CHUNKS];  // of key `lane / 4` of the warp, and of the one 8 below
  float upper_scale, lower_scale;
};

__device__ inline unsigned word_of(const uint4& four, int nth) {
  return nth == 0 ? four.x : nth == 1 ? four.y : nth == 2 ? four.z : four.w;
}

// Products of the group's keys with the heads of joined queries, on their way into `sums`.
__device__ inline void begin_products(float (&sums)[SUMS], const Rows& rows,
                                      unsigned long long columns) {
  open_products();
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    int chunk = step / 4 * 2, word = step % 4;
    multiply(sums, word_of(rows.upper[chunk], word), word_of(rows.lower[chunk], word),
             word_of(rows.upper[chunk + 1], word), word_of(rows.lower[chunk + 1], word),
             columns + step * (256 >> 4), step > 0);
  }
  close_products();
}

__device__ inline float positive(float product) {
  return FP8 ? clipped(product * (1 / LARGEST)) : relu(product);
}

// Store the logits of the `nth` of joined queries for the warp's 16 keys, the first of which is `at`.
__device__ inline void store_logits(const float (&sums)[SUMS], int nth, const float* gates,
                                    const Rows& rows, float* out, int at, int bound, int length) {
  int own = nth * (HEADS / 2);
  float upper = 0, lower = 0;
#pragma unroll
  for (int i = 0; i < HEADS / 8; i++) {
    float2 gate = *(const float2*)(gates + 8 * i + lane() % 4 * 2);
    upper += positive(sums[own + 4 * i]) * gate.x, upper += positive(sums[own + 4 * i + 1]) * gate.y;
    lower += positive(sums[own + 4 * i + 2]) * gate.x, lower += positive(sums[own + 4 * i + 3]) * gate.y;
  }
  for (int mask = 1; mask < 4; mask *= 2)
    upper += xor_lane(upper, mask), lower += xor_lane(lower, mask);
  bool below = lane() & 1;
  int key = at + lane() / 4 + 8 * below;
  float total = below ? lower * rows.lower_scale : upper * rows.upper_scale;
  if (lane() % 4 < 2 && key < length)
    out[key] = key < bound ? total : value_of(0xff800000u);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
index_logits(const unsigned short* query, const float* gates, const unsigned char* keys,
             const int* table, const int* rows, const int* kv_lens, float* out, int width,
             int parts, int share, int pages, int length, int skip, int query_row, int query_token,
             int query_head, int gate_row, int gate_token) {
  SHARED_SPACE(space);
  unsigned char* columns = (unsigned char*)space;     // [QUERIES, HEADS, ROW]
  unsigned char* ring = columns + QUERIES * HEADS * ROW;  // [GROUPS, STAGES, STAGE]
  float* factors = (float*)(ring + GROUPS * STAGES * STAGE);        // [QUERIES, HEADS]
  Arrival* arrivals = (Arrival*)(factors + QUERIES * HEADS);        // [GROUPS, STAGES]
  int group = thread() / 128, leader = thread() % 128 / 32 == 0;
  int b = block() / (parts * share), first = block() / share % parts * QUERIES;
  ring += group * STAGES * STAGE, arrivals += group * STAGES;
  if (thread() % 128 == 0)
    for (int stage = 0; stage < STAGES; stage++) open_arrival(arrivals + stage);
  publish();
  block_sync();
  follow();

  int bounds[QUERIES], longest = 0, row_of_table = rows[b];
#pragma unroll
  for (int w = 0; w < QUERIES; w++)
    bounds[w] = first + w < width ? kv_lens[b * width + first + w] : 0;
  // Everything is asked for before anything is waited for.
  const unsigned short* own_query = query + (long long)b * query_row;
  const float* own_gates = gates + (long long)b * gate_row;
  Heads heads = load_heads(own_query, own_gates, thread() / 16, first, width, query_token,
                           query_head, gate_token);
  Tiles tiles;
  tiles.first = block() % share * GROUPS + group, tiles.apart = share * GROUPS;
  const int* own_table = table + (long long)row_of_table * pages;
  // Each lane knows the page of one block in 32; those of the next 32 are asked for early. Numbers
  // of pages behind the row's end are read, but not followed.
  auto page_of = [&](int nth) {
    int tile = tiles.first + nth * tiles.apart;
    return tile * KEYS < length ? own_table[tile / (PAGE / KEYS)] : 0;
  };
  int known = leader ? page_of(lane()) : 0, soon = leader ? page_of(32 + lane()) : 0;
#pragma unroll
  for (int w = 0; w < QUERIES; w++) {
    bounds[w] = min(bounds[w], length);
    longest = max(longest, bounds[w]);
  }
  if (longest <= skip) longest = 0;
  int blocks = (longest + KEYS - 1) / KEYS;
  tiles.count = blocks > tiles.first ? (blocks - tiles.first - 1) / tiles.apart + 1 : 0;
  if (leader)
    for (int nth = 0; nth < min(STAGES, tiles.count); nth++)
      begin_copy(keys, tiles, nth, from_lane(known, nth), ring, arrivals);
  for (int nth = thread() / 16; longest && nth < QUERIES * HEADS;) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      if (nth >= QUERIES * HEADS) break;
      unsigned char* to = columns + nth / HEADS * (HEADS * ROW);
      float factor = place_head(to, nth % HEADS, heads.eight[i]);
      if ((lane() & 15) == 0) factors[nth] = heads.gate[i] * factor;
      nth += THREADS / 16;
    }
    if (nth < QUERIES * HEADS)
      heads = load_heads(own_query, own_gates, nth, first, width, query_token, query_head,
                         gate_token);
  }
  publish();
  block_sync();

  unsigned long long start = columns_at(columns, ROW);
  float* own_out = out + ((long long)b * width + first) * length;
  int quarter = lane() % 4, row = thread() % 128 / 32 * 16 + lane() / 4;
  for (int nth = 0; nth < tiles.count; nth++) {
    int stage = nth % STAGES, at = (tiles.first + nth * tiles.apart) * KEYS;
    await(arrivals + stage, nth / STAGES);
    const unsigned char* own = ring + stage * STAGE;
    Rows held;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      held.upper[i] = *(const uint4*)(own + row * ROW + (quarter + 4 * i) * 16);
      held.lower[i] = *(const uint4*)(own + (row + 8) * ROW + (quarter + 4 * i) * 16);
    }
    const float* scales = (const float*)(own + KEYS * ROW);
    held.upper_scale = FP8 ? scales[row] : 1, held.lower_scale = FP8 ? scales[row + 8] : 1;
    group_sync(group);  // the stage is free
    int coming = nth + STAGES;
    if (leader && coming < tiles.count) {
      if (coming % 32 == 0) known = soon, soon = page_of(coming + 32 + lane());
      begin_copy(keys, tiles, coming, from_lane(known, coming % 32), ring, arrivals);
    }
    int from = at + row - lane() / 4;
    // From query `w` on, whose products are on their way into `own`. Each step is code of its own:
    // registers have no index.
    auto score = [&](auto& more, auto w, float (&own)[SUMS], float (&other)[SUMS]) {
      constexpr int next = w.value + JOINED;
      if constexpr (BUFFERS > 1 && next < QUERIES) {
        begin_products(other, held, start + next * (HEADS * ROW >> 4));
        await_products<1>(own);
      } else {
        await_products<0>(own);
      }
#pragma unroll
      for (int i = 0; i < JOINED; i++) {
        int nth = w.value + i;
        if (first + nth < width)
          store_logits(own, i, factors + nth * HEADS, held, own_out + (long long)nth * length, from,
                       bounds[nth], length);
      }
      if constexpr (next < QUERIES) {
        if constexpr (BUFFERS == 1) begin_products(other, held, start + next * (HEADS * ROW >> 4));
        more(more, Number<next>{}, other, own);
      }
    };
    float sums[BUFFERS][SUMS];
    begin_products(sums[0], held, start);
    score(score, Number<0>{}, sums[0], sums[BUFFERS - 1]);
  }
  if (skip == 0) {  // all is defined, behind the last block too
    int step = share * THREADS;
    for (int w = 0; w < QUERIES && first + w < width; w++)
      for (int key = blocks * KEYS + block() % share * THREADS + thread(); key < length; key += step)
        own_out[(long long)w * length + key] = value_of(0xff800000u);
  }
}
