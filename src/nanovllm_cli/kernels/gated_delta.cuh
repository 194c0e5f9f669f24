// What a block of gated_delta.cu has at hand: tokens, rows and taps in shared memory, and a state in registers, which a token
// changes: by the delta rule, with BY_CHANNEL by that with a decay of each row, or with MAMBA by that of Mamba-2.
#pragma once
#include "common.cuh"

#ifndef MAMBA
#define MAMBA 0
#endif
#ifndef BY_CHANNEL
#define BY_CHANNEL 0
#endif
#ifndef FLOOR
#define FLOOR 0.0f
#endif

constexpr int SLICES = 8, LANES = WARP_SIZE / SLICES;  // of a warp: slices of rows by groups of columns
constexpr int GROUPS = (KEY_DIM + 4 * SLICES - 1) / (4 * SLICES), KEY_SPAN = GROUPS * 4 * SLICES;
constexpr int WARP_COLUMNS = LANES * VECTOR, WARPS = (VALUE_DIM + WARP_COLUMNS - 1) / WARP_COLUMNS;
constexpr int THREADS = WARPS * WARP_SIZE, WARPS_WANTED = 16;  // of a multiprocessor: with more, a state has no room
constexpr int SLOTS = WARPS > 8 ? 4 : 8, TASKS = 2, BEFORE = WIDTH - 1, RING = SLOTS + BEFORE;
constexpr int GATES = MAMBA || BY_CHANNEL ? 1 : 2, TAP_ROWS = WIDTH + MAMBA;  // behind the taps their bias, or zeros
constexpr int PARTS = 2 * KEY_DIM + VALUE_DIM, ROW = PARTS + VALUE_DIM;  // q, k and v of a token, and z
constexpr int LOAD = PIECE < 4 ? PIECE : 4;  // with more, half of a warp has nothing of a head of 128
constexpr int UNIT = WARP_SIZE * LOAD, KEY_UNITS = (KEY_DIM + UNIT - 1) / UNIT, VALUE_UNITS = (VALUE_DIM + UNIT - 1) / UNIT;
constexpr int KEPT = BY_CHANNEL ? KEY_SPAN : 1, RATE_PIECE = KEY_DIM % 4 ? 1 : 4;

typedef Vector<DTYPE, LOAD> Elements;
typedef Vector<float, LOAD> Floats;
typedef Vector<float, VECTOR> Columns;
typedef Vector<float, 4> Four;

// A token as its warps leave it for all; value becomes the output.
struct alignas(16) Token {
  float q[KEY_SPAN], k[KEY_SPAN], value[(VALUE_DIM + 3) / 4 * 4], gate[(VALUE_DIM + 3) / 4 * 4];
  // exp(decay * softplus(a + decay_bias)), sigmoid(b) and k . q; or, with MAMBA, exp(decay * step), step and skip.
  float kept[KEPT], rate, overlap;
  alignas(BY_CHANNEL ? 16 : 4) float rates[KEPT];  // with BY_CHANNEL a, of the token that comes next to this slot
};

// What a block works on: a value head of a sequence, and where in the cache its step begins and its tokens are kept.
struct Work {
  int head, num_values, q_channel, k_channel, v_channel, channels, max_guesses;
  bool keeps_keys;
  // Tokens are counted from the one behind the place that is read. count: guesses that held and the step's.  own: the step's
  // first.  known: behind the last known one; 0 where the step has none.  place: that is read, of all states' places.
  int count, own, known, place;
  int stamp, reach;  // which the step leaves

  // In a row of the projection, of a piece of what a block needs of it.
  DEVICE int channel_of(int part) const {
    if (part < KEY_DIM) return q_channel + part;
    if (part < 2 * KEY_DIM) return k_channel + part - KEY_DIM;
    if (part < PARTS) return v_channel + part - 2 * KEY_DIM;
    return (BY_CHANNEL ? head * VALUE_DIM : v_channel + num_values * VALUE_DIM) + part - PARTS;
  }
  DEVICE bool is_last_known(int token) const { return token + 1 == known; }
  // Which of the guesses that the step leaves a token is; negative or too large where it is none.
  DEVICE int guess_of(int token) const { return token < own ? -1 : token - known; }
  DEVICE int target() const {
#ifdef BUG_SAME_PLACE
    return place;
#endif
    return known ? place ^ 1 : place;
  }
  DEVICE Index matrix_at(int place) const { return stamp_at(place) * (KEY_DIM * VALUE_DIM); }
  DEVICE Index stamp_at(int place) const { return (Index)place * num_values + head; }
  DEVICE Index inputs_at(int place) const { return (Index)place * BEFORE * channels; }
  DEVICE Index guess_at(int place, int guess) const { return (Index)place * max_guesses + guess; }
  // In guess_gates, of such a guess. With BY_CHANNEL the rates of all heads lie behind their b.
  DEVICE Index gate_at(Index guess, int which) const {
    return BY_CHANNEL ? guess * ((1 + KEY_DIM) * num_values) + head : (guess * GATES + which) * num_values + head;
  }
  DEVICE Index rates_at(Index guess) const { return gate_at(guess, 0) + num_values - head + (Index)head * KEY_DIM; }
};

struct alignas(16) Shared {
  Token tokens[SLOTS];
  DTYPE rows[RING][ROW], taps[TAP_ROWS][PARTS];
  float gates[GATES][SLOTS];
  Work work;  // that threads need not have in registers, which are short

  // Of a token of the step, or of one before it.
  DEVICE DTYPE* row_of(int token) { return rows[(token + BEFORE) % RING]; }
};

DEVICE float silu(float x) { return __fdividef(x, 1.0f + expf(-x)); }
DEVICE float gated_by(float z) { return BY_CHANNEL ? __fdividef(1.0f, 1.0f + expf(-z)) : silu(z); }
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

DEVICE Four load_once(const float* source, Four) { return __builtin_bit_cast(Four, load_streaming(source)); }
template <class T>
DEVICE T load_once(const float* source, T) { return T::load(source); }

// PIECE elements to shared memory, or zeros; there after wait_copies and a barrier.
DEVICE void copy_piece(DTYPE* target, const DTYPE* source, bool is_known = true) {
  if constexpr (PIECE == 8) {
    copy_async_16(target, source, is_known);
  } else {
    typedef Vector<DTYPE, PIECE> Piece;
    Piece piece;
#pragma unroll
    for (int j = 0; j < PIECE; ++j) piece.at[j] = from_float<DTYPE>(0.0f);
    if (is_known) piece = Piece::load(source);
    piece.store(target);
  }
}

// RATE_PIECE rates to shared memory; there after wait_copies and a barrier.
DEVICE void copy_rates(float* target, const float* source) {
  if constexpr (RATE_PIECE == 4) {
    copy_async_16(target, source);
  } else {
    *target = *source;
  }
}

// Stores of 8 and 16 bytes that stay whole: at the first of several addresses the compiler parts the plain ones.
template <class T, int COUNT>
DEVICE void store_whole(T* target, const Vector<T, COUNT>& vector) {
  if constexpr (sizeof vector == 16) {
    __stcg(reinterpret_cast<uint4*>(target), __builtin_bit_cast(uint4, vector));
  } else if constexpr (sizeof vector == 8) {
    __stcg(reinterpret_cast<uint2*>(target), __builtin_bit_cast(uint2, vector));
  } else {
    vector.store(target);
  }
}

// Where a unit of a head begins for this lane, if it does.
DEVICE int column_of(int unit) { return unit * UNIT + threadIdx.x % WARP_SIZE * LOAD; }
template <int DIM>
DEVICE bool has_unit(int unit) { return DIM % UNIT == 0 || column_of(unit) < DIM; }

// A lane's part of the state.
struct State {
  float at[GROUPS][4][VECTOR];

  static DEVICE int row_of(int group) { return (group * SLICES + threadIdx.x % WARP_SIZE / LANES) * 4; }
  static DEVICE int column() { return threadIdx.x / WARP_SIZE * WARP_COLUMNS + threadIdx.x % LANES * VECTOR; }
  static DEVICE bool has(int row) {
#ifndef BUG_UNMASKED_TAIL
    if (VALUE_DIM % WARP_COLUMNS && column() >= VALUE_DIM) return false;
#endif
    return KEY_DIM == KEY_SPAN || row < KEY_DIM;
  }

  DEVICE void fill(float value) {
#pragma unroll
    for (int i = 0; i < GROUPS * 4 * VECTOR; ++i) at[i / VECTOR / 4][i / VECTOR % 4][i % VECTOR] = value;
  }

  DEVICE void load(const float* source) {
    fill(0.0f);
#pragma unroll
    for (int i = 0; i < GROUPS * 4; ++i) {
      const int row = row_of(i / 4) + i % 4;
      if (!has(row)) continue;
      const Columns loaded = load_once(source + row * VALUE_DIM + column(), Columns());
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) at[i / 4][i % 4][j] = loaded.at[j];
    }
  }

  DEVICE void store(float* target) const {
#pragma unroll
    for (int i = 0; i < GROUPS * 4; ++i) {
      const int row = row_of(i / 4) + i % 4;
      if (!has(row)) continue;
      Columns stored;
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) stored.at[j] = at[i / 4][i % 4][j];
      store_whole(target + row * VALUE_DIM + column(), stored);
    }
  }

  // By a token of the delta rule, whose output takes its value's place: (kept S + k change^T)^T q = kept S^T q + (k . q) change.
  // With BY_CHANNEL rows are what is kept of them before they are summed up, and `kept` is 1.
  DEVICE void advance(Token& token) {
    const int lane = threadIdx.x % WARP_SIZE;
    float sums[2 * VECTOR] = {};  // S^T k, then S^T q
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      if constexpr (BY_CHANNEL) {
        const Four kept = Four::load(token.kept + row_of(group));
#pragma unroll
        for (int i = 0; i < 4 * VECTOR; ++i) at[group][i / VECTOR][i % VECTOR] *= kept.at[i / VECTOR];
      }
      const Four q = Four::load(token.q + row_of(group)), k = Four::load(token.k + row_of(group));
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          sums[j] = fmaf(at[group][i][j], k.at[i], sums[j]);
          sums[VECTOR + j] = fmaf(at[group][i][j], q.at[i], sums[VECTOR + j]);
        }
    }
    const float sum = scattered_sum(sums), kept = BY_CHANNEL ? 1.0f : token.kept[0];
    // The first half of the lanes has a column's sum with k, the other one its sum with q.
    constexpr int SPREAD = SLICES / 2 / VECTOR;  // slices that end up with the same sum
    const int own = column() + lane % 16 / LANES / SPREAD;
    const bool is_owner = lane < 16 && lane / LANES % SPREAD == 0 && (VALUE_DIM % WARP_COLUMNS == 0 || own < VALUE_DIM);
    const float change = token.rate * ((is_owner ? token.value[own] : 0.0f) - kept * sum);
    const float q_sum = __shfl_xor_sync(ALL_LANES, sum, 16);
    if (is_owner) token.value[own] = fmaf(token.overlap, change, kept * q_sum);
    float changes[VECTOR];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) changes[j] = __shfl_sync(ALL_LANES, change, j * SPREAD * LANES + lane % LANES);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      const Four k = Four::load(token.k + row_of(group));
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) at[group][i][j] = fmaf(k.at[i], changes[j], kept * at[group][i][j]);
    }
  }

  // By a token of Mamba-2's rule, in which a change does not depend on the state. The barrier lies between those that read a
  // value and the one that overwrites it, and keeps q from being loaded before it is needed: registers are short.
  DEVICE void accumulate(Token& token) {
    Columns changes = {};
    if (VALUE_DIM % WARP_COLUMNS == 0 || column() < VALUE_DIM) changes = Columns::load(token.value + column());
    const float kept = token.kept[0], step = token.rate;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) changes.at[j] *= step;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      const Four k = Four::load(token.k + row_of(group));
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) at[group][i][j] = fmaf(k.at[i], changes.at[j], kept * at[group][i][j]);
    }
    __syncwarp();
    float sums[VECTOR] = {};
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      const Four q = Four::load(token.q + row_of(group));
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) sums[j] = fmaf(at[group][i][j], q.at[i], sums[j]);
    }
    const float sum = scattered_sum(sums);
    constexpr int SPREAD = SLICES / VECTOR;
    const int slice = threadIdx.x % WARP_SIZE / LANES, own = column() + slice / SPREAD;
    if (slice % SPREAD == 0 && (VALUE_DIM % WARP_COLUMNS == 0 || own < VALUE_DIM)) {
      token.value[own] = fmaf(token.overlap, token.value[own], sum);
    }
  }

 private:
  // Over a warp's slices. At each step a lane sends half of its sums and goes on with the others, as long as it has two.
  template <int COUNT>
  static DEVICE float scattered_sum(float (&sums)[COUNT]) {
    int left = COUNT;
#pragma unroll
    for (int bit = 16; bit >= LANES; bit >>= 1) {
      if (left == 1) {
        sums[0] += __shfl_xor_sync(ALL_LANES, sums[0], bit);
        continue;
      }
      left /= 2;
      const bool is_upper = threadIdx.x & bit;
#pragma unroll
      for (int i = 0; i < COUNT / 2; ++i) {
        if (i >= left) continue;
        const float sent = is_upper ? sums[i] : sums[left + i], own = is_upper ? sums[left + i] : sums[i];
        sums[i] = own + __shfl_xor_sync(ALL_LANES, sent, bit);
      }
    }
    return sums[0];
  }
};
