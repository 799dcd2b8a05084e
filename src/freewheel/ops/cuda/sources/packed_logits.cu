// SPDX-License-Identifier: Apache-2.0
// Index logits over packed keys: as ops.packed.fp8_index_logits.
//
// A warp group scores 64 keys at a time for its queries, all of whose heads stand side by side in
// one product. Sums over heads are products too, of what is positive, rounded to bfloat16. Keys
// come by bulk copies, several on their way; they meet the queries as rows from registers, where 16
// bytes are read at once. So bytes are multiplied in another order than they lie in, the same on
// both sides: a step takes word `step` of every 16. What a query's logits are does not depend on
// the number of queries.
//
// Constants: HEADS (32 or 64), JOINED queries of a group, SPLIT groups score the same keys for
// other queries (1 or 2), GROUPS of four warps, STAGES of keys on their way, PAGE (a multiple of
// 64), and FP8, which is 1.

#define DIM 128
#define ROW DIM  // bytes of a key
#define KEYS 64
#define SCALES (4 * KEYS)
#define STAGE (KEYS * ROW + SCALES)
#define THREADS (128 * GROUPS)
#define PAGE_BYTES (PAGE * (ROW + 4))
#define STEPS 4
#define CHUNKS 2  // of 16 bytes, of a key and thread
#define QUERIES (JOINED * SPLIT)
#define COLUMNS (JOINED * HEADS)
#define FOURS ((JOINED + 3) / 4)  // of queries
#define SIXTEENS (COLUMNS / 16)   // of heads
#define EIGHTS (QUERIES * HEADS / 8)  // of heads
#define OWN_EIGHTS ((EIGHTS + 4 * GROUPS - 1) / (4 * GROUPS))  // of a warp, at most
#define LOADED (OWN_EIGHTS < 4 ? OWN_EIGHTS : 4)  // of these, at once
#define WORDS 16  // of a head and lane

// A lane's share of eight heads, one of them a lane of eight: of every 16 bytes of the head as it
// is multiplied, word `lane / 8`.
struct Heads {
  unsigned words[WORDS];
  float gate;
};

__device__ inline Heads load_heads(const unsigned short* query, const float* gates, int nth,
                                   int first, int width, int query_token, int query_head,
                                   int gate_token) {
  Heads heads;
  int column = nth * 8 + lane() % 8, w = first + column / HEADS, head = column % HEADS;
  bool real = w < width && column < QUERIES * HEADS;
  const unsigned short* own = query + (long long)w * query_token + head * query_head;
  heads.gate = real ? gates[(long long)w * gate_token + head] : 0;
#pragma unroll
  for (int i = 0; i < WORDS; i++) heads.words[i] = 0;
  if (!real) return heads;
#pragma unroll
  for (int i = 0; i < WORDS / 2; i++) {
    uint2 pair = *(const uint2*)(own + i * 16 + lane() / 8 * 4);
    heads.words[2 * i] = pair.x, heads.words[2 * i + 1] = pair.y;
  }
  return heads;
}

// To where they are multiplied from; returns the factor of the head's products.
__device__ inline float place_heads(unsigned char* columns, int nth, const Heads& heads) {
  unsigned char* to = columns + nth * (8 * ROW) + lane() % 8 * 16 + lane() / 8 * 256;
  unsigned pair = 0;
  for (int i = 0; i < WORDS; i++) pair = larger_halves(pair, heads.words[i] & 0x7fff7fffu);
  for (int mask = 8; mask < 32; mask *= 2)
    pair = larger_halves(pair, (unsigned)from_lane((int)pair, lane() ^ mask));
  // As an integer the largest is not a number if any is.
  float most = value_of(max(pair << 16, pair & 0xffff0000u));
  float near = most * (1.0f / 448);  // most / 448, rounded once (P. Markstein, 1990)
  float scale = most == 0 ? 1 : fmaf(fmaf(-near, 448.0f, most), 1.0f / 448, near);
  scale = scale < 0x1p-126f ? 0x1p-126f : scale;
  float inverse = 1 / scale;
  bool strange = !(scale < value_of(0x7f800000u));  // then its factor says so, and its codes do not
#pragma unroll
  for (int half = 0; half < 2; half++) {
    unsigned codes[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float x[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        unsigned word = heads.words[half * 8 + i * 2 + j / 2];
        x[j] = value_of(j % 2 ? word & 0xffff0000u : word << 16);
        float near = x[j] * inverse;
        x[j] = fmaf(fmaf(-near, scale, x[j]), inverse, near);
        if (strange) x[j] = 0;
      }
      codes[i] = codes_of(x[0], x[1], x[2], x[3]);
    }
    *(uint4*)(to + half * 128) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
  }
  return scale;
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
};

__device__ inline Rows load_rows(const unsigned char* own) {
  Rows rows;
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    rows.upper[i] = *(const uint4*)(own + 64 * i);
    rows.lower[i] = *(const uint4*)(own + 8 * ROW + 64 * i);
  }
  return rows;
}

__device__ inline unsigned word_of(const uint4& four, int nth) {
  return nth == 0 ? four.x : nth == 1 ? four.y : nth == 2 ? four.z : four.w;
}

// Products of the group's keys with all its heads, on their way into `sums`.
__device__ inline void begin_products(float (&sums)[COLUMNS / 2], const Rows& rows,
                                      unsigned long long columns) {
  open_products();
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    multiply(sums, word_of(rows.upper[0], step), word_of(rows.lower[0], step),
             word_of(rows.upper[1], step), word_of(rows.lower[1], step),
             columns + step * (256 >> 4), step > 0);
  }
  close_products();
}

// Sums over heads are products too: of what is positive, rounded to bfloat16, with the factors of
// heads, of which a query has two columns: the nearest bfloat16 and what it lacks.
typedef uint2 Gates;  // a lane's, of 16 heads

__device__ inline unsigned short_of(float x, bool rest) {
  unsigned near = rounded_pair(x, 0) & 0xffff;
  return rest ? rounded_pair(x - value_of(near << 16), 0) & 0xffff : near;
}

// `factors`: of the group's heads.
__device__ inline Gates gates_of(const float* factors, int nth) {
  int w = nth * 16 / HEADS, column = lane() / 4;
  if (column / 2 != w % 4) return Gates{0, 0};
  const float* own = factors + nth * 16 + lane() % 4 * 2;
  bool rest = column & 1;
  return Gates{short_of(own[0], rest) | short_of(own[1], rest) << 16,
               short_of(own[8], rest) | short_of(own[9], rest) << 16};
}

struct Totals {
  float upper[FOURS], lower[FOURS];  // of query `lane % 4`, and so many fours later
};

__device__ inline Totals total_of(const float (&sums)[COLUMNS / 2],
                                  const Gates (&gates)[SIXTEENS]) {
  float found[FOURS][2][4] = {};
#pragma unroll
  for (int i = 0; i < SIXTEENS; i++) {
    const float* own = sums + 8 * i;
    unsigned left[4] = {rounded_positives(own[0], own[1]), rounded_positives(own[2], own[3]),
                        rounded_positives(own[4], own[5]), rounded_positives(own[6], own[7])};
    add_product(found[i * 16 / HEADS / 4][i & 1], left, gates[i].x, gates[i].y);
  }
  Totals totals;
#pragma unroll
  for (int i = 0; i < FOURS; i++) {
    const float(&one)[4] = found[i][0], (&other)[4] = found[i][1];
    totals.upper[i] = one[0] + other[0] + (one[1] + other[1]);
    totals.lower[i] = one[2] + other[2] + (one[3] + other[3]);
  }
  return totals;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
packed_logits(const unsigned short* query, const float* gates, const unsigned char* keys,
              const int* table, const int* rows, const int* kv_lens, float* out, int width,
              int parts, int share, int pages, int length, int skip, int query_row, int query_token,
              int query_head, int gate_row, int gate_token) {
  SHARED_SPACE(space);
  unsigned char* columns = (unsigned char*)space;         // [QUERIES, HEADS, ROW]
  unsigned char* ring = columns + QUERIES * HEADS * ROW;  // [GROUPS, STAGES, STAGE]
  float* factors = (float*)(ring + GROUPS * STAGES * STAGE);  // [QUERIES, HEADS]
  Arrival* arrivals = (Arrival*)(factors + QUERIES * HEADS);  // [GROUPS, STAGES]
  int group = thread() / 128, leader = thread() % 128 / 32 == 0;
  int b = block() / (parts * share), first = block() / share % parts * QUERIES;
  ring += group * STAGES * STAGE, arrivals += group * STAGES;
  if (thread() % 128 == 0)
    for (int stage = 0; stage < STAGES; stage++) open_arrival(arrivals + stage);
  publish();
  block_sync();
  follow();

  // Everything is asked for before anything is waited for.
  int longest = 0, row_of_table = rows[b], own_first = group % SPLIT * JOINED;
#pragma unroll
  for (int w = 0; w < QUERIES; w++)
    longest = max(longest, first + w < width ? kv_lens[b * width + first + w] : 0);
  int after = own_first + lane() % 4, bounds[FOURS];
  bool is_there[FOURS];
#pragma unroll
  for (int i = 0; i < FOURS; i++) {
    is_there[i] = lane() % 4 + 4 * i < JOINED && first + after + 4 * i < width;
    bounds[i] = is_there[i] ? kv_lens[b * width + first + after + 4 * i] : 0;
  }
  const unsigned short* own_query = query + (long long)b * query_row;
  const float* own_gates = gates + (long long)b * gate_row;
  Heads heads[LOADED];
#pragma unroll
  for (int i = 0; i < LOADED; i++)
    heads[i] = load_heads(own_query, own_gates, warp() + i * (THREADS / 32), first, width,
                          query_token, query_head, gate_token);
  Tiles tiles;
  int together = GROUPS / SPLIT;
  tiles.first = block() % share * together + group / SPLIT, tiles.apart = share * together;
  const int* own_table = table + (long long)row_of_table * pages;
  // Each lane knows the page of one block in 32; those of the next 32 are asked for early. Numbers
  // of pages behind the row's end are read, but not followed.
  auto page_of = [&](int nth) {
    int tile = tiles.first + nth * tiles.apart;
    return tile * KEYS < length ? own_table[tile / (PAGE / KEYS)] : 0;
  };
  int known = leader ? page_of(lane()) : 0, soon = leader ? page_of(32 + lane()) : 0;
  longest = min(longest, length);
  if (longest <= skip) longest = 0;
  int blocks = (longest + KEYS - 1) / KEYS;
  tiles.count = blocks > tiles.first ? (blocks - tiles.first - 1) / tiles.apart + 1 : 0;
  if (leader)
    for (int nth = 0; nth < min(STAGES, tiles.count); nth++)
      begin_copy(keys, tiles, nth, from_lane(known, nth), ring, arrivals);
  for (int nth = warp(); longest && nth < EIGHTS;) {
#pragma unroll
    for (int i = 0; i < LOADED; i++) {
      if (nth >= EIGHTS) break;
      float factor = place_heads(columns, nth, heads[i]);
      if (lane() < 8) factors[nth * 8 + lane()] = heads[i].gate * factor;
      nth += THREADS / 32;
    }
    if (nth < EIGHTS)
#pragma unroll
      for (int i = 0; i < LOADED; i++)
        heads[i] = load_heads(own_query, own_gates, nth + i * (THREADS / 32), first, width,
                              query_token, query_head, gate_token);
  }
  publish();
  block_sync();

  unsigned long long start = columns_at(columns + own_first * HEADS * ROW, ROW);
  int quarter = lane() % 4, row = thread() % 128 / 32 * 16 + lane() / 4;
  const unsigned char* from = ring + row * ROW + quarter * 16;
  float* own_out = out + ((long long)b * width + first + after) * length + row;
  Gates held_gates[SIXTEENS];
#pragma unroll
  for (int i = 0; i < SIXTEENS; i++) held_gates[i] = gates_of(factors + own_first * HEADS, i);
  Rows held;
  if (tiles.count) {
    await(arrivals, 0);
    held = load_rows(from);
  }
  for (int nth = 0; nth < tiles.count; nth++) {
    int stage = nth % STAGES, at = (tiles.first + nth * tiles.apart) * KEYS;
    float sums[COLUMNS / 2];
    begin_products(sums, held, start);
    const float* scales = (const float*)(ring + stage * STAGE + KEYS * ROW);
    float upper_scale = scales[row], lower_scale = scales[row + 8];
    group_sync(group);  // the stage is free
    int coming = nth + STAGES;
    if (leader && coming < tiles.count) {
      if (coming % 32 == 0) known = soon, soon = page_of(coming + 32 + lane());
      begin_copy(keys, tiles, coming, from_lane(known, coming % 32), ring, arrivals);
    }
    await_products<0>(sums);
    if (nth + 1 < tiles.count) {
      int next = (nth + 1) % STAGES;
      await(arrivals + next, (nth + 1) / STAGES);
      held = load_rows(from + next * STAGE);
    }
    Totals totals = total_of(sums, held_gates);
#pragma unroll
    for (int i = 0; i < FOURS; i++)
      if (is_there[i]) {
        float* to = own_out + (long long)(4 * i) * length + at;
        to[0] = at + row < bounds[i] ? totals.upper[i] * upper_scale : value_of(0xff800000u);
        to[8] = at + row + 8 < bounds[i] ? totals.lower[i] * lower_scale : value_of(0xff800000u);
      }
  }
  if (skip == 0) {  // all is defined, behind the last block too
    float* lines = out + ((long long)b * width + first) * length;
    int step = share * THREADS, behind = blocks * KEYS + block() % share * THREADS + thread();
    for (int w = 0; w < QUERIES && first + w < width; w++)
      for (int key = behind; key < length; key += step)
        lines[(long long)w * length + key] = value_of(0xff800000u);
  }
}
