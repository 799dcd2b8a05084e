// SPDX-License-Identifier: Apache-2.0
// The slots that any query of a row picked, each once, in the order of the row's pages, and which
// queries picked it. Made by THREADS threads a row, for pages of PAGE slots and up to eight queries.
//
// A slot's page is looked up in a table in shared memory, which gives its lowest column in the row's
// page table; so its position follows, whose byte gets a bit for each query. Where two threads meet,
// they meet in an operation whose order does not matter, so the result does not depend on it either.

constexpr int WARPS = THREADS / 32;
constexpr int BATCH = 8;  // slots that a thread asks for at once

// Where the search for a page begins, in a table of `size` entries, a power of two.
__device__ inline int home_of(int page, int size) {
  unsigned mixed = (unsigned)page * 2654435761u;
  return (mixed ^ mixed >> 15) & (size - 1);
}

__device__ inline void enter(int* pages, int* columns, int size, int page, int column) {
  int at = home_of(page, size);
  for (;;) {
    int there = swap_if(pages + at, -1, page);
    if (there == -1 || there == page) break;
    at = (at + 1) & (size - 1);
  }
  lower(columns + at, column);
}

// The column of a page that was entered.
__device__ inline int column_of(const int* pages, const int* columns, int size, int page) {
  int at = home_of(page, size);
  for (int tries = 0; tries < size && pages[at] != page; tries++) at = (at + 1) & (size - 1);
  return columns[at];
}

__device__ inline int bytes_set(unsigned word) {
  return ((word & 0xff) != 0) + ((word & 0xff00) != 0) + ((word & 0xff0000) != 0) + (word >> 24 != 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
union_slots(const int* slots, const int* table, const int* rows, int* out, int* marks, int* counts,
            int width, int k, int pitch, int columns, int size, int room) {
  SHARED_SPACE(space);
  int* totals = (int*)space;                   // [32]
  int* pages = totals + 32;                    // [size]
  int* firsts = pages + size;                  // [size]
  int* own_pages = firsts + size;              // [columns]
  unsigned* map = (unsigned*)(own_pages + columns);  // [columns * PAGE / 4]
  int words = columns * PAGE / 4, picks = width * k;
  for (int at = thread(); at < size; at += THREADS) pages[at] = -1, firsts[at] = columns;
  for (int at = thread(); at < words; at += THREADS) map[at] = 0;
  if (thread() < 32) totals[thread()] = 0;
  follow();
  const int* own = slots + (long long)block() * picks;
  const int* table_row = table + (long long)rows[block()] * pitch;
  out += (long long)block() * room, marks += (long long)block() * room;
  int held[BATCH];
#pragma unroll
  for (int i = 0; i < BATCH; i++) {
    int at = thread() + i * THREADS;
    held[i] = at < picks ? own[at] : -1;
  }
  block_sync();
  for (int at = thread(); at < columns; at += THREADS) {
    int page = table_row[at];
    own_pages[at] = page;
    enter(pages, firsts, size, page, at);
  }
  block_sync();
  for (int first = 0; first < picks; first += BATCH * THREADS) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      int slot = held[i], at = first + i * THREADS + thread();
      int column = slot < 0 ? columns : column_of(pages, firsts, size, slot / PAGE);
      int position = column * PAGE + slot % PAGE;
      if (column < columns) set_bits(map + position / 4, 1u << (position % 4 * 8 + at / k));
      at += BATCH * THREADS;
      held[i] = at < picks ? own[at] : -1;
    }
  }
  block_sync();

  int share = (words + WARPS * 32 - 1) / (WARPS * 32) * 32;
  int begin = warp() * share, end = min(begin + share, words), mine = 0;
  for (int at = begin + lane(); at < end; at += 32) mine += bytes_set(map[at]);
  mine = warp_sum(mine);
  if (lane() == 0) totals[warp()] = mine;
  block_sync();
  int each = totals[lane()], all = warp_sum(each), before = warp_sum(lane() < warp() ? each : 0);
  for (int first = begin; first < end; first += 32) {
    int at = first + lane();
    unsigned word = at < end ? map[at] : 0;
    int sums = bytes_set(word), place = before - sums;
    for (int by = 1; by < 32; by *= 2) {
      int more = lanes_before(sums, by);
      if (lane() >= by) sums += more;
    }
    place += sums, before += from_lane(sums, 31);
    int slot = word ? own_pages[4 * at / PAGE] * PAGE + 4 * at % PAGE : 0;
    for (int i = 0; i < 4; i++) {
      unsigned mark = word >> 8 * i & 0xff;
      if (mark) out[place] = slot + i, marks[place] = (int)mark, place++;
    }
  }
  for (int at = all + thread(); at < room; at += THREADS) out[at] = -1, marks[at] = 0;
  if (thread() == 0) counts[block()] = all;
}
