// The first of sampling's kernels: a row of logits as it is drawn from, its largest, and for greedy rows the token.
//
// Order of effects (engine/sampler.py): mask, stop ids while min_tokens is not reached, logit_bias, repetition, frequency,
// presence. A row that asks for none of these is read where the model left it; another is written to `adjusted`, because
// log-probabilities are of the model's own logits.
//
// Grid (slices, rows): 600 KB of logits are too much for one SM's bandwidth, so a row is divided into slices until the GPU is
// full. Each block finds its slice's largest logit; the row's last block compares those. For filters and log-probabilities it
// also finds a bound that at least so many logits reach: each group of threads keeps the largest of its logits (a column), and
// the R-th largest column is such a bound, a good one because neighbouring ids lie in different columns. The next kernels then
// look at the few tokens above it only. The bound decides how much work they have, never what they find.
//
// logits, adjusted [B, V] float; rows [B] int32: each row's sequence, an index into the tables, -1 for padding; table [S];
// positions [S] int64, masks [S, W] (W = ceil(V / 32), token 32 * i + j in bit j of word i), stop_ids [S, stops], bias_ids and
// biases [S, biases], counts [S, V] uint16 of the output's tokens, prompt_bits [S, W]; token_ids [B] int64, status [B] int32.
#include "sampling.cuh"

constexpr int RANK_OF_BOUND = 512;

// Where the row's R-th largest column is.
struct ColumnProbe {
  float peak, temperature;

  DEVICE uint32_t key_of(float logit, int, uint32_t& gap) const {
    gap = gap_key(logit, peak, temperature);
    return gap < GAP_KEYS ? gap : NO_KEY;
  }
};

DEVICE float penalized(float logit, const Params& params, int count, bool in_prompt) {
  if (count || in_prompt) {
    if (params.repetition != 1.0f)
      logit = logit > 0.0f ? __fdiv_rn(logit, params.repetition) : __fmul_rn(logit, params.repetition);
    logit = __fsub_rn(logit, __fmul_rn(params.frequency, (float)count));
    if (count) logit = __fsub_rn(logit, params.presence);
  }
  return logit;
}

// A thread's own: the first of its logits in the order of tokens.
struct Best {
  uint32_t key = KEY_OF_MINUS_INFINITY, id = NO_KEY;

  DEVICE void see(float logit, int token) {
    const uint32_t other = logit_key(logit);
#ifdef BUG_TIES
    if (other <= key) key = other, id = token;
#else
    if (other < key || id == NO_KEY) key = other, id = token;
#endif
  }
  DEVICE uint64_t rank() const { return (uint64_t)key << 32 | id; }
};

// The largest of each `lanes` neighbours' logits.
DEVICE void write_columns(float* columns, uint32_t key, int lanes) {
  for (int bits = 1; bits < lanes; bits *= 2) key = min(key, __shfl_xor_sync(ALL_LANES, key, bits));
  if (threadIdx.x % lanes == 0) columns[(blockIdx.x * THREADS + threadIdx.x) / lanes] = logit_of(key);
}

KERNEL __launch_bounds__(THREADS, 2)
largest_logits(const float* logits, float* adjusted, const int32_t* rows, const Params* table, int64_t* positions,
               const uint32_t* masks, const int32_t* stop_ids, const int32_t* bias_ids, const float* biases, uint16_t* counts,
               const uint32_t* prompt_bits, Scratch* scratches, int64_t* token_ids, int32_t* status, int vocabulary, int slice,
               int column_lanes, int stop_width, int bias_width) {
  __shared__ Workspace shared;
  wait_for_previous_kernel();
  const int b = blockIdx.y, sequence = rows[b];
  if (sequence < 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0) token_ids[b] = 0, status[b] = FINE;
    return;
  }
  const Params params = table[sequence];
  Scratch& scratch = scratches[b];
  const int begin = blockIdx.x * slice, end = min(begin + slice, vocabulary);
  const int64_t position = positions[sequence];
  const int64_t row = (int64_t)b * vocabulary, counted = (int64_t)sequence * vocabulary;
  const int64_t words = (int64_t)sequence * ((vocabulary + 31) / 32);
  const bool adjusts = params.adjusts(position);
  Best original, best;

  visit_row(logits + row, begin, end, [&](float logit, int id) {
    original.see(logit, id);
    if (!adjusts) return;
    const bool allowed = !params.uses_mask || masks[words + id / 32] >> id % 32 & 1;
    adjusted[row + id] = allowed ? logit : NEGATIVE_INFINITY;
  });
  if (adjusts) {
    __syncthreads();
    if (position < params.min_tokens)
      for (int i = threadIdx.x; i < params.num_stops; i += THREADS) {
        const int id = stop_ids[(int64_t)sequence * stop_width + i];
        if (id >= begin && id < end) adjusted[row + id] = NEGATIVE_INFINITY;
      }
    __syncthreads();
    for (int i = threadIdx.x; i < params.num_biases; i += THREADS) {
      const int id = bias_ids[(int64_t)sequence * bias_width + i];
      if (id >= begin && id < end) adjusted[row + id] += biases[(int64_t)sequence * bias_width + i];
    }
#ifndef BUG_ADJUST_WITHOUT_BARRIER
    __syncthreads();
#endif
    visit_row(adjusted + row, begin, end, [&](float logit, int id) {
      if (params.uses_counts) {
        logit = penalized(logit, params, counts[counted + id], prompt_bits[words + id / 32] >> id % 32 & 1);
        adjusted[row + id] = logit;
      }
      best.see(logit, id);
    });
  } else {
    best = original;
  }

  const bool wants_bound = !params.is_greedy() && params.has_filters(), wants_list = params.num_logprobs > 0;
  if (wants_bound) write_columns(scratch.columns, best.key, column_lanes);
  if (wants_list) write_columns(scratch.original_columns, original.key, column_lanes);
  const uint64_t first = reduce_block(best.rank(), Smaller(), shared);
  const uint64_t first_original = adjusts ? reduce_block(original.rank(), Smaller(), shared) : first;
  if (threadIdx.x == 0) scratch.best[blockIdx.x] = first, scratch.original_best[blockIdx.x] = first_original;
  if (!is_last_to_arrive(&scratch.arrivals[0], shared)) return;

  const int slices = gridDim.x;
  const bool mine = threadIdx.x < slices;
  const uint64_t top = reduce_block(mine ? __ldcg(&scratch.best[threadIdx.x]) : ~(uint64_t)0, Smaller(), shared);
  const uint64_t original_top =
      adjusts ? reduce_block(mine ? __ldcg(&scratch.original_best[threadIdx.x]) : ~(uint64_t)0, Smaller(), shared) : top;
  const uint32_t key = top >> 32, original_key = original_top >> 32;
  int reason = FINE;
  if (min(key, original_key) <= KEY_OF_INFINITY) reason = NOT_FINITE;
  else if (max(key, original_key) == KEY_OF_MINUS_INFINITY) reason = NOTHING_LEFT;
  const float peak = logit_of(key), original_peak = logit_of(original_key);
  if (threadIdx.x == 0) {
    status[b] = reason;
    token_ids[b] = 0;
    scratch.peak = peak;
    scratch.original_peak = original_peak;
    if (!reason && params.is_greedy()) {
      const int id = (int)(uint32_t)top;
      token_ids[b] = id;
      accept_token(id, params, sequence, vocabulary, positions, counts);
    }
  }
  if (reason) return;
  const int num_columns = slices * THREADS / column_lanes;
#pragma unroll 1
  for (int of_original = 0; of_original < 2; ++of_original) {
    if (!(of_original ? wants_list : wants_bound)) continue;
    const Source columns{of_original ? scratch.original_columns : scratch.columns, nullptr, num_columns};
    const ColumnProbe probe{of_original ? original_peak : peak, of_original ? LOGPROB_TEMPERATURE : params.temperature};
    const int rank = of_original        ? params.num_logprobs
                     : params.top_k > 0 ? min(params.top_k, RANK_OF_BOUND)
                                        : RANK_OF_BOUND;
    const Answer answer = find_limit(columns, probe, {false, false, true, GAP_KEYS, (uint64_t)rank, 0, 0.0}, shared);
    const uint32_t bound = answer.found ? answer.limit + answer.tied : NO_KEY;
    if (threadIdx.x == 0) (of_original ? scratch.logprob_bound : scratch.gap_bound) = bound;
  }
  let_next_kernel_start();
}
EXPORT(largest_logits)
