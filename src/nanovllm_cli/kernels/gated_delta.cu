// out [T, V * VALUE_DIM]: the gated delta rule with its convolution, gates and norm (state_rules.gated_delta has the formula), of a
// step's tokens behind what the cache has of their sequences. K heads of keys of KEY_DIM, V of values.
//
//   projected [T, channels + V * VALUE_DIM] DTYPE: channels, which are q and k [K, KEY_DIM] and v [V, VALUE_DIM], and z like v
//   gates [T, 2, V], decay, decay_bias [V], norm [VALUE_DIM] fp32: gates are b and a.  taps [WIDTH, channels] DTYPE, the own last
//   Of a state, two places (states.py): matrices [states, 2, V, KEY_DIM, VALUE_DIM] fp32, inputs [states, 2, WIDTH - 1, channels]
//   DTYPE, guesses [states, 2, G, channels] DTYPE, guess_gates [states, 2, G, gates] fp32, stamps and reaches [states, 2, V] int32
//   starts [B + 1], lens, known_lens [B] int32: as in Batch; a length of 0 is a row of padding.  state_of [B]: a sequence's state
//
// MAMBA: the rule of Mamba-2 instead (state_rules.state_space), whose norm is a kernel of its own, behind it. gates [T, V] are
// a alone, and norm is not read. In this rule only: skip [V] fp32, and taps_bias [channels] DTYPE, or null.
//
// BY_CHANNEL: the delta rule with a decay of each channel of a key (state_rules.channel_delta). projected has no z, gates [T, V]
// are b alone, decay_bias [V, KEY_DIM], guess_gates have b [V] and a [V, KEY_DIM]. In this rule only: rates [T, V, KEY_DIM] fp32,
// which are a, and z [T, V * VALUE_DIM] DTYPE, whose sigmoids outputs are multiplied with. FLOOR: the least logarithm of what is
// kept, or 0 for none.
//
// A step goes on from the later place that is not behind its first token: over the guesses that held there, then over its own
// tokens. What is behind its last known token is written to the other place, with the guesses behind that; done again, it finds
// what it found. The inputs of a key head are written by the first of the value heads that share it. A step without known tokens,
// as a model has that drafts, writes its guesses behind those that are there.
//
// A block takes a value head of a sequence, grid (B, V). Its state stays in registers: a warp has WARP_COLUMNS columns, of which
// a lane has VECTOR, and of the rows every eighth group of four. So sums over rows are a lane's own and seven shuffles, and warps
// meet twice in SLOTS tokens, not at each: a warp prepares q and k, or v and z, of a token; then all go through those tokens in
// their order, while the rows of the next ones are under way to a ring in shared memory; then a warp norms an output. What a
// token is computed from, and in which order, does not depend on those beside it.
// MOST: the largest beta, 1 where nothing is said.
#ifndef MOST
#define MOST 1.0f
#endif
#include "gated_delta.cuh"

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

// A warp writes a head's inputs of COUNT tokens up to this one to where the cache keeps them. Rolled up: registers are short.
template <int COUNT>
DEVICE void keep_inputs(Shared& shared, int token, int part, int dim, DTYPE* target, int channels) {
#pragma unroll 1
  for (int unit = 0; column_of(unit) < dim; ++unit)
#pragma unroll 1
    for (int k = 0; k < COUNT; ++k) {
      const Elements input = Elements::load(shared.row_of(token + 1 - COUNT + k) + part + column_of(unit));
      store_whole(target + k * channels + column_of(unit), input);
    }
}

// Those that a value head is to keep, of keys and queries (part 0) or of values.
template <int COUNT>
DEVICE void keep_inputs(Shared& shared, const Work& work, int token, bool is_value, DTYPE* target) {
  if (is_value) {
    keep_inputs<COUNT>(shared, token, 2 * KEY_DIM, VALUE_DIM, target + work.v_channel, work.channels);
  } else if (work.keeps_keys) {
    keep_inputs<COUNT>(shared, token, 0, KEY_DIM, target + work.q_channel, work.channels);
    keep_inputs<COUNT>(shared, token, KEY_DIM, KEY_DIM, target + work.k_channel, work.channels);
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
    for (int j = 0; j < LOAD; ++j) gate.at[j] = (MAMBA ? 1.0f : gate.at[j]) * gated_by(to_float(z.at[j]));
    gate.store(target.gate + column_of(unit));
  }
}

// What a token keeps of each row of a state; bias: of this head's.
DEVICE void prepare_kept(Token& target, float decay, const float* bias) {
  for (int i = threadIdx.x % WARP_SIZE; i < KEY_DIM; i += WARP_SIZE) {
    const float rate = target.rates[i] + bias[i];
    target.kept[i] = expf(FLOOR < 0.0f ? FLOOR / (1.0f + expf(decay * rate)) : decay * softplus(rate));
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
            const float* norm, const float* skip, const DTYPE* taps_bias, float* matrices, DTYPE* inputs, DTYPE* guesses,
            float* guess_gates, int* stamps, int* reaches, const int* starts, const int* lens, const int* known_lens,
            const int* state_of, DTYPE* out, int num_keys, int max_guesses, int tiled, float eps, const float* rates,
            const DTYPE* z) {
  __shared__ Shared shared;
  const int sequence = blockIdx.x, warp = threadIdx.x / WARP_SIZE;
  Work work;
  work.head = blockIdx.y, work.num_values = gridDim.y, work.max_guesses = max_guesses;
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
#ifndef BUG_DECAYED_TAIL
      if constexpr (BY_CHANNEL) shared.tokens[i / PADDING].kept[KEY_DIM + i % PADDING] = 0.0f;
#endif
    }
  }
  const int begin = __ldcg(starts + sequence), len = __ldcg(lens + sequence);
  const int num_own = __ldcg(starts + sequence + 1) - begin, position = len - num_own;
  const int num_known = __ldcg(known_lens + sequence) - position;
  work.place = __ldcg(state_of + sequence) * 2;
  const float own_decay = decay[work.head], own_bias = BY_CHANNEL ? 0.0f : decay_bias[work.head];
  wait_for_previous_kernel();

  const int stride = work.channels + (BY_CHANNEL ? 0 : work.num_values * VALUE_DIM);
  projected += (Index)begin * stride, gates += (Index)begin * GATES * work.num_values + work.head;
  out += ((Index)begin * work.num_values + work.head) * VALUE_DIM;
  if constexpr (BY_CHANNEL) {
    rates += ((Index)begin * work.num_values + work.head) * KEY_DIM, z += (Index)begin * work.num_values * VALUE_DIM;
  }
  work.count = len > 0 ? num_own : 0, work.own = 0, work.known = max(num_known, 0);
  int stamp = 0, reach = 0, second = 0, second_reach = 0;
  if (len > 0 && position > 0) {
    stamp = stamps[work.stamp_at(work.place)], reach = reaches[work.stamp_at(work.place)];
    second = stamps[work.stamp_at(work.place + 1)], second_reach = reaches[work.stamp_at(work.place + 1)];
  }
  // Rows of up to SLOTS tokens go on their way to the ring. Of their gates each of the first threads gets one.
  const auto fetch = [&](const Work& work, int start) {
    const int there = min(SLOTS, work.count - start);
#pragma unroll 1
    for (int i = threadIdx.x; i < there * (ROW / PIECE); i += THREADS) {
      const int token = start + i / (ROW / PIECE), part = i % (ROW / PIECE) * PIECE;
      const DTYPE* row = projected + (Index)(token - work.own) * stride;
      if (BY_CHANNEL && part >= PARTS) row = z + (Index)(token - work.own) * work.num_values * VALUE_DIM;
      if (token < work.own) row = guesses + work.guess_at(work.place, token) * work.channels;
      const bool has_part = token >= work.own || part < PARTS;
      copy_piece(shared.row_of(token) + part, row + (has_part ? work.channel_of(part) : 0), has_part);
    }
    if constexpr (BY_CHANNEL) {
#pragma unroll 1
      for (int i = threadIdx.x; i < there * (KEY_DIM / RATE_PIECE); i += THREADS) {
        const int slot = i / (KEY_DIM / RATE_PIECE), channel = i % (KEY_DIM / RATE_PIECE) * RATE_PIECE, token = start + slot;
        float* target = shared.tokens[slot].rates + channel;
        if (token < work.own) {  // what is kept of guesses may lie anywhere
          const float* source = guess_gates + work.rates_at(work.guess_at(work.place, token)) + channel;
#pragma unroll
          for (int j = 0; j < RATE_PIECE; ++j) target[j] = source[j];
        } else {
          copy_rates(target, rates + (Index)(token - work.own) * work.num_values * KEY_DIM + channel);
        }
      }
    }
    const int token = start + threadIdx.x % SLOTS, which = threadIdx.x / SLOTS;
    if (which >= GATES || token >= work.count) return 0.0f;
    if (token >= work.own) return gates[((Index)(token - work.own) * GATES + which) * work.num_values];
    return guess_gates[work.gate_at(work.guess_at(work.place, token), which)];
  };
  const auto land = [&](float gate) {
    if (threadIdx.x < GATES * SLOTS) shared.gates[threadIdx.x / SLOTS][threadIdx.x % SLOTS] = gate;
    commit_copies();
    wait_copies<0>();
    __syncthreads();
  };

  float first_gate = fetch(work, 0);
  if (second <= position && (second > stamp || stamp > position)) stamp = second, reach = second_reach, ++work.place;
  const bool is_there = stamp > 0 && stamp <= position && reach >= position;
  if (is_there && stamp < position) {
#ifndef BUG_NO_COMMIT
    commit_copies();  // of the step's first tokens, which come after others
#endif
    wait_copies<0>();
    __syncthreads();
#ifndef BUG_NOTHING_HELD
    work.own = position - stamp;
#endif
    work.count += work.own, work.known += work.known ? work.own : 0;
    first_gate = fetch(work, 0);
  } else if (!is_there && position != 0) {
    const float filling = len > 0 ? __uint_as_float(0x7fc00000u) : 0.0f;  // NaN for what is not there, zeros for padding
#pragma unroll 1
    for (int i = threadIdx.x; i < num_own * VALUE_DIM; i += THREADS) {
      out[(Index)(i / VALUE_DIM) * work.num_values * VALUE_DIM + i % VALUE_DIM] = from_float<DTYPE>(filling);
    }
    work.count = 0;
  }
  for (int i = threadIdx.x; i < BEFORE * (PARTS / PIECE); i += THREADS) {
    const int row = i / (PARTS / PIECE), part = i % (PARTS / PIECE) * PIECE;
    const DTYPE* source = inputs + work.inputs_at(work.place) + row * work.channels + work.channel_of(part);
    copy_piece(shared.rows[row] + part, source, is_there);
  }
  State state;
  if (is_there) {
    state.load(matrices + work.matrix_at(work.place));
  } else {
    state.fill(0.0f);
  }
  if (threadIdx.x == 0) {
    work.stamp = position + num_known;
    work.reach = min(len, position + (num_known > 0 ? num_known : -work.own) + max_guesses);
    if (position == 0 && len > 0) stamps[work.stamp_at(work.place)] = 0;  // what another sequence may have left there
    shared.work = work;
  }
  let_next_kernel_start();
  land(first_gate);

#pragma unroll 1
  for (int start = 0; start < shared.work.count; start += SLOTS) {
    const int there = min(SLOTS, shared.work.count - start);
#pragma unroll 1
    for (int task = warp; task < TASKS * there; task += WARPS) {
      const int token = start + task / TASKS;
      Token& target = shared.tokens[task / TASKS];
      if (task % TASKS == 0) {
        prepare_keys(shared, token, target);
      } else {
        prepare_values(shared, token, target, norm);
        if constexpr (BY_CHANNEL) prepare_kept(target, own_decay, decay_bias + shared.work.head * KEY_DIM);
        if (threadIdx.x % WARP_SIZE == 0) {
          if constexpr (!MAMBA) target.rate = __fdividef(MOST, 1.0f + expf(-shared.gates[0][task / TASKS]));
          if constexpr (!BY_CHANNEL) {
            const float step = softplus(shared.gates[GATES - 1][task / TASKS] + own_bias);
            target.kept[0] = expf(own_decay * step);
            if constexpr (MAMBA) target.rate = step, target.overlap = skip[shared.work.head];
          }
        }
      }
      if (shared.work.is_last_known(token)) {
        keep_inputs<BEFORE>(shared, shared.work, token, task % TASKS, inputs + shared.work.inputs_at(shared.work.target()));
      } else if (const int guess = shared.work.guess_of(token); guess >= 0 && guess < max_guesses) {
        const Index kept = shared.work.guess_at(shared.work.target(), guess);
        keep_inputs<1>(shared, shared.work, token, task % TASKS, guesses + kept * shared.work.channels);
        if (threadIdx.x % WARP_SIZE < GATES && task % TASKS) {
          const int which = threadIdx.x % WARP_SIZE;
          guess_gates[shared.work.gate_at(kept, which)] = shared.gates[which][task / TASKS];
        }
        if constexpr (BY_CHANNEL) {
          float* kept_rates = guess_gates + shared.work.rates_at(kept);
          for (int i = threadIdx.x % WARP_SIZE; i < KEY_DIM && task % TASKS; i += WARP_SIZE) kept_rates[i] = target.rates[i];
        }
      }
    }
#ifndef BUG_NO_BARRIER
    __syncthreads();
#endif
    const float gate = fetch(shared.work, start + SLOTS);
#pragma unroll 1
    for (int token = start; token < start + there; ++token) {
      if constexpr (MAMBA) {
        state.accumulate(shared.tokens[token - start]);
      } else {
        state.advance(shared.tokens[token - start]);
      }
      if (!shared.work.is_last_known(token)) continue;
      state.store(matrices + shared.work.matrix_at(shared.work.target()));
      if (threadIdx.x == 0) stamps[shared.work.stamp_at(shared.work.target())] = shared.work.stamp;
    }
    land(gate);
#pragma unroll 1
    for (int task = warp; task < TASKS * there; task += WARPS) {
      const int token = start + task / TASKS - shared.work.own;
      if (task % TASKS == 0 || token < 0) continue;
      finish(shared.tokens[task / TASKS], eps, out + (Index)token * shared.work.num_values * VALUE_DIM);
    }
  }
  if (threadIdx.x == 0 && shared.work.count) reaches[shared.work.stamp_at(shared.work.target())] = shared.work.reach;
}
EXPORT(gated_delta)
