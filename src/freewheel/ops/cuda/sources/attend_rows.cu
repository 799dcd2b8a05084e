// SPDX-License-Identifier: Apache-2.0
// Sparse MLA of all queries of a row at once, each key read once: as ops.attention.sparse_mla over
// plain rows of 512 values and 64 rotated ones, for up to 64 heads of all queries together.
//
// A block has one part of a row: every so-many-th 64 of its positions. It lists which of them any
// query picked, with a bit for each query, in the order of the row's pages: where two threads meet
// in its tables, they meet in an operation whose order does not matter. Then four warps copy tiles of
// 64 keys, and two groups of four warps multiply: each scores half of a tile's keys, both exchange
// weights, and each sums half of the values.
//
// Constants: PAGE (slots, a multiple of 4), WHOLE (whether a row has one part).
//
// A block runs most of its code once, and waits for its instructions: loops are as short as they can
// be.

#define THREADS 384
#define WARPS (THREADS / 32)
#define KEYS 64
#define HEADS 64
#define PIECE 8192           // bytes of 64 columns of 64 rows
#define STAGE (9 * PIECE)    // of a tile, and of the queries
#define HALF (PIECE / 2)      // of 32 rows
#define SPARE 2048           // bytes of the list
#define TOGETHER 3           // slots that a thread looks up at once
#define NOTHING value_of(0xff800000u)
#define SLACK 8.0f           // by which, in powers of two, weights may exceed 1

// Pages and their lowest columns in a table of `size` entries, a power of two; where the search for
// one begins.
struct Entry { int page, column; };
__device__ inline int home_of(int page, int size) {
  unsigned mixed = (unsigned)page * 2654435761u;
  return (mixed ^ mixed >> 15) & (size - 1);
}
__device__ inline void enter(Entry* entries, int size, int page, int column) {
  int at = home_of(page, size);
  for (;;) {
    int there = swap_if(&entries[at].page, -1, page);
    if (there == -1 || there == page) break;
    at = (at + 1) & (size - 1);
  }
  lower(&entries[at].column, column);
}
// The column of a page that was entered, but is not where the search begins.
__device__ inline int column_of(const Entry* entries, int size, int page) {
  int at = home_of(page, size);
  for (; entries[at].page != page; at = (at + 1) & (size - 1))
    if (entries[at].page == -1) break;
  return entries[at].column;
}
__device__ inline int bytes_set(unsigned word) {
  return ((word & 0xff) != 0) + ((word & 0xff00) != 0) + ((word & 0xff0000) != 0) + (word >> 24 != 0);
}

struct Row {
  const int* slots;       // [width, k]
  const int* table;       // [columns]
  int width, k, columns, size, part, log_parts;
};

// Begin to copy what all queries picked.
__device__ inline void copy_picks(const Row& row, int* picks) {
  int count = row.width * row.k;
  bool whole = count % 4 == 0 && (unsigned long long)row.slots % 16 == 0;
#pragma unroll 1
  for (int at = 4 * thread(); whole && at < count; at += 4 * THREADS)
    copy_sixteen(shared_place(picks + at), row.slots + at, true);
#pragma unroll 1
  for (int at = thread(); !whole && at < count; at += THREADS) picks[at] = row.slots[at];
}

// List the part's picked slots and their marks; returns how many. `space`: for tables.
__device__ inline int list_part(const Row& row, const int* picks, unsigned char* space, int* list,
                                unsigned char* marks) {
  int* totals = (int*)space;                             // [32]
  Entry* entries = (Entry*)(totals + 32);                // [size]
  int* own_pages = (int*)(entries + row.size);           // [columns]
  unsigned* map = (unsigned*)(own_pages + row.columns);  // of each position of the part, a byte
  int parts = 1 << row.log_parts;
  int words = ((row.columns * PAGE + 63) / 64 + parts - 1 >> row.log_parts) * 16;
  int page = thread() < row.columns ? row.table[thread()] : 0;
#pragma unroll 1
  for (int at = thread(); at < row.size; at += THREADS) entries[at] = {-1, row.columns};
#pragma unroll 1
  for (int at = thread(); at < words; at += THREADS) map[at] = 0;
  if (thread() < 32) totals[thread()] = 0;
  block_sync();
#pragma unroll 1
  for (int at = thread(); at < row.columns; at += THREADS) {
    if (at != thread()) page = row.table[at];
    own_pages[at] = page;
    enter(entries, row.size, page, at);
  }
  await_sixteens();
  block_sync();
#pragma unroll 1
  for (int w = 0; w < row.width; w++) {
#pragma unroll 1
    for (int first = thread(); first < row.k; first += TOGETHER * THREADS) {
      int slot[TOGETHER];
      Entry entry[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        int at = first + i * THREADS;
        slot[i] = at < row.k ? picks[w * row.k + at] : -1;
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) entry[i] = entries[home_of(slot[i] / PAGE, row.size)];
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        int page = slot[i] / PAGE, column = entry[i].column;
        if (entry[i].page != page) column = column_of(entries, row.size, page);
        int position = column * PAGE + slot[i] % PAGE, unit = position >> 6;
        if (slot[i] >= 0 && column < row.columns && (unit & parts - 1) == row.part) {
          int local = (unit >> row.log_parts) * 64 + (position & 63);
          set_bits(map + local / 4, 1u << (local % 4 * 8 + w));
        }
      }
    }
  }
  block_sync();

  int share = (words + WARPS * 32 - 1) / (WARPS * 32) * 32;
  int begin = warp() * share, end = min(begin + share, words), mine = 0;
#pragma unroll 1
  for (int at = begin + lane(); at < end; at += 32) mine += bytes_set(map[at]);
  mine = warp_sum(mine);
  if (lane() == 0) totals[warp()] = mine;
  block_sync();
  int each = totals[lane()], all = warp_sum(each), before = warp_sum(lane() < warp() ? each : 0);
#pragma unroll 1
  for (int first = begin; first < end; first += 32) {
    int at = first + lane();
    unsigned word = at < end ? map[at] : 0;
    int sums = bytes_set(word), place = before - sums;
#pragma unroll 1
    for (int by = 1; by < 32; by *= 2) {
      int more = lanes_before(sums, by);
      if (lane() >= by) sums += more;
    }
    place += sums, before += from_lane(sums, 31);
    int position = ((at / 16 << row.log_parts) + row.part) * 64 + at % 16 * 4;
    int slot = word ? own_pages[position / PAGE] * PAGE + position % PAGE : 0;
    for (int i = 0; i < 4; i++) {
      unsigned mark = word >> 8 * i & 0xff;
      if (mark) list[place] = slot + i, marks[place] = mark, place++;
    }
  }
  int stop = (all + KEYS - 1) / KEYS * KEYS;
#pragma unroll 1
  for (int at = all + thread(); at < stop; at += THREADS) list[at] = -1, marks[at] = 0;
  return all;
}

struct Turns {
  Arrival full[2], empty[2];
};
struct Exchange {
  unsigned char weights[PIECE];  // turned rows of 64 keys
  float most[2][HEADS];
};
static_assert(3 * STAGE + SPARE + sizeof(Exchange) + sizeof(Turns) <= 232448, "as row_attention.py counts");

// Copy the part's keys, tile by tile, into a ring of two. 128 threads.
__device__ inline void copy_tiles(const unsigned char* latent, const int* list, int tiles,
                                  SharedPlace ring, Turns* turns) {
  int own = thread() % 128 / 32 * 16 + lane() / 8, chunk = lane() % 8;
  int slot[4], next[4];
#pragma unroll
  for (int i = 0; i < 4; i++) next[i] = tiles > 0 ? list[own + 4 * i] : -1;
  for (int tile = 0; tile < tiles; tile++) {
    int stage = tile & 1;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      slot[i] = next[i];
      if (tile + 1 < tiles) next[i] = list[(tile + 1) * KEYS + own + 4 * i];
    }
    if (tile > 1) await(turns->empty + stage, tile / 2 - 1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = own + 4 * i;
      bool real = slot[i] >= 0;
      const unsigned char* from = latent + (long long)(real ? slot[i] : 0) * 1152 + chunk * 16;
      SharedPlace to = ring + stage * STAGE + row * 128 + ((chunk ^ row % 8) << 4);
#pragma unroll
      for (int piece = 0; piece < 9; piece++)
        copy_sixteen(to + piece * PIECE, from + piece * 128, real);
    }
    arrive_behind_copies(turns->full + stage);
  }
}

struct Found {
  float sums[128];           // of two rows, 8 apart, and pairs of columns 8 apart
  float high[2], total[2];   // of both rows: in powers of two; of this lane's keys
};

// Products of all queries with 32 keys, on their way into `scores`.
__device__ inline void begin_scores(float (&scores)[16], unsigned long long queries,
                                    unsigned long long keys) {
  publish();
  open_products();
#pragma unroll
  for (int piece = 0; piece < 9; piece++)
#pragma unroll
    for (int step = 0; step < 4; step++) {
      int at = piece * (PIECE >> 4) + step * 2;
      multiply_keys(scores, queries + at, keys + at, piece + step > 0);
    }
  close_products();
}

__device__ inline void attend_tiles(Found& found, const unsigned char* marks, int tiles,
                                     SharedPlace queries, SharedPlace ring, Turns* turns,
                                     Exchange* exchange, float scale, int heads) {
  int group = thread() / 128, row = thread() % 128 / 32 * 16 + lane() / 4;
  unsigned bit[2] = {row / heads < 8 ? 1u << row / heads : 0,
                     (row + 8) / heads < 8 ? 1u << (row + 8) / heads : 0};
#pragma unroll
  for (int i = 0; i < 128; i++) found.sums[i] = 0;
  found.high[0] = found.high[1] = NOTHING, found.total[0] = found.total[1] = 0;
  unsigned long long left = turned_rows(queries);
  unsigned long long weights = turned_rows(shared_place(exchange->weights));
  float scores[16];
  for (int tile = 0; tile < tiles; tile++) {
    int stage = tile & 1;
    SharedPlace keys = ring + stage * STAGE;
    unsigned short mark[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      mark[i] = *(const unsigned short*)(marks + tile * KEYS + 32 * group + 8 * i + lane() % 4 * 2);
    await(turns->full + stage, tile / 2);
    begin_scores(scores, left, turned_rows(keys + group * HALF));
    await_products<0>(scores);

    float most[2] = {NOTHING, NOTHING}, decay[2], shift[2];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      unsigned own = mark[i / 4] >> i % 2 * 8;
      scores[i] = own & bit[i / 2 % 2] ? scores[i] * scale : NOTHING;
      most[i / 2 % 2] = max(most[i / 2 % 2], scores[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      for (int mask = 1; mask < 4; mask *= 2) most[i] = max(most[i], xor_lane(most[i], mask));
      if (lane() % 4 == 0) exchange->most[group][row + 8 * i] = most[i];
    }
    pair_sync(1);  // both have found theirs, and are done with the weights before
#pragma unroll
    for (int i = 0; i < 2; i++) {
      most[i] = max(most[i], exchange->most[1 - group][row + 8 * i]);
      bool grown = most[i] > found.high[i] + SLACK;
      decay[i] = grown ? power_of_two(found.high[i] - most[i]) : 1;
      if (grown) found.high[i] = most[i];
      shift[i] = found.high[i] == NOTHING ? 0 : found.high[i];
      found.total[i] *= decay[i];
    }
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      int below = i / 2 % 2;
      float one = power_of_two(scores[i] - shift[below]);
      float other = power_of_two(scores[i + 1] - shift[below]);
      found.total[below] += one + other;
      int chunk = 4 * group + i / 4;
      *(unsigned*)(exchange->weights + (row + 8 * below) * 128 + ((chunk ^ row % 8) << 4) +
                   lane() % 4 * 4) = rounded_pair(one, other);
    }
    publish();
    if (lanes_with(decay[0] != 1 || decay[1] != 1)) {
#pragma unroll
      for (int i = 0; i < 128; i++) found.sums[i] *= decay[i / 2 % 2];
    }
    pair_sync(2);  // all weights are there
    unsigned long long values = turned_values(keys + group * 4 * PIECE, PIECE);
    open_products();
#pragma unroll
    for (int step = 0; step < 4; step++)
      multiply_values(found.sums, weights + step * 2, values + step * (2048 >> 4));
    close_products();
    await_products<0>(found.sums);
    if (lane() == 0) arrive(turns->empty + stage);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    for (int mask = 1; mask < 4; mask *= 2) found.total[i] += xor_lane(found.total[i], mask);
    if (lane() % 4 == 0) exchange->most[group][row + 8 * i] = found.total[i];
  }
  pair_sync(1);
#pragma unroll
  for (int i = 0; i < 2; i++)
    found.total[i] = exchange->most[0][row + 8 * i] + exchange->most[1][row + 8 * i];
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend_rows(const unsigned char* query, const unsigned char* latent, const int* slots,
            const int* table, const int* table_rows, unsigned short* out, float* part_out,
            float* high_out, float* total_out, int* scratch, float scale, int width, int k,
            int heads, int pitch, int columns, int size, int room, int log_parts) {
  SHARED_SPACE(space);
  unsigned char* queries = (unsigned char*)space;
  unsigned char* ring = queries + STAGE;
  unsigned char* marks = ring + 2 * STAGE;  // [room], or the list in front of it
  Exchange* exchange = (Exchange*)marks;
  marks += sizeof(Exchange);
  Turns* turns = (Turns*)(marks + SPARE);
  int n = block() >> log_parts, part = block() & (1 << log_parts) - 1, rows = width * heads;
  if (thread() == 0)
    for (int i = 0; i < 2; i++) {
      open_counted(turns->full + i, 128);
      open_counted(turns->empty + i, 8);
    }
  follow();
  Row row = {slots + (long long)n * width * k, table + (long long)table_rows[n] * pitch, width, k,
             columns, size, part, log_parts};
  int* picks = (int*)ring;
  unsigned char* tables = ring + (4 * width * k + 15) / 16 * 16;
  copy_picks(row, picks);
#pragma unroll 1
  for (int at = thread(); at < HEADS * 8; at += THREADS) {
    int head = at / 8, chunk = at % 8;
    bool real = head < rows;
    const unsigned char* from = query + ((long long)n * rows + (real ? head : 0)) * 1152 + chunk * 16;
    SharedPlace to = shared_place(queries) + head * 128 + ((chunk ^ head % 8) << 4);
#pragma unroll
    for (int piece = 0; piece < 9; piece++) copy_sixteen(to + piece * PIECE, from + piece * 128, real);
  }
  int* list = scratch + (long long)block() * (room + room / 4);
  if (5 * room <= SPARE) list = (int*)marks, marks += 4 * room;
  else if (room > SPARE) marks = (unsigned char*)(list + room);
  int count = list_part(row, picks, tables, list, marks);
  await_sixteens();
  publish();
  block_sync();

  int tiles = (count + KEYS - 1) / KEYS, group = thread() / 128;
  SharedPlace ring_at = shared_place(ring);
  long long cell = (long long)block() * rows;
  if (group == 2) {
    give_registers<40>();
    copy_tiles(latent, list, tiles, ring_at, turns);
  } else {
    take_registers<232>();
    Found found;
    attend_tiles(found, marks, tiles, shared_place(queries), ring_at, turns, exchange, scale, heads);
    int own = thread() % 128 / 32 * 16 + lane() / 4, column = group * 256 + lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int head = own + 8 * i;
      if (head >= rows) continue;
      // A total of 0 is a query without a slot; one that is not a number stays so.
      float inverse = 1 / (found.total[i] == 0 ? 1 : found.total[i]);
#pragma unroll
      for (int j = 2 * i; j < 128; j += 4) {
        long long at = (cell + head) * 512 + column + j / 4 * 8;
        float one = found.sums[j], other = found.sums[j + 1];
        if (WHOLE) *(unsigned*)(out + at) = rounded_pair(one * inverse, other * inverse);
        else *(float2*)(part_out + at) = make_float2(one, other);
      }
      if (!WHOLE && group == 0 && lane() % 4 == 0) {
        high_out[cell + head] = found.high[i] * 0.6931471805599453f;
        total_out[cell + head] = found.total[i];
      }
    }
  }
}
