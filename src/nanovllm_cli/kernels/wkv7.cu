// out [T, channels]: what RWKV-7's heads find in their states, normed, beside what a token finds in itself, times its gates; of a
// step's tokens behind what the states have of their sequences (wkv_rules.wkv7 has the formula). D is HEAD_DIM, channels are V * D.
//
//   r, k, v, gates [T, channels] DTYPE;  decays, rates and, unless it is null, mixes [T, channels] fp32, with first [T, channels]
//   DTYPE then;  tables [8, channels] fp32: wkv_rules.TABLES
//   Of a state, two places: matrices [states, 2, V, D, D] fp32, rows of keys; guess_gates [states, 2, G, 5, channels] fp32: what is
//   kept, keys, values, what is taken off, what is put there.  The rest as token_shift.cu has it, which comes first and last
//
// A block takes a head of a sequence, grid (B, V). Four lanes of a warp have a column of the state, each every fourth group of four of
// its rows, in registers. Tokens are taken in their order, SLOTS at once: a warp makes what the rule reads of each, then all threads
// take one after another, then a warp norms what each has found. What a token is computed from does not depend on those beside it.
#include "scan_places.cuh"

constexpr int LANES = 4, QUAD = 4;
constexpr int COLUMNS = (HEAD_DIM + 7) / 8 * 8, THREADS = COLUMNS * LANES, WARPS = THREADS / WARP_SIZE;
constexpr int QUADS = (HEAD_DIM + LANES * QUAD - 1) / (LANES * QUAD), ROWS = QUADS * LANES * QUAD;
constexpr int SLOTS = WARPS < 8 ? WARPS : 8;
constexpr float LEAST_LOG_DECAY = -0.606531f, SHORTEST = 1e-12f;
typedef Vector<float, QUAD> Quad;

struct Token {
  alignas(16) float kept[ROWS], key[ROWS], away[ROWS], put[ROWS], r[ROWS];
  float value[COLUMNS], found[COLUMNS], bonus;
};

DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// The sum over the lanes that share a column.
DEVICE float column_sum(float value) {
  value += __shfl_xor_sync(ALL_LANES, value, 1);
  return value + __shfl_xor_sync(ALL_LANES, value, 2);
}

KERNEL __launch_bounds__(THREADS, THREADS > 256 ? 1 : 2)
wkv7(const DTYPE* r, const DTYPE* k, const DTYPE* v, const DTYPE* gates, const float* decays, const float* rates,
     const float* mixes, const DTYPE* first, const float* tables, float* matrices, float* guess_gates, const int* stamps,
     const int* reaches, const int* starts, const int* lens, const int* known_lens, const int* state_of, DTYPE* out,
     int max_guesses, float eps) {
  __shared__ Token tokens[SLOTS];
  const int sequence = blockIdx.x, head = blockIdx.y, num_values = gridDim.y, channels = num_values * HEAD_DIM;
  const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  const int column = threadIdx.x / LANES, group = threadIdx.x % LANES;
  const bool has_column = column < HEAD_DIM;
  const Lengths own = Lengths::load(starts, lens, known_lens, state_of, sequence);
  const auto table = [&](int which, int i) { return tables[which * channels + head * HEAD_DIM + i]; };
  wait_for_previous_kernel();

  const Places at = Places::find(own, stamps, reaches, num_values, head);
  let_next_kernel_start();
  const Index begin = (Index)own.begin * channels + head * HEAD_DIM;
  if (!at.is_there || own.len == 0) {
    if (has_column && group == 0) fill(out + begin + column, own, channels);
    return;
  }
  const auto row_of = [&](int quad, int i) { return (quad * LANES + group) * QUAD + i; };
  const auto matrix_at = [&](int place) { return ((Index)place * num_values + head) * HEAD_DIM * HEAD_DIM + column; };
  float state[QUADS][QUAD];
#pragma unroll
  for (int quad = 0; quad < QUADS; ++quad) {
#pragma unroll
    for (int i = 0; i < QUAD; ++i) {
      const int row = row_of(quad, i);
      const bool is_known = own.position > 0 && has_column && row < HEAD_DIM;
      state[quad][i] = is_known ? matrices[matrix_at(at.place) + (Index)row * HEAD_DIM] : 0.0f;
    }
  }

#pragma unroll 1
  for (int start = -at.held; start < own.count; start += SLOTS) {
    const int there = min(SLOTS, own.count - start);
#pragma unroll 1
    for (int slot = warp; slot < there; slot += WARPS) {
      Token& target = tokens[slot];
      const int token = start + slot;
      const Index row = begin + (Index)token * channels;
      float length = 0.0f, bonus = 0.0f;
#pragma unroll 1
      for (int i = lane; i < ROWS; i += WARP_SIZE) {
        float kept = 0.0f, key = 0.0f, away = 0.0f, put = 0.0f, own_r = 0.0f, value = 0.0f;
        if (i < HEAD_DIM && token < 0) {
          const float* guess = guess_gates + ((Index)at.place * max_guesses + at.held + token) * 5 * channels + head * HEAD_DIM + i;
          kept = guess[0], key = guess[channels], value = guess[2 * channels], away = guess[3 * channels];
          put = guess[4 * channels];
        } else if (i < HEAD_DIM) {
          kept = expf(LEAST_LOG_DECAY * sigmoid(decays[row + i] + table(0, i)));
          put = sigmoid(rates[row + i] + table(1, i));
          key = to_float(k[row + i]), own_r = to_float(r[row + i]), value = to_float(v[row + i]);
          if (mixes) value = fmaf(to_float(first[row + i]) - value, sigmoid(mixes[row + i] + table(2, i)), value);
          away = key * table(3, i);
          key = fmaf(put - 1.0f, key * table(4, i), key);
          length = fmaf(away, away, length), bonus = fmaf(own_r * key, table(5, i), bonus);
        }
        target.kept[i] = kept, target.key[i] = key, target.away[i] = away, target.put[i] = put, target.r[i] = own_r;
        if (i < COLUMNS) target.value[i] = value;
      }
      if (token < 0) continue;
      length = warp_sum(length), bonus = warp_sum(bonus);
      const float inverse = 1.0f / fmaxf(sqrtf(length), SHORTEST);
      const int guess = own.position + token - at.first_guess;
      const bool is_guess = token >= own.known && guess < max_guesses;
      if (lane == 0) target.bonus = bonus;
#pragma unroll 1
      for (int i = lane; i < HEAD_DIM; i += WARP_SIZE) {
        const float away = target.away[i] * inverse, put = -away * target.put[i];
        target.away[i] = away, target.put[i] = put;
        if (!is_guess) continue;
        float* kept = guess_gates + ((Index)at.target * max_guesses + guess) * 5 * channels + head * HEAD_DIM + i;
        kept[0] = target.kept[i], kept[channels] = target.key[i], kept[2 * channels] = target.value[i];
        kept[3 * channels] = away, kept[4 * channels] = put;
      }
    }
#ifndef BUG_NO_BARRIER
    __syncthreads();
#endif
#pragma unroll 1
    for (int slot = 0; slot < there; ++slot) {
      Token& of = tokens[slot];
      float taken = 0.0f, found = 0.0f;
#pragma unroll
      for (int quad = 0; quad < QUADS; ++quad) {
        const Quad away = Quad::load(of.away + row_of(quad, 0));
#pragma unroll
        for (int i = 0; i < QUAD; ++i) taken = fmaf(state[quad][i], away.at[i], taken);
      }
      taken = column_sum(taken);
      const float value = of.value[column];
#pragma unroll
      for (int quad = 0; quad < QUADS; ++quad) {
        const int row = row_of(quad, 0);
        const Quad kept = Quad::load(of.kept + row), key = Quad::load(of.key + row), put = Quad::load(of.put + row);
        const Quad reads = Quad::load(of.r + row);
#pragma unroll
        for (int i = 0; i < QUAD; ++i) {
          state[quad][i] = fmaf(kept.at[i], state[quad][i], fmaf(put.at[i], taken, key.at[i] * value));
          found = fmaf(state[quad][i], reads.at[i], found);
        }
      }
      found = column_sum(found);
      if (group == 0) of.found[column] = found;
      if (own.known <= 0 || start + slot + 1 != own.known || !has_column) continue;  // guesses that held end where a step begins
#pragma unroll
      for (int quad = 0; quad < QUADS; ++quad) {
#pragma unroll
        for (int i = 0; i < QUAD; ++i) {
          const int row = row_of(quad, i);
          if (row < HEAD_DIM) matrices[matrix_at(at.target) + (Index)row * HEAD_DIM] = state[quad][i];
        }
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int slot = warp; slot < there; slot += WARPS) {
      const Token& of = tokens[slot];
      const int token = start + slot;
      if (token < 0) continue;
      const Index row = begin + (Index)token * channels;
      float sum = 0.0f, squares = 0.0f;
#pragma unroll 1
      for (int i = lane; i < HEAD_DIM; i += WARP_SIZE) sum += of.found[i];
      const float mean = warp_sum(sum) / HEAD_DIM;
#pragma unroll 1
      for (int i = lane; i < HEAD_DIM; i += WARP_SIZE) squares += (of.found[i] - mean) * (of.found[i] - mean);
      const float inverse = rsqrtf(warp_sum(squares) / HEAD_DIM + eps);
#pragma unroll 1
      for (int i = lane; i < HEAD_DIM; i += WARP_SIZE) {
        const float normed = fmaf((of.found[i] - mean) * inverse, table(6, i), table(7, i));
        out[row + i] = from_float<DTYPE>(fmaf(of.bonus, of.value[i], normed) * to_float(gates[row + i]));
      }
    }
    __syncthreads();
  }
}
EXPORT(wkv7)
