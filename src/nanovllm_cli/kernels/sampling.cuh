// What the kernels of sampling share: a sequence's parameters, scratch, the order of tokens, and a search for where a sum ends.
//
// The meaning is cpu_sampling.py's and engine/sampler.py's. Weights are integers, floor(2^40 * exp(-gap)) with
// gap = (largest logit - logit) / temperature, so sums do not depend on how a row is divided among blocks and threads.
// Likely tokens come first: every key below is smaller for what is more likely. A token further than MAX_GAP from the
// largest weighs nothing: it is never drawn and never counted.
#pragma once
#include "common.cuh"

constexpr int THREADS = 512, WARPS = THREADS / WARP_SIZE;
constexpr int MAX_SLICES = 128;    // blocks of a row
constexpr int MAX_COLUMNS = 2048;  // groups of a row's logits whose largest is known
constexpr int MAX_LISTED = 2048;   // tokens of a row that are looked at by themselves
constexpr int AHEAD = VECTOR == 1 ? 4 : 2;  // loads of a thread under way
constexpr float MAX_GAP = 28.0f, WEIGHT_ONE = 1099511627776.0f;
constexpr uint32_t GAP_KEYS = 0x41e00001u;  // one more than the bits of MAX_GAP
constexpr float LOGPROB_TEMPERATURE = 8.0f;  // so that MAX_GAP holds what may be in a list of the most likely
constexpr uint32_t NO_KEY = 0xffffffffu;
constexpr uint32_t KEY_OF_MINUS_INFINITY = 0xff800000u, KEY_OF_INFINITY = 0x007fffffu;
constexpr int FINE = 0, NOT_FINITE = 1, NOTHING_LEFT = 2;

// One sequence's parameters; sampling_table.py has the same fields.
struct Params {
  uint64_t seed;
  double top_p;         // 1: off
  double min_p_margin;  // temperature * log(min_p); -infinity: off
  float temperature;    // 0: the largest logit wins
  float repetition, presence, frequency;
  int32_t top_k;  // 0: off
  int32_t uses_mask, uses_counts;
  int32_t num_biases, num_stops;
  int32_t min_tokens;
  int32_t num_logprobs;  // -1: none
  int32_t unused;

  DEVICE bool is_greedy() const { return temperature == 0.0f; }
  DEVICE bool has_filters() const { return top_k > 0 || top_p < 1.0; }
  DEVICE bool adjusts(int64_t position) const {
    return uses_mask || uses_counts || num_biases || (num_stops && position < min_tokens);
  }
};
static_assert(sizeof(Params) == PARAMS_BYTES, "sampling_table.py disagrees");

// One row's scratch. The counters are zero between two steps; whoever finishes with one leaves it so.
struct Scratch {
  uint64_t best[MAX_SLICES];           // smallest ranked() of each slice's logits, as they are drawn from
  uint64_t original_best[MAX_SLICES];  // and as the model gave them
  uint64_t totals[MAX_SLICES];         // weight of each slice
  uint32_t ranks[MAX_SLICES];          // tokens of each slice that come before the drawn one
  float columns[MAX_COLUMNS], original_columns[MAX_COLUMNS];
  float listed_logits[MAX_LISTED];
  int32_t listed_ids[MAX_LISTED];
  float peak, original_peak;
  uint32_t gap_bound, logprob_bound;  // what has a smaller gap_key is listed
  uint32_t num_listed;
  uint32_t arrivals[3];
};
static_assert(sizeof(Scratch) == SCRATCH_BYTES, "sampling_table.py disagrees");

// ---- the order of tokens ----

// 0 for NaN; then from infinity down. Equal logits have equal keys, also 0 and -0.
DEVICE uint32_t logit_key(float logit) {
  if (logit != logit) return 0;
  const uint32_t bits = logit == 0.0f ? 0 : __float_as_uint(logit);
  return bits >> 31 ? bits : ~bits & 0x7fffffffu;
}

DEVICE float logit_of(uint32_t key) { return __uint_as_float(key >> 31 ? key : ~key & 0x7fffffffu); }

DEVICE uint64_t ranked(float logit, int id) { return (uint64_t)logit_key(logit) << 32 | (uint32_t)id; }

// The bits of a number that is not negative grow with it.
DEVICE uint32_t gap_key(float logit, float peak, float temperature) {
  return __float_as_uint(fabsf(__fdiv_rn(logit - peak, temperature)));
}

DEVICE uint64_t weight_of(uint32_t gap) { return (uint64_t)(expf(-__uint_as_float(gap)) * WEIGHT_ONE); }

// A place in the order by gap, then logit, then id. What comes before it is kept.
struct Cut {
  uint32_t gap = NO_KEY, logit = 0;
  uint32_t id = 0;

  DEVICE bool keeps(uint32_t other_gap, uint32_t other_logit, uint32_t other_id) const {
    if (other_gap != gap) return other_gap < gap;
    if (other_logit != logit) return other_logit < logit;
    return other_id < id;
  }
};

// The token is out: the next one's position, and what penalties count.
DEVICE void accept_token(int id, const Params& params, int sequence, int vocabulary, int64_t* positions, uint16_t* counts) {
  positions[sequence] += 1;
  uint16_t& count = counts[(int64_t)sequence * vocabulary + id];
  if (params.uses_counts && count < 0xffff) ++count;
}

// ---- blocks ----

constexpr int BUCKETS = 256;

// Of each bucket: how many, and the sum of their weights, its lower word and its upper one. Shared memory has no 64-bit add.
struct Histogram {
  uint32_t counts[BUCKETS], words[2][BUCKETS];
};

// Whoever takes the lower word past its end carries: sums are the same in whatever order they come about.
DEVICE void add_weight(Histogram& histogram, int bucket, uint64_t weight) {
  const uint32_t low = (uint32_t)weight, sum = low + atomicAdd(&histogram.words[0][bucket], low);
  const uint32_t high = (uint32_t)(weight >> 32) + (sum < low);
  if (high) atomicAdd(&histogram.words[1][bucket], high);
}

// Where a sum over tokens in order of their keys reaches a target. The keys, below `num_keys`, are what `key_of` gives for
// each token, NO_KEY for one that does not take part. is_weighted: the sum is of weights, by `weight_of(gap)`, else a count.
//
// The target: `target` itself; or, where that is 0, of the sum over all of them (or `total` where not 0) either the part
// `share`, rounded up, at least 1; or, for is_draw, one more than `share` of it, rounded down.
struct Question {
  bool is_weighted, is_draw, is_linear;
  uint32_t num_keys;
  uint64_t target, total;
  double share;
};

struct Bucket {
  int index;  // -1: all of them together fall short
  uint32_t count;
  uint64_t before, sum, target;
};

struct Workspace {
  Question question;
  uint64_t parts[WARPS];
  Histogram histogram;
  Bucket bucket;
  uint64_t total, before;
  double uniform;
  int chosen, token;
  int num_listed;
  bool is_last;
};

struct Smaller {
  DEVICE uint64_t operator()(uint64_t a, uint64_t b) const { return a < b ? a : b; }
};

struct Sum {
  DEVICE uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};

template <class Combine>
DEVICE uint64_t reduce_warp(uint64_t value, Combine combine) {
  for (int bits = WARP_SIZE / 2; bits; bits >>= 1) value = combine(value, __shfl_xor_sync(ALL_LANES, value, bits));
  return value;
}

// Over the block; every thread gets it. Begins with a barrier.
template <class Combine>
DEVICE uint64_t reduce_block(uint64_t value, Combine combine, Workspace& shared) {
  value = reduce_warp(value, combine);
  __syncthreads();
  if (threadIdx.x % WARP_SIZE == 0) shared.parts[threadIdx.x / WARP_SIZE] = value;
  __syncthreads();
  uint64_t all = shared.parts[0];
  for (int warp = 1; warp < WARPS; ++warp) all = combine(all, shared.parts[warp]);
  return all;
}

// True in the block of a row that comes here last, which then sees what the others wrote. The counter is zero again after it.
DEVICE bool is_last_to_arrive(uint32_t* counter, Workspace& shared) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) shared.is_last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  __threadfence();
  return shared.is_last;
}

// Calls visit(logit, id) for ids begin .. end - 1 of a row, each from one thread, whose ids ascend. Multiples of VECTOR.
template <class Visit>
DEVICE void visit_row(const float* row, int begin, int end, Visit visit) {
  typedef Vector<float, VECTOR> Logits;
  constexpr int STRIDE = THREADS * VECTOR;
#ifdef BUG_TAIL
  end = begin + (end - begin + STRIDE - 1) / STRIDE * STRIDE;
#endif
  for (int first = begin + threadIdx.x * VECTOR; first < end; first += AHEAD * STRIDE) {
    Logits logits[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (first + i * STRIDE < end) logits[i] = Logits::load(row + first + i * STRIDE);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (first + i * STRIDE < end)
        for (int j = 0; j < VECTOR; ++j) visit(logits[i].at[j], first + i * STRIDE + j);
  }
}

// A row, or some of its tokens in any order.
struct Source {
  const float* logits;
  const int32_t* ids;  // null: a row, whose ids are 0, 1, ...
  int count;
};

template <class Visit>
DEVICE void visit_all(const Source& source, Visit visit) {
  if (!source.ids) return visit_row(source.logits, 0, source.count, visit);
  for (int i = threadIdx.x; i < source.count; i += THREADS) visit(source.logits[i], source.ids[i]);
}

// Room in the list for one more; false where it is full. num_listed goes on counting.
DEVICE bool put_in_list(Workspace& shared, float* logits, int32_t* ids, float logit, int id) {
  const int place = atomicAdd(&shared.num_listed, 1);
  if (place >= MAX_LISTED) return false;
  logits[place] = logit;
  ids[place] = id;
  return true;
}

// Appends the block's list to its row's. All threads call it; it begins with a barrier.
DEVICE void publish_list(Workspace& shared, const float* logits, const int32_t* ids, Scratch& scratch) {
  __syncthreads();
  const int count = shared.num_listed;
  if (!count) return;
  if (threadIdx.x == 0) shared.token = (int)atomicAdd(&scratch.num_listed, (uint32_t)count);
  __syncthreads();
  const int first = shared.token, room = min(count, MAX_LISTED - first);
  for (int i = threadIdx.x; i < room; i += THREADS) {
    scratch.listed_logits[first + i] = logits[i];
    scratch.listed_ids[first + i] = ids[i];
  }
}

// Copies the row's list to shared memory and empties it. Returns its length, more than MAX_LISTED where it overflowed.
DEVICE int take_list(Scratch& scratch, float* logits, int32_t* ids) {
  const int count = (int)__ldcg(&scratch.num_listed);
  for (int i = threadIdx.x; i < min(count, MAX_LISTED); i += THREADS) {
    logits[i] = __ldcg(&scratch.listed_logits[i]);
    ids[i] = __ldcg(&scratch.listed_ids[i]);
  }
  __syncthreads();
  if (threadIdx.x == 0) scratch.num_listed = 0;
  return count;
}

// ---- the search ----

struct Answer {
  bool found;
  bool tied;        // limit is the key of several tokens, of which some are kept
  uint32_t limit;   // what has a smaller key is kept
  uint64_t before;  // sum over that
};

DEVICE uint64_t sum_of(const Histogram& histogram, int bucket, bool is_weighted) {
  if (!is_weighted) return histogram.counts[bucket];
  return (uint64_t)histogram.words[1][bucket] << 32 | histogram.words[0][bucket];
}

// By one warp: the bucket in which a sum that is `before` ahead of bucket 0 reaches the target.
DEVICE void find_bucket(uint64_t before, uint64_t target, Workspace& shared) {
  const Question& question = shared.question;
  constexpr int EACH = BUCKETS / WARP_SIZE;
  const int lane = threadIdx.x % WARP_SIZE, first = lane * EACH;
  uint64_t mine = 0;
#pragma unroll 1
  for (int i = 0; i < EACH; ++i) mine += sum_of(shared.histogram, first + i, question.is_weighted);
  uint64_t upto = mine;
  for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
    const uint64_t other = __shfl_up_sync(ALL_LANES, upto, distance);
    if (lane >= distance) upto += other;
  }
  if (!target) {
    uint64_t all = __shfl_sync(ALL_LANES, upto, WARP_SIZE - 1);
    if (question.total) all = question.total;
    const double part = question.share * (double)all;
    target = question.is_draw ? (uint64_t)part + 1 : min(max((uint64_t)ceil(part), (uint64_t)1), all);
  }
  if (lane == WARP_SIZE - 1 && before + upto < target) shared.bucket.index = -1;
  before += upto - mine;
  if (before >= target || before + mine < target) return;
  for (int i = first;; ++i) {
    const uint64_t sum = sum_of(shared.histogram, i, question.is_weighted);
    if (before + sum >= target) {
      shared.bucket = {i, shared.histogram.counts[i], before, sum, target};
      return;
    }
    before += sum;
  }
}

// Eight bits of the key at a time, and no more of them than it takes. key_of(logit, id, gap) also tells the gap. A kernel
// calls it in one place, since it is inlined: what is asked differs in the arguments only.
template <class Probe>
DEVICE Answer find_limit(const Source& source, const Probe& probe, const Question& question, Workspace& shared) {
  uint32_t low = 0, size = question.num_keys;
  uint64_t before = 0, target = question.target;
  bool linear = question.is_linear;
  uint32_t* const words = shared.histogram.counts;
  const bool is_weighted = question.is_weighted, is_draw = question.is_draw;
  __syncthreads();
  if (threadIdx.x == 0) shared.question = question;  // not in registers, of which the visit needs many
  for (;;) {
    const int shift = max(0, 24 - __clz((int)(size - 1)));
    __syncthreads();
    for (int i = threadIdx.x; i < (int)(sizeof(Histogram) / sizeof(uint32_t)); i += THREADS) words[i] = 0;
#ifndef BUG_SEARCH_WITHOUT_BARRIER
    __syncthreads();
#endif
    visit_all(source, [&](float logit, int id) {
      uint32_t gap;
      const uint32_t key = probe.key_of(logit, id, gap);
      if (key == NO_KEY || key - low >= size) return;
      const int bucket = linear ? (int)(__uint_as_float(key) * 8.0f) : (int)((key - low) >> shift);
      atomicAdd(&shared.histogram.counts[bucket], 1u);
      if (is_weighted) add_weight(shared.histogram, bucket, weight_of(gap));
    });
    __syncthreads();
    if (threadIdx.x < WARP_SIZE) find_bucket(before, target, shared);
    __syncthreads();
    const Bucket bucket = shared.bucket;
    if (bucket.index < 0) return {false, false, 0, 0};
    if (linear) {
      low = __float_as_uint(bucket.index / 8.0f);
      size = min(GAP_KEYS, __float_as_uint((bucket.index + 1) / 8.0f)) - low;
    } else {
      low += (uint32_t)bucket.index << shift;
      size = min(1u << shift, size - ((uint32_t)bucket.index << shift));
    }
    linear = false;
    before = bucket.before;
    target = bucket.target;
    const bool is_whole = bucket.count == 1 || before + bucket.sum == target;
    if (is_whole && (!is_draw || size == 1)) return {true, false, low + size, before + bucket.sum};
    if (size == 1) return {true, true, low, before};
  }
}
