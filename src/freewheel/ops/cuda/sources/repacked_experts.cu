// SPDX-License-Identifier: Apache-2.0
// One projection of repacked MXFP4 experts, for eight of each expert's tokens at a time: as
// ops.repacking.repacked_experts.
//
// As many blocks as there are multiprocessors share the rows of all chosen experts evenly. A tile is
// 16 rows; warps share its inputs, and hold theirs of eight tokens in registers until the next
// expert. Pieces come through a ring in shared memory: a warp copies its own, and waits for nobody.
// Two warps more add up slices, in ascending order.
//
// Scales are 2^30 too small, and so are sums until the end. Where a scale is beyond 2^-96 .. 2^31,
// a tile multiplies twice. (What is below 2^-132 then is lost.)
//
// A shared expert in FP8, as wide as the others, may stand in front, in the order of its checkpoint;
// its products are scaled behind every 128 inputs, in float32.
//
// Constants: DOWN (0: gates and ups, and what lies between; 1: the projection behind it), TOP_K,
// HIDDEN and WIDTH of an expert, EXTRA (1: there is a shared one), CLAMP, WARPS, SLICES of the
// inputs, STAGES of the ring, BUFFERS of tiles whose slices wait to be added up, SIDES: eights of
// tokens that a shared tile meets.

#define INPUTS (DOWN ? WIDTH : HIDDEN)
#define GATHERERS (SLICES > 1 ? 2 : 0)  // warps that add up slices
#define THREADS (32 * (WARPS + GATHERERS))
#define GROUPS (WARPS / SLICES)                  // of warps, each with a tile of its own
#define EACH (INPUTS / 128 / SLICES)             // pieces of a warp's tile
#define ROWS ((DOWN ? HIDDEN : 2 * WIDTH) / 16)  // tiles of an expert
#define TILE (INPUTS / 128 * PIECE_BYTES)
#define STAGE (EACH * PIECE_BYTES)
#define RING_STAGE (((STAGE > 2048 ? STAGE : 2048) + 127) / 128 * 128)
#define TOKENS 8

typedef uint4 Tokens[EACH][4];  // a thread's elements of its token
struct Sums { float even[4], odd[4]; };

template <bool exact>
__device__ inline void multiply_tile(Sums& sums, const unsigned char* stage, const Tokens& tokens,
                                     const unsigned (&scales)[EACH]) {
#pragma unroll
  for (int c = 0; c < EACH; c++) {
    const uint4* codes = (const uint4*)(stage + c * PIECE_BYTES) + lane();
    uint4 first = codes[0], second = codes[32];
    unsigned factors[2] = {fp4_factor<exact>(scales[c], 0), fp4_factor<exact>(scales[c], 1)};
#pragma unroll
    for (int word = 0; word < 4; word++)
      add_rows(sums.even, sums.odd, scaled_pairs<exact>(word_at(first, word), factors[0]),
               scaled_pairs<exact>(word_at(second, word), factors[1]), tokens[c][word]);
  }
}

__device__ inline void multiply_stage(Sums& sums, const unsigned char* stage,
                                      const Tokens& tokens) {
  unsigned scales[EACH], marks = ~0u;
#pragma unroll
  for (int c = 0; c < EACH; c++) {
    scales[c] = *(const unsigned short*)(stage + c * PIECE_BYTES + PIECE_SCALES + lane() * 2);
    marks &= scale_marks(scales[c]);
  }
  if (are_plain(marks))
    multiply_tile<false>(sums, stage, tokens, scales);
  else
    multiply_tile<true>(sums, stage, tokens, scales);
}

// Of a shared tile a thread has inputs 16 * (lane % 4) on of each 64, of SIDES tokens.
typedef uint4 SharedTokens[SIDES][EACH][4];

// A chunk of a shared tile: 16 bytes of two rows, then as many further on.
__device__ inline void multiply_bytes(Sums (&sums)[SIDES], const unsigned char* stage,
                                      const float (&scales)[2], const SharedTokens& tokens, int c) {
  Sums part[SIDES] = {};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint4* codes = (const uint4*)(stage + 1024 * i) + lane();
    uint4 first = codes[0], second = codes[32];
    Quad rows[2] = {fp8_pairs(first.x, first.y), fp8_pairs(second.x, second.y)};
#pragma unroll
    for (int s = 0; s < SIDES; s++)
      add_rows(part[s].even, part[s].odd, rows[0], rows[1], tokens[s][c][2 * i]);
    Quad next[2] = {fp8_pairs(first.z, first.w), fp8_pairs(second.z, second.w)};
#pragma unroll
    for (int s = 0; s < SIDES; s++)
      add_rows(part[s].even, part[s].odd, next[0], next[1], tokens[s][c][2 * i + 1]);
  }
#pragma unroll
  for (int s = 0; s < SIDES; s++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      sums[s].even[i] += (part[s].even[i] + part[s].odd[i]) * (scales[i / 2] * 0x1p-30f);
}

// A block's share: tiles of the shared expert, and of those listed.
struct Work {
  const int *experts, *lanes;
  int first, last, shared_first, shared_last;
};

// A thread's rows of a tile, as the checkpoint counts them: its first, and its second.
__device__ inline int row_of(int tile, int half) {
  return DOWN ? tile * 16 + lane() / 4 * 2 + half : tile * 8 + lane() / 4 + half * WIDTH;
}

// What a warp copies next.
struct Ahead {
  const unsigned char *pieces, *shared_codes, *from;
  int shared, chunk;    // a tile of the shared expert, of which chunks are copied one by one
  int at, entry, tile;  // a tile in all, of which entry of the list, and which of its tiles
};

__device__ inline void start_expert(Ahead& ahead, const Work& work) {
  long long expert = read_fresh(work.experts + ahead.entry);
  ahead.from = ahead.pieces + (expert * ROWS + ahead.tile) * TILE + warp() % SLICES * STAGE;
}

__device__ inline void copy_shared(Ahead& ahead, unsigned char* stage) {
  const unsigned char* from = ahead.shared_codes +
                              (warp() % SLICES * EACH + ahead.chunk) * 128 + lane() % 4 * 16;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    long long row = row_of(ahead.shared % ROWS, i % 2);
    copy_piece(stage + i * 512 + lane() * 16, from + row * INPUTS + i / 2 * 64);
  }
  if (++ahead.chunk == EACH) {
    ahead.chunk = 0;
    ahead.shared += GROUPS;
  }
}

// A ring of a warp: pieces of tiles, or chunks of a shared one, in the order of their use.
struct Ring {
  unsigned char* stages;
  int slot;  // of what is used next
};

__device__ inline void copy_next(Ahead& ahead, const Work& work, const Ring& ring, int slot) {
  unsigned char* stage = ring.stages + slot * RING_STAGE;
  if (EXTRA && ahead.shared < work.shared_last) {
    copy_shared(ahead, stage);
  } else if (ahead.at < work.last) {
    warp_sync();  // all lanes have read what lies there
#pragma unroll
    for (int i = lane() * 16; i < STAGE; i += 512) copy_piece(stage + i, ahead.from + i);
    ahead.at += GROUPS;
    ahead.tile += GROUPS;
    ahead.from += GROUPS * TILE;
    if (ahead.tile >= ROWS && ahead.at < work.last) {
      while (ahead.tile >= ROWS) {
        ahead.tile -= ROWS;
        ahead.entry++;
      }
      start_expert(ahead, work);
    }
  }
  close_copies();
}


// Wait for what is used next, and copy more to where what was used last lies.
__device__ inline const unsigned char* next_stage(Ahead& ahead, const Work& work, Ring& ring,
                                                  bool shared) {
  copy_next(ahead, work, ring, ring.slot ? ring.slot - 1 : STAGES - 1);
  await_copies<STAGES - 1>();
  if (!shared) warp_sync();  // what other lanes copied is there too
  const unsigned char* stage = ring.stages + ring.slot * RING_STAGE;
  ring.slot = ring.slot + 1 == STAGES ? 0 : ring.slot + 1;
  return stage;
}

// Entries of a list, behind which stand those of nobody.
__device__ inline int count_entries(const int* experts, int most, int* found) {
  if (thread() == 0) *found = 0;
  block_sync();
  for (int i = thread(); i < most; i += THREADS)
    if (read_fresh(experts + i) >= 0 && (i + 1 == most || read_fresh(experts + i + 1) < 0))
      *found = i + 1;
  block_sync();
  return *found;
}

// Shared tiles are spread among the others, so that all blocks have the same number in all.
__device__ inline Work share_work(const int* experts, const int* lanes, int entries, int tokens,
                                  int blocks) {
  long long extra = EXTRA ? (long long)(tokens + SIDES * TOKENS - 1) / (SIDES * TOKENS) * ROWS : 0;
  long long all = (long long)entries * ROWS + extra;
  long long from = all * block() / blocks, to = all * (block() + 1) / blocks;
  int first = all ? from * extra / all : 0, last = all ? to * extra / all : 0;
  return Work{experts, lanes, (int)from - first, (int)to - last, first, last};
}

struct Output {
  void* out;
  const float* shares;
  float limit;
  int count, tokens;  // pairs of experts that are not shared, whose pairs are counted behind those
};

__device__ inline int pair_at(const Work& work, const Output& to, bool shared, int entry, int nth) {
  if (!shared) return read_fresh(work.lanes + entry * TOKENS + nth);
  int token = entry * TOKENS + nth;
  return token < to.tokens ? to.count + token : -1;
}

// A thread's inputs of a token: 32 of a chunk, or 16 and as many 64 further on.
__device__ inline void load_tokens(Tokens& tokens, const unsigned short* x, int pair, int count,
                                   int apart, int further) {
  long long row = DOWN ? pair : pair < count ? pair / TOP_K : pair - count;
  const unsigned short* own = x + row * INPUTS + warp() % SLICES * EACH * 128 + lane() % 4 * apart;
#pragma unroll
  for (int c = 0; c < EACH; c++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      tokens[c][i] = make_uint4(0, 0, 0, 0);
      int at = further == 64 ? i / 2 * 64 + i % 2 * 8 : i * 8;
      if (pair >= 0) tokens[c][i] = *(const uint4*)(own + c * 128 + at);
    }
}

// A thread's two tokens of an entry.
struct Columns { int pairs[2]; float shares[2]; };

__device__ inline Columns columns_of(const Work& work, const Output& to, bool shared, int entry) {
  Columns own;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    own.pairs[i] = pair_at(work, to, shared, entry, lane() % 4 * 2 + i);
    own.shares[i] = DOWN && !shared && own.pairs[i] >= 0 ? to.shares[own.pairs[i]] : 1;
  }
  return own;
}

// `sums`: of a thread's first row of a tile, then of its second, each of two tokens.
__device__ inline void write_tile(const float4& sums, const Output& to, const Columns& own,
                                  int tile) {
  float first[2] = {sums.x * 0x1p30f, sums.y * 0x1p30f};
  float second[2] = {sums.z * 0x1p30f, sums.w * 0x1p30f};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (own.pairs[i] < 0) continue;
#if DOWN
    float* at = (float*)to.out + (long long)own.pairs[i] * HIDDEN + row_of(tile, 0);
    *(float2*)at = float2{first[i] * own.shares[i], second[i] * own.shares[i]};
#else
    unsigned value = rounded_pair(swiglu<CLAMP>(first[i], second[i], to.limit), 0);
    ((unsigned short*)to.out)[(long long)own.pairs[i] * WIDTH + row_of(tile, 0)] = value;
#endif
  }
}

// Sums of slices on their way to the warps that add them up: float4 [BUFFERS, WARPS, 32].
struct Exchange {
  float4* space;
  Meeting *full, *empty;
  int turn;
};

__device__ inline float4 added(const Sums& sums) {
  return make_float4(sums.even[0] + sums.odd[0], sums.even[1] + sums.odd[1],
                     sums.even[2] + sums.odd[2], sums.even[3] + sums.odd[3]);
}

__device__ inline void push(Exchange& exchange, const float4& sums) {
  int place = exchange.turn % BUFFERS;
  if (exchange.turn >= BUFFERS) await_meeting(exchange.empty + place, exchange.turn / BUFFERS - 1);
  exchange.space[(place * WARPS + warp()) * 32 + lane()] = sums;
  warp_sync();
  if (lane() == 0) arrive_at(exchange.full + place);
  exchange.turn++;
}

// What a gathering warp does for a block's tiles of one kind.
__device__ inline void gather_tiles(Exchange& exchange, const Work& work, const Output& to,
                                    bool shared) {
  int first = shared ? work.shared_first : work.first, sides = shared ? SIDES : 1;
  int last = shared ? work.shared_last : work.last;
#pragma unroll 1
  for (int at = first; at < last; at += GROUPS)
#pragma unroll 1
    for (int side = 0; side < sides; side++) {
      int place = exchange.turn % BUFFERS, turn = exchange.turn++;
      if (turn % 2 != warp() - WARPS) continue;
#pragma unroll 1
      for (int group = 0; group < GROUPS && at + group < last; group++) {
        int entry = (at + group) / ROWS * sides + side;
        Columns own = columns_of(work, to, shared, entry);
        if (group == 0) await_meeting(exchange.full + place, turn / BUFFERS);
        const float4* from = exchange.space + (place * WARPS + group * SLICES) * 32 + lane();
        float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 8
        for (int slice = 0; slice < SLICES; slice++) {
          float4 one = from[slice * 32];
          total.x += one.x, total.y += one.y, total.z += one.z, total.w += one.w;
        }
        write_tile(total, to, own, (at + group) % ROWS);
      }
      warp_sync();
      if (lane() == 0) arrive_at(exchange.empty + place);
    }
}

struct Inputs {
  const unsigned short* x;
  const float* shared_scales;
};

__device__ inline void run_shared(const Inputs& inputs, Ahead& ahead, const Work& work, Ring& ring,
                                  Exchange& exchange, const Output& to) {
  int held = -1;
  SharedTokens tokens;
  Columns own[SIDES];
#pragma unroll 1
  for (int at = work.shared_first; at < work.shared_last; at += GROUPS) {
    int mine = at + warp() / SLICES, entry = mine / ROWS, tile = mine % ROWS;
    bool any = mine < work.shared_last;
    Sums sums[SIDES] = {};
    if (any && entry != held) {
      held = entry;
#pragma unroll
      for (int s = 0; s < SIDES; s++) {
        int pair = pair_at(work, to, true, entry * SIDES + s, lane() / 4);
        load_tokens(tokens[s], inputs.x, pair, to.count, 16, 64);
        if (SLICES == 1) own[s] = columns_of(work, to, true, entry * SIDES + s);
      }
    }
    if (any) {
#pragma unroll
      for (int c = 0; c < EACH; c++) {
        float scales[2];
#pragma unroll
        for (int half = 0; half < 2; half++)
          scales[half] = inputs.shared_scales[row_of(tile, half) / 128 * (INPUTS / 128) +
                                              warp() % SLICES * EACH + c];
        multiply_bytes(sums, next_stage(ahead, work, ring, true), scales, tokens, c);
      }
    }
#pragma unroll
    for (int s = 0; s < SIDES; s++) {
      if (SLICES > 1)
        push(exchange, added(sums[s]));
      else if (any)
        write_tile(added(sums[s]), to, own[s], tile);
    }
  }
}

__device__ inline void run_listed(const Inputs& inputs, Ahead& ahead, const Work& work, Ring& ring,
                                  Exchange& exchange, const Output& to) {
  int held = -1;
  Tokens tokens;
  Columns own;
#pragma unroll 1
  for (int at = work.first; at < work.last; at += GROUPS) {
    int mine = at + warp() / SLICES, entry = mine / ROWS, tile = mine % ROWS;
    bool any = mine < work.last;
    Sums sums = {};
    if (any && entry != held) {
      held = entry;
      load_tokens(tokens, inputs.x, pair_at(work, to, false, entry, lane() / 4), to.count, 32, 32);
      if (SLICES == 1) own = columns_of(work, to, false, entry);
    }
    if (any) multiply_stage(sums, next_stage(ahead, work, ring, false), tokens);
    if (SLICES > 1)
      push(exchange, added(sums));
    else if (any)
      write_tile(added(sums), to, own, tile);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
repacked_experts(const unsigned short* x, const unsigned char* pieces,
                 const unsigned char* shared_codes, const float* shared_scales, const int* experts,
                 const int* lanes, const float* shares, void* out, float limit, int count,
                 int most, int blocks) {
  SHARED_SPACE(space);
  float4* buffers = (float4*)(space + WARPS * STAGES * RING_STAGE);
  Meeting* meetings = (Meeting*)(buffers + (SLICES > 1 ? BUFFERS * WARPS * 32 : 0));
  Exchange exchange = {buffers, meetings, meetings + BUFFERS, 0};
  Ring ring = {(unsigned char*)space + warp() * STAGES * RING_STAGE, 0};
  if (thread() < BUFFERS) {
    open_meeting(exchange.full + thread(), WARPS);
    open_meeting(exchange.empty + thread(), 1);
  }
  if (!DOWN) wait_before();
  int entries = count_entries(experts, most, (int*)(meetings + 2 * BUFFERS));
  const Work work = share_work(experts, lanes, entries, count / TOP_K, blocks);
  Output to = {out, shares, limit, count, count / TOP_K};
  if (warp() >= WARPS) {
    if (EXTRA) gather_tiles(exchange, work, to, true);
    gather_tiles(exchange, work, to, false);
    return;
  }
  int own = work.first + warp() / SLICES;
  Ahead ahead = {pieces, shared_codes, nullptr, work.shared_first + warp() / SLICES, 0,
                 own, own / ROWS, own % ROWS};
  if (own < work.last) start_expert(ahead, work);
  for (int i = 0; i < STAGES - 1; i++) copy_next(ahead, work, ring, i);
  if (DOWN) wait_before();
  Inputs inputs = {x, shared_scales};
  if (EXTRA) run_shared(inputs, ahead, work, ring, exchange, to);
  run_listed(inputs, ahead, work, ring, exchange, to);
  let_next();
}
