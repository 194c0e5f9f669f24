// out [T, V * VALUE_DIM]: the gated delta rule with its convolution, gates and norm (reference.gated_delta has the formula), of a
// step's tokens behind what the cache has of their sequences. K heads of keys of KEY_DIM, V of values.
//
//   projected [T, channels + V * VALUE_DIM] DTYPE: channels, which are q and k [K, KEY_DIM] and v [V, VALUE_DIM], and z like v
//   gates [T, 2, V], decay, decay_bias [V], norm [VALUE_DIM] fp32: gates are b and a.  taps [WIDTH, channels] DTYPE, the own last
//   states [blocks, 2, V, KEY_DIM, VALUE_DIM] fp32, inputs [blocks, 2, WIDTH - 1, channels] DTYPE, stamps [blocks, 2, V] int32:
//   a block's two places. What lies in the one whose stamp is n is what there was behind n tokens of the sequence.
//   starts, lens, tables: as in gated_conv.cu
//
// MAMBA: the rule of Mamba-2 instead (reference.state_space), whose norm is a kernel of its own, behind it. gates [T, V] are
// a alone, and norm is not read. In this rule only: skip [V] fp32, and taps_bias [channels] DTYPE, or null.
//
// A step reads the place that has what was behind the token before its first, and writes the block's other one, or place 0 of
// blocks that it enters: done again, it finds what it found. State and inputs are written at ends of blocks and of the step, the
// inputs of a key head by the first of the value heads that share it.
//
// A block takes a value head of a sequence, grid (B, V). Its state stays in registers: a warp has WARP_COLUMNS columns, of which
// a lane has VECTOR, and of the rows every eighth group of four. So sums over rows are a lane's own and seven shuffles, and warps
// meet twice in SLOTS tokens, not at each: a warp prepares q and k, or v and z, of a token; then all go through those tokens in
// their order, while the rows of the next ones are under way to a ring in shared memory; then a warp norms an output. What a
// token is computed from, and in which order, does not depend on those beside it.
#include "gated_delta.cuh"

// What a block works on: a value head of a sequence, and where in the cache its step begins and its tokens are kept.
struct Work {
  const int* table;
  int head, num_values, q_channel, k_channel, v_channel, channels;
  bool keeps_keys;
  // own_end: the last token in the block that the state is read from, or -1.  place: that is read, of all blocks' places.
  int count, position, block_size, own_end, place;

  // In a row of the projection, of a piece of what a block needs of it.
  DEVICE int channel_of(int part) const {
    if (part < KEY_DIM) return q_channel + part;
    if (part < 2 * KEY_DIM) return k_channel + part - KEY_DIM;
    if (part < PARTS) return v_channel + part - 2 * KEY_DIM;
    return v_channel + num_values * VALUE_DIM + part - PARTS;
  }
  DEVICE bool is_kept(int token) const { return token + 1 == count || (position + token + 1) % block_size == 0; }
  // Where what is behind a token is written.
  DEVICE int place_of(int token) const {
    int other = place ^ 1;
#ifdef BUG_SAME_PLACE
    other = place;
#endif
    return token <= own_end ? other : table[(position + token) / block_size] * 2;
  }
  DEVICE Index state_at(int place) const { return stamp_at(place) * (KEY_DIM * VALUE_DIM); }
  DEVICE Index stamp_at(int place) const { return (Index)place * num_values + head; }
  DEVICE Index inputs_at(int place) const { return (Index)place * BEFORE * channels; }
};

// silu of a lane's part of a convolution; zeros beyond the head. part: where the head begins in a row.
template <int DIM>
DEVICE Floats mixed(Shared& shared, int token, int part, int unit) {
  Floats sums = {};
  if (!has_unit<DIM>(unit)) return sums;
  if constexpr (MAMBA) {
    const Elements bias = Elements::load(shared.taps[WIDTH] + part + column_of(unit));
#pragma unroll
    for (int j = 0; j < LOAD; ++j) sums.at[j] = to_float(bias.at[j]);
  }
#pragma unroll
  for (int k = 0; k < WIDTH; ++k) {
    const Elements input = Elements::load(shared.row_of(token - BEFORE + k) + part + column_of(unit));
    const Elements tap = Elements::load(shared.taps[k] + part + column_of(unit));
#pragma unroll
    for (int j = 0; j < LOAD; ++j) sums.at[j] = fmaf(to_float(tap.at[j]), to_float(input.at[j]), sums.at[j]);
  }
#pragma unroll
  for (int j = 0; j < LOAD; ++j) sums.at[j] = silu(sums.at[j]);
  return sums;
}

// A warp writes a head's last inputs to where the cache keeps them behind a token. Rolled up: registers are short.
DEVICE void keep_inputs(Shared& shared, int token, int part, int dim, DTYPE* target, int channels) {
#pragma unroll 1
  for (int unit = 0; column_of(unit) < dim; ++unit)
#pragma unroll 1
    for (int k = 1; k < WIDTH; ++k) {
      const Elements input = Elements::load(shared.row_of(token - BEFORE + k) + part + column_of(unit));
      store_whole(target + (k - 1) * channels + column_of(unit), input);
    }
}

DEVICE void prepare_keys(Shared& shared, int token, Token& target) {
  if constexpr (MAMBA) {
#pragma unroll
    for (int unit = 0; unit < KEY_UNITS; ++unit) {
      if (!has_unit<KEY_DIM>(unit)) continue;
      mixed<KEY_DIM>(shared, token, 0, unit).store(target.q + column_of(unit));
      mixed<KEY_DIM>(shared, token, KEY_DIM, unit).store(target.k + column_of(unit));
    }
    return;
  }
  Floats q[KEY_UNITS], k[KEY_UNITS];
  float of_q = 0.0f, of_k = 0.0f, overlap = 0.0f;
#pragma unroll
  for (int unit = 0; unit < KEY_UNITS; ++unit) {
    q[unit] = mixed<KEY_DIM>(shared, token, 0, unit), k[unit] = mixed<KEY_DIM>(shared, token, KEY_DIM, unit);
#pragma unroll
    for (int j = 0; j < LOAD; ++j) {
      of_q = fmaf(q[unit].at[j], q[unit].at[j], of_q);
      of_k = fmaf(k[unit].at[j], k[unit].at[j], of_k);
      overlap = fmaf(q[unit].at[j], k[unit].at[j], overlap);
    }
  }
  const float by_q = rsqrtf(warp_sum(of_q) + 1e-6f) * rsqrtf((float)KEY_DIM), by_k = rsqrtf(warp_sum(of_k) + 1e-6f);
  overlap = warp_sum(overlap) * by_q * by_k;
#pragma unroll
  for (int unit = 0; unit < KEY_UNITS; ++unit) {
#pragma unroll
    for (int j = 0; j < LOAD; ++j) q[unit].at[j] *= by_q, k[unit].at[j] *= by_k;
    if (!has_unit<KEY_DIM>(unit)) continue;
    q[unit].store(target.q + column_of(unit));
    k[unit].store(target.k + column_of(unit));
  }
  if (threadIdx.x % WARP_SIZE == 0) target.overlap = overlap;
}

DEVICE void prepare_values(Shared& shared, int token, Token& target, const float* norm) {
#pragma unroll
  for (int unit = 0; unit < VALUE_UNITS; ++unit) {
    if (!has_unit<VALUE_DIM>(unit)) continue;
    mixed<VALUE_DIM>(shared, token, 2 * KEY_DIM, unit).store(target.value + column_of(unit));
    const Elements z = Elements::load(shared.row_of(token) + PARTS + column_of(unit));
    Floats gate;
    if constexpr (!MAMBA) gate = Floats::load(norm + column_of(unit));
#pragma unroll
    for (int j = 0; j < LOAD; ++j) gate.at[j] = (MAMBA ? 1.0f : gate.at[j]) * silu(to_float(z.at[j]));
    gate.store(target.gate + column_of(unit));
  }
}

// An output gated, and normed before that, by the warp that had its value.
DEVICE void finish(const Token& token, float eps, DTYPE* out) {
  Floats values[VALUE_UNITS];
  float squares = 0.0f;
#pragma unroll
  for (int unit = 0; unit < VALUE_UNITS; ++unit) {
    if (!has_unit<VALUE_DIM>(unit)) continue;
    values[unit] = Floats::load(token.value + column_of(unit));
#pragma unroll
    for (int j = 0; j < LOAD; ++j) squares = fmaf(values[unit].at[j], values[unit].at[j], squares);
  }
  const float factor = MAMBA ? 1.0f : rsqrtf(warp_sum(squares) / VALUE_DIM + eps);
#pragma unroll
  for (int unit = 0; unit < VALUE_UNITS; ++unit) {
    if (!has_unit<VALUE_DIM>(unit)) continue;
    const Floats gate = Floats::load(token.gate + column_of(unit));
    Elements rounded;
#pragma unroll
    for (int j = 0; j < LOAD; ++j) rounded.at[j] = from_float<DTYPE>(values[unit].at[j] * factor * gate.at[j]);
    store_whole(out + column_of(unit), rounded);
  }
}

KERNEL __launch_bounds__(THREADS, WARPS_WANTED / WARPS)
gated_delta(const DTYPE* projected, const float* gates, const DTYPE* taps, const float* decay, const float* decay_bias,
            const float* norm, const float* skip, const DTYPE* taps_bias, float* states, DTYPE* inputs, int* stamps,
            const int* starts, const int* lens, const int* tables, DTYPE* out, int num_keys, int table_width, int block_size,
            int tiled, float eps) {
  __shared__ Shared shared;
  const int sequence = blockIdx.x, warp = threadIdx.x / WARP_SIZE;
  Work work;
  work.head = blockIdx.y, work.num_values = gridDim.y;
  const int group = work.num_values / num_keys, key_head = tiled ? work.head % num_keys : work.head / group;
  work.keeps_keys = tiled ? work.head < num_keys : work.head % group == 0;
  work.q_channel = key_head * KEY_DIM, work.k_channel = num_keys * KEY_DIM + work.q_channel;
  work.v_channel = 2 * num_keys * KEY_DIM + work.head * VALUE_DIM;
  work.channels = 2 * num_keys * KEY_DIM + work.num_values * VALUE_DIM;

  // Weights, lengths and the block: their way from memory is spent waiting for the projection.
  for (int i = threadIdx.x; i < WIDTH * PARTS / PIECE; i += THREADS) {
    const int tap = i / (PARTS / PIECE), part = i % (PARTS / PIECE) * PIECE;
    copy_piece(shared.taps[tap] + part, taps + (Index)tap * work.channels + work.channel_of(part));
  }
  if constexpr (MAMBA) {
    for (int part = threadIdx.x * PIECE; part < PARTS; part += THREADS * PIECE) {
      copy_piece(shared.taps[WIDTH] + part, (taps_bias ? taps_bias : taps) + work.channel_of(part), taps_bias);
    }
  }
  if constexpr (KEY_SPAN > KEY_DIM) {
    constexpr int PADDING = KEY_SPAN - KEY_DIM;
    for (int i = threadIdx.x; i < SLOTS * PADDING; i += THREADS) {
      shared.tokens[i / PADDING].q[KEY_DIM + i % PADDING] = 0.0f;
      shared.tokens[i / PADDING].k[KEY_DIM + i % PADDING] = 0.0f;
    }
  }
  const int begin = __ldcg(starts + sequence), len = __ldcg(lens + sequence);
  work.count = __ldcg(starts + sequence + 1) - begin, work.position = len - work.count, work.block_size = block_size;
  work.table = tables + (Index)sequence * table_width;
  int newest = work.position - 1;
#ifdef BUG_PAGE
  ++newest;
#endif
  const int block = work.position > 0 ? __ldcg(work.table + newest / block_size) : 0;
  const int first_end = block_size - 1 - work.position % block_size;
  work.own_end = work.position % block_size ? first_end : -1;
  const float own_decay = decay[work.head], own_bias = decay_bias[work.head];
  wait_for_previous_kernel();

  const int stride = work.channels + work.num_values * VALUE_DIM;
  projected += (Index)begin * stride, gates += (Index)begin * GATES * work.num_values + work.head;
  out += ((Index)begin * work.num_values + work.head) * VALUE_DIM;
  if (len == 0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < work.count * VALUE_DIM; i += THREADS) {
      out[(Index)(i / VALUE_DIM) * work.num_values * VALUE_DIM + i % VALUE_DIM] = from_float<DTYPE>(0.0f);
    }
    work.count = 0;
  }
  // Rows of up to SLOTS tokens go on their way to the ring. Of their gates each of the first threads gets one.
  const auto fetch = [&](int start) {
    const int there = min(SLOTS, work.count - start);
#pragma unroll 1
    for (int i = threadIdx.x; i < there * (ROW / PIECE); i += THREADS) {
      const int token = start + i / (ROW / PIECE), part = i % (ROW / PIECE) * PIECE;
      copy_piece(shared.row_of(token) + part, projected + (Index)token * stride + work.channel_of(part));
    }
    const int token = start + threadIdx.x % SLOTS, which = threadIdx.x / SLOTS;
    return which < GATES && token < work.count ? gates[((Index)token * GATES + which) * work.num_values] : 0.0f;
  };
  const auto land = [&](float gate) {
    if (threadIdx.x < GATES * SLOTS) shared.gates[threadIdx.x / SLOTS][threadIdx.x % SLOTS] = gate;
    commit_copies();
    wait_copies<0>();
    __syncthreads();
  };

  const float first_gate = fetch(0);
  bool is_known = false;
  work.place = block * 2;
  if (len > 0 && work.position > 0) {
    const bool is_first = stamps[work.stamp_at(work.place)] == work.position;
    const bool is_second = stamps[work.stamp_at(work.place + 1)] == work.position;
    is_known = is_first || is_second;
    work.place += !is_first && is_second;
  }
  for (int i = threadIdx.x; i < BEFORE * (PARTS / PIECE); i += THREADS) {
    const int row = i / (PARTS / PIECE), part = i % (PARTS / PIECE) * PIECE;
    const DTYPE* source = inputs + work.inputs_at(work.place) + row * work.channels + work.channel_of(part);
    copy_piece(shared.rows[row] + part, source, is_known);
  }
  State state;
  if (is_known) {
    state.load(states + work.state_at(work.place));
  } else {
    state.fill(work.position == 0 ? 0.0f : __uint_as_float(0x7fc00000u));
  }
  let_next_kernel_start();
  land(first_gate);

  int next_end = first_end;
#pragma unroll 1
  for (int start = 0; start < work.count; start += SLOTS) {
    const int there = min(SLOTS, work.count - start);
#pragma unroll 1
    for (int task = warp; task < TASKS * there; task += WARPS) {
      const int token = start + task / TASKS;
      Token& target = shared.tokens[task / TASKS];
      if (task % TASKS == 0) {
        prepare_keys(shared, token, target);
      } else {
        prepare_values(shared, token, target, norm);
        if (threadIdx.x % WARP_SIZE == 0) {
          if constexpr (!MAMBA) target.rate = __fdividef(1.0f, 1.0f + expf(-shared.gates[0][task / TASKS]));
          const float step = softplus(shared.gates[GATES - 1][task / TASKS] + own_bias);
          target.kept = expf(own_decay * step);
          if constexpr (MAMBA) target.rate = step, target.overlap = skip[work.head];
        }
      }
      if (!work.is_kept(token)) continue;
      DTYPE* kept = inputs + work.inputs_at(work.place_of(token));
      if (task % TASKS == 1) {
        keep_inputs(shared, token, 2 * KEY_DIM, VALUE_DIM, kept + work.v_channel, work.channels);
      } else if (work.keeps_keys) {
        keep_inputs(shared, token, 0, KEY_DIM, kept + work.q_channel, work.channels);
        keep_inputs(shared, token, KEY_DIM, KEY_DIM, kept + work.k_channel, work.channels);
      }
    }
#ifndef BUG_NO_BARRIER
    __syncthreads();
#endif
    const float gate = fetch(start + SLOTS);
#pragma unroll 1
    for (int token = start; token < start + there; ++token) {
      if constexpr (MAMBA) {
        state.accumulate(shared.tokens[token - start]);
      } else {
        state.advance(shared.tokens[token - start]);
      }
      if (token != next_end && token + 1 != work.count) continue;
      if (token == next_end) next_end += block_size;
      const int place = work.place_of(token);
      state.store(states + work.state_at(place));
      if (threadIdx.x == 0) {
        stamps[work.stamp_at(place)] = work.position + token + 1;
        if (token > work.own_end) stamps[work.stamp_at(place + 1)] = 0;
      }
    }
    land(gate);
#pragma unroll 1
    for (int task = warp; task < TASKS * there; task += WARPS) {
      if (task % TASKS == 0) continue;
      finish(shared.tokens[task / TASKS], eps, out + (Index)(start + task / TASKS) * work.num_values * VALUE_DIM);
    }
  }
}
EXPORT(gated_delta)
