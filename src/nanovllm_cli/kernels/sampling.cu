// The second of sampling's kernels: draws a token for each row that is not greedy. It follows logits_adjust.cu.
//
// Tokens are ranked by logit from the largest down, equal ones by id. Kept are, in this order: by min_p what reaches a floor;
// by top_k the first so many; by top_p the fewest of those that hold a share of their weight. Then Philox gives a number in
// [0, 1), and the token drawn is the first, in order of ids, at which the running sum of kept weights passes that share of
// their total.
//
// Grid (slices, rows). Each block weighs its slice and lists what lies above the bound that logits_adjust.cu found; the row's
// last block finishes. Without top_k and top_p it descends into the slice that the number falls into. With them it looks for
// the cuts in the list, some 500 to 700 tokens in shared memory; a cut that lies below the list (a flat distribution and a
// large top_p, or thousands of equal logits) is looked for in the whole row by the same search, at some 20 us a pass.
//
// A cut is found by a search over the keys' bits with sums of each bucket: the first pass in eighths of a gap, the next ones by
// 8 bits, until a bucket is kept whole or holds one token. Ties go on by logit (top_k only: different logits may have equal
// gaps, since a division rounds) and by id. logits_adjust.cu has the arguments' shapes.
#include "sampling.cuh"

enum Step { TOP_K_GAPS, TOP_K_LOGITS, TOP_K_IDS, TOP_P_GAPS, TOP_P_IDS, DRAW };

// What is asked about each token, in the step that the finish has come to.
struct FilterProbe {
  float peak, temperature, floor;
  Step step = TOP_K_GAPS;
  Cut top_k, top_p;

  DEVICE bool keeps(float logit, int id, uint32_t gap) const {
    return top_k.keeps(gap, logit_key(logit), id) && top_p.keeps(gap, 0, id);
  }
  DEVICE bool is_in(float logit, uint32_t& gap) const {
    gap = gap_key(logit, peak, temperature);
    return logit >= floor && gap < GAP_KEYS;
  }
  DEVICE uint32_t key_of(float logit, int id, uint32_t& gap) const {
    if (!is_in(logit, gap)) return NO_KEY;
    const uint32_t key = logit_key(logit);
    if (step == TOP_K_GAPS) return gap;
    if (step == TOP_K_LOGITS) return gap == top_k.gap ? key : NO_KEY;
    if (step == TOP_K_IDS) return gap == top_k.gap && key == top_k.logit ? id : NO_KEY;
    if (!top_k.keeps(gap, key, id)) return NO_KEY;
    if (step == TOP_P_GAPS) return gap;
    if (step == TOP_P_IDS) return gap == top_p.gap ? id : NO_KEY;
    return top_p.keeps(gap, 0, id) ? id : NO_KEY;
  }
};

// Philox4x32-10 (Salmon et al. 2011) as in engine/sampling_random.py, purpose 0: 53 bits in [0, 1).
DEVICE double philox_uniform(uint64_t seed, uint64_t position) {
  uint32_t a = (uint32_t)position, b = (uint32_t)(position >> 32), c = 0, d = 0;
  uint32_t key_low = (uint32_t)seed, key_high = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = (uint64_t)0xD2511F53u * a, second = (uint64_t)0xCD9E8D57u * c;
    a = (uint32_t)(second >> 32) ^ b ^ key_low;
    c = (uint32_t)(first >> 32) ^ d ^ key_high;
    b = (uint32_t)second;
    d = (uint32_t)first;
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return (double)(((uint64_t)a << 32 | b) >> 11) * 0x1p-53;
}

DEVICE uint64_t kept_weight(const FilterProbe& probe, float logit, int id) {
  uint32_t gap;
  return probe.is_in(logit, gap) && probe.keeps(logit, id, gap) ? weight_of(gap) : 0;
}

// Which thread's weight the running sum over the block passes `aim` in, which is counted from there on afterwards. An aim of
// NO_AIM stands for the share shared.uniform of the block's sum. Begins with a barrier.
constexpr uint64_t NO_AIM = ~(uint64_t)0;

DEVICE int choose(uint64_t mine, uint64_t& aim, Workspace& shared) {
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  uint64_t upto = mine;
  for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
    const uint64_t other = __shfl_up_sync(ALL_LANES, upto, distance);
    if (lane >= distance) upto += other;
  }
  __syncthreads();
  if (lane == WARP_SIZE - 1) shared.parts[warp] = upto;
  __syncthreads();
  uint64_t before = upto - mine, total = 0;
  for (int i = 0; i < WARPS; ++i) {
    if (i == warp) before += total;
    total += shared.parts[i];
  }
  if (aim == NO_AIM) aim = (uint64_t)(shared.uniform * (double)total);
  if (before <= aim && aim - before < mine) shared.chosen = threadIdx.x, shared.before = before;
  __syncthreads();
  aim -= shared.before;
  return shared.chosen;
}

// The first id, of begin .. end - 1, at which the running sum of kept weights passes `aim`. Every warp adds up a part, and the
// part that the aim falls into is divided again.
DEVICE int draw_in_order(const float* row, int begin, int end, const FilterProbe& probe, uint64_t aim,
                         Workspace& shared) {
  typedef Vector<float, VECTOR> Logits;
  constexpr int STEP = WARP_SIZE * VECTOR;
  for (;;) {
    const int part = (end - begin + WARPS * STEP - 1) / (WARPS * STEP) * STEP;
    const int first = begin + threadIdx.x / WARP_SIZE * part, last = min(first + part, end);
    const int lane_first = first + threadIdx.x % WARP_SIZE * VECTOR;
    uint64_t mine = 0;
#pragma unroll 2
    for (int id = lane_first; id < last; id += STEP) {
      const Logits logits = Logits::load(row + id);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) mine += kept_weight(probe, logits.at[i], id + i);
    }
    if (part == STEP) {
      if (threadIdx.x == choose(mine, aim, shared)) {
        int id = lane_first;
        for (uint64_t weight; aim >= (weight = kept_weight(probe, row[id], id)); ++id) aim -= weight;
        shared.token = id;
      }
      __syncthreads();
      return shared.token;
    }
    mine = reduce_warp(mine, Sum());
    const int warp = choose(threadIdx.x % WARP_SIZE ? 0 : mine, aim, shared) / WARP_SIZE;
    begin += warp * part;
    end = min(begin + part, end);
  }
}

// What finish() returns in place of a token: a cut lies below the source; the cuts are known, and the row is to be drawn from.
constexpr int UNDECIDED = -1, FROM_ROW = -2;

// Finds the cuts of top_k and top_p in the source, and in a list the token. is_whole: nothing that could be drawn lies outside
// the source. shared.total: weight of all that reaches the floor.
DEVICE int finish(const Source& source, bool is_whole, FilterProbe& probe, const Params& params, int vocabulary,
                  Workspace& shared) {
  const Step after_top_k = params.top_p < 1.0 ? TOP_P_GAPS : DRAW;
  probe.top_k = probe.top_p = Cut();
  probe.step = params.top_k > 0 ? TOP_K_GAPS : after_top_k;
  uint64_t left = params.top_k;  // tokens that are still to be kept
  for (;;) {
    const Step step = probe.step;
    if (step == DRAW && !source.ids) return FROM_ROW;
    const bool is_by_gap = step == TOP_K_GAPS || step == TOP_P_GAPS, is_weighted = step == TOP_P_GAPS || step == DRAW;
    const uint32_t num_keys = is_by_gap ? GAP_KEYS : step == TOP_K_LOGITS ? KEY_OF_MINUS_INFINITY : vocabulary;
    Question question{is_weighted, step == DRAW, is_by_gap, num_keys, is_weighted ? 0 : left, 0, params.top_p};
    if (step == DRAW) question.share = shared.uniform;
    if (step == TOP_P_GAPS && params.top_k == 0) question.total = shared.total;
    const Answer answer = find_limit(source, probe, question, shared);
    if (!answer.found && !(step == TOP_K_GAPS && is_whole)) return UNDECIDED;
    if (step == DRAW) return (int)answer.limit - 1;
    if (step == TOP_K_GAPS && answer.found) probe.top_k.gap = answer.limit;
    if (step == TOP_K_LOGITS) probe.top_k.logit = answer.limit;
    if (step == TOP_K_IDS) probe.top_k.id = answer.limit;
    if (step == TOP_P_GAPS) probe.top_p.gap = answer.limit;
    if (step == TOP_P_IDS) probe.top_p.id = answer.limit;
    if (!answer.tied) {
      probe.step = step < TOP_P_GAPS ? after_top_k : DRAW;
      continue;
    }
    probe.step = (Step)(step + 1);
    left -= answer.before;
    if (step == TOP_P_GAPS) {  // equal gaps weigh the same
      const uint64_t weight = weight_of(answer.limit);
      left = (shared.bucket.target - answer.before + weight - 1) / weight;
    }
  }
}

KERNEL __launch_bounds__(THREADS, 2)
draw_tokens(const float* logits, const float* adjusted, const int32_t* rows, const Params* table, int64_t* positions,
            uint16_t* counts, Scratch* scratches, int64_t* token_ids, const int32_t* status, int vocabulary, int slice) {
  __shared__ Workspace shared;
  __shared__ float listed_logits[MAX_LISTED];
  __shared__ int32_t listed_ids[MAX_LISTED];
  wait_for_previous_kernel();
  const int b = blockIdx.y, sequence = rows[b];
  if (sequence < 0 || status[b]) return;
  const Params& params = table[sequence];
  if (params.is_greedy()) return;
  Scratch& scratch = scratches[b];
  const float* row = (params.adjusts(positions[sequence]) ? adjusted : logits) + (int64_t)b * vocabulary;
  const int begin = blockIdx.x * slice, end = min(begin + slice, vocabulary);
  FilterProbe probe;
  probe.peak = scratch.peak;
  probe.temperature = params.temperature;
  probe.floor = (float)((double)probe.peak + params.min_p_margin);
  const bool is_listed = params.has_filters();
  const uint32_t bound = is_listed ? scratch.gap_bound : 0;

  if (threadIdx.x == 0) shared.num_listed = 0;
  __syncthreads();
  uint64_t total = 0;
  bool has_room = is_listed;
  visit_row(row, begin, end, [&](float logit, int id) {
    uint32_t gap;
    if (!probe.is_in(logit, gap)) return;
    total += weight_of(gap);
    if (has_room && gap < bound) has_room = put_in_list(shared, listed_logits, listed_ids, logit, id);
  });
  total = reduce_block(total, Sum(), shared);
  if (threadIdx.x == 0) scratch.totals[blockIdx.x] = total;
  if (is_listed) publish_list(shared, listed_logits, listed_ids, scratch);
  if (!is_last_to_arrive(&scratch.arrivals[1], shared)) return;
  let_next_kernel_start();

  const int slices = gridDim.x;
  const uint64_t part = threadIdx.x < slices ? __ldcg(&scratch.totals[threadIdx.x]) : 0;
  total = reduce_block(part, Sum(), shared);
  if (threadIdx.x == 0) shared.total = total, shared.uniform = philox_uniform(params.seed, positions[sequence]);
  __syncthreads();
  int token = FROM_ROW, first = 0, last = vocabulary;
  uint64_t aim = NO_AIM;
  if (is_listed) {
    const int count = take_list(scratch, listed_logits, listed_ids);
    const bool is_list_whole = bound >= GAP_KEYS || gap_key(probe.floor, probe.peak, probe.temperature) < bound;
#pragma unroll 1
    for (int whole_row = count > MAX_LISTED; whole_row < 2; ++whole_row) {
      const Source source = whole_row ? Source{row, nullptr, vocabulary} : Source{listed_logits, listed_ids, count};
      token = finish(source, whole_row || is_list_whole, probe, params, vocabulary, shared);
      if (token != UNDECIDED) break;
    }
  } else {
    first = choose(part, aim, shared) * slice;
    last = min(first + slice, vocabulary);
  }
  if (token == FROM_ROW) token = draw_in_order(row, first, last, probe, aim, shared);
  if (threadIdx.x == 0) {
    token_ids[b] = token;
    accept_token(token, params, sequence, vocabulary, positions, counts);
  }
}
EXPORT(draw_tokens)
