// The third of sampling's kernels: the drawn token's log-probability and rank, and the most likely tokens with theirs.
//
// All are of the model's own logits: log p = logit - largest - log(sum of weights at temperature 1), in float64 at the end.
// Ranks count from 1, by logit from the largest down, equal ones by id. Tokens of logit -infinity are left out of the list.
//
// Grid (slices, rows), like draw_tokens: each block weighs its slice, counts what comes before the drawn token, and lists what
// lies above the bound that logits_adjust.cu found; the row's last block ranks the list, where each token counts those before
// it. A list that overflows (thousands of equal logits) is made anew from the row, by a search for the last that belongs in it.
//
// Only rows with num_logprobs >= 0 and status FINE are written: values, ranks [B]; top_ids, top_values [B, width], of which
// num_logprobs are written, -1 and -infinity past the end of a short list.
#include "sampling.cuh"

// Where the row's n-th most likely token is.
struct RankProbe {
  uint32_t logit = NO_KEY;  // once it is known: of its ties, which id

  DEVICE uint32_t key_of(float x, int id, uint32_t&) const {
    const uint32_t key = logit_key(x);
    if (key >= KEY_OF_MINUS_INFINITY) return NO_KEY;
    return logit == NO_KEY ? key : key == logit ? id : NO_KEY;
  }
};

// The `count` most likely of a row, in any order, into the list.
DEVICE int list_from_row(const float* row, int vocabulary, int count, float* logits, int32_t* ids, Workspace& shared) {
  const Source source{row, nullptr, vocabulary};
  RankProbe probe;
  uint32_t last_key = KEY_OF_MINUS_INFINITY, last_id = 0;
  uint64_t left = count;
#pragma unroll 1
  for (bool by_id = false;; by_id = true) {
    const uint32_t num_keys = by_id ? vocabulary : KEY_OF_MINUS_INFINITY;
    const Answer answer = find_limit(source, probe, {false, false, false, num_keys, left, 0, 0.0}, shared);
    if (!answer.found) break;
    (by_id ? last_id : last_key) = answer.limit;
    if (!answer.tied) break;
    probe.logit = last_key;
    left -= answer.before;
  }
  __syncthreads();
  if (threadIdx.x == 0) shared.num_listed = 0;
  __syncthreads();
  visit_row(row, 0, vocabulary, [&](float x, int id) {
    const uint32_t key = logit_key(x);
    if (key < last_key || (key == last_key && id < last_id)) put_in_list(shared, logits, ids, x, id);
  });
  __syncthreads();
  return shared.num_listed;
}

KERNEL __launch_bounds__(THREADS, 2)
token_logprobs(const float* logits, const int32_t* rows, const Params* table, Scratch* scratches, const int64_t* token_ids,
               const int32_t* status, float* values, int32_t* ranks, int32_t* top_ids, float* top_values, int vocabulary,
               int slice, int width) {
  __shared__ Workspace shared;
  __shared__ float listed_logits[MAX_LISTED];
  __shared__ int32_t listed_ids[MAX_LISTED];
  wait_for_previous_kernel();
  const int b = blockIdx.y, sequence = rows[b];
  if (sequence < 0 || status[b]) return;
  const int wanted = table[sequence].num_logprobs;
  if (wanted < 0) return;
  Scratch& scratch = scratches[b];
  const float* row = logits + (int64_t)b * vocabulary;
  const int begin = blockIdx.x * slice, end = min(begin + slice, vocabulary), token = (int)token_ids[b];
  const float peak = scratch.original_peak, token_logit = row[token];
  const uint64_t place = ranked(token_logit, token);
  const uint32_t bound = wanted ? scratch.logprob_bound : 0;

  if (threadIdx.x == 0) shared.num_listed = 0;
  __syncthreads();
  uint64_t total = 0, before = 0;
  bool has_room = wanted > 0;
  visit_row(row, begin, end, [&](float logit, int id) {
    const uint32_t gap = gap_key(logit, peak, 1.0f);
    if (gap < GAP_KEYS) total += weight_of(gap);
    before += ranked(logit, id) < place;
    if (has_room && logit > NEGATIVE_INFINITY && gap_key(logit, peak, LOGPROB_TEMPERATURE) < bound)
      has_room = put_in_list(shared, listed_logits, listed_ids, logit, id);
  });
  total = reduce_block(total, Sum(), shared);
  before = reduce_block(before, Sum(), shared);
  if (threadIdx.x == 0) scratch.totals[blockIdx.x] = total, scratch.ranks[blockIdx.x] = (uint32_t)before;
  if (wanted) publish_list(shared, listed_logits, listed_ids, scratch);
  if (!is_last_to_arrive(&scratch.arrivals[2], shared)) return;
  let_next_kernel_start();

  const bool mine = threadIdx.x < gridDim.x;
  total = reduce_block(mine ? __ldcg(&scratch.totals[threadIdx.x]) : 0, Sum(), shared);
  before = reduce_block(mine ? __ldcg(&scratch.ranks[threadIdx.x]) : 0, Sum(), shared);
  const double log_total = log((double)total / WEIGHT_ONE);
  if (threadIdx.x == 0) {
    values[b] = (float)((double)token_logit - peak - log_total);
    ranks[b] = (int)before + 1;
  }
  if (!wanted) return;
  int count = take_list(scratch, listed_logits, listed_ids);
  if (count > MAX_LISTED) count = list_from_row(row, vocabulary, wanted, listed_logits, listed_ids, shared);
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const uint64_t own = ranked(listed_logits[i], listed_ids[i]);
    int rank = 0;
    for (int j = 0; j < count; ++j) rank += ranked(listed_logits[j], listed_ids[j]) < own;
    if (rank >= wanted) continue;
    top_ids[(int64_t)b * width + rank] = listed_ids[i];
    top_values[(int64_t)b * width + rank] = (float)((double)listed_logits[i] - peak - log_total);
  }
  if (threadIdx.x >= count && threadIdx.x < wanted) {
    top_ids[(int64_t)b * width + threadIdx.x] = -1;
    top_values[(int64_t)b * width + threadIdx.x] = NEGATIVE_INFINITY;
  }
}
EXPORT(token_logprobs)
