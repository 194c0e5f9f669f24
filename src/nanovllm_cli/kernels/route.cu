// Which experts each token takes, what they weigh, and the work that comes of it, as tasks that kernels for a few rows read.
//
//   logits [tokens, experts] fp32. Of each token the `taken` largest: the lower number first among equals, 0 equal to -0, NaN
//   above all numbers, into chosen [tokens, taken] int32 in ascending order: scratch, or null where it fits shared memory
//   weights [tokens, taken] fp32: softmax of all the token's logits, or, where `normalises`, of the chosen ones alone. NaN among
//   what a softmax is of makes all its weights NaN.
//   SCORED: scores, a sigmoid of each logit or a softmax of all; the taken have the largest score + bias [experts] fp32, null for
//   zeros, or, SCORED being 2, logit + bias; weights are scores, where `normalises` over the sum of the chosen ones, times scale and expert_scale [experts] fp32,
//   null for ones.
//   SPARSE, without SCORED: of each in the order they are taken, the softmax's share among logits that are not taken yet and near;
//   see mixture.shares_among_near.
//   GROUPED, with SCORED: of num_groups (at most 32, of as many experts each) only groups_taken are looked at: where the sum of
//   the group_best (1 or 2) largest score + bias is the largest, the lower group first among equals.
//   tasks [num_tasks] Task: up to ROWS pairs of one expert with what `matrices` [experts, 8] int64 has of it, experts ascending
//   and pairs ascending; a task's unused places repeat its last pair. Those behind the last one are zeros.
//   A pair is a token and a place among its experts, with the number token * taken + place. slots [tokens] int64, or null: a token
//   below 0 is padding and has none, and what its weights are is nobody's.
//
// One block. A warp takes a stretch of tokens, one after another; a lane has VALUES neighbouring experts, so that the lowest lane
// with the largest key has the lowest number. Each warp counts how often its tokens take each expert, where only the lane that
// has the expert counts. Then a thread takes an expert: summed over the warps, the counts say which of the expert's pairs is each
// warp's first, and summed over the experts, which task is each expert's first. So each warp can go through its tokens again and
// put every pair where it belongs, without atomics: the experts of a token are different ones.
#include "experts.cuh"

constexpr int ROOM = WARP_SIZE * VALUES;          // for experts
constexpr int WARPS = VALUES > (GROUPED || SPARSE || SCORED == 2 ? 4 : 8) ? 16 : 32;  // at most: counts fill shared memory; groups and shares, registers
constexpr int VECTOR = VALUES < 4 ? VALUES : 4;   // logits of a load, where rows are multiples of it
constexpr int ROWS = TASK_ROWS, ADDRESSES = 2 * MATRIX_WORDS, TASK_BYTES = 8 * TASK_WORDS;
constexpr int ENDS = TASK_BYTES / 4 - 2 * ADDRESSES - 1 - ROWS;

struct alignas(16) Task {
  int64_t addresses[ADDRESSES];
  int32_t count, pairs[ROWS], zeros[ENDS];
};
static_assert(sizeof(Task) == TASK_BYTES, "experts.cuh disagrees");

// Grows with the logit; 0 is below all.
DEVICE uint32_t key_of(float logit) {
  uint32_t bits = __float_as_uint(logit);
#ifndef BUG_ZERO
  bits = bits == 0x80000000u ? 0 : bits;
#endif
  const uint32_t key = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0xffffffffu : key;
}

DEVICE float logit_of(uint32_t key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// A lane's part of one token.
struct Choice {
  uint32_t keys[VALUES];  // of the experts from `first` on; 0 past the last
  float scores[SCORED || SPARSE ? VALUES : 1];
  uint32_t bits = 0;      // those that are chosen
  uint32_t largest;       // key of all experts
  int first, experts;

  DEVICE Choice(const float* row, int first, int experts) : first(first), experts(experts) {
    if (experts % VECTOR == 0) {
      load<VECTOR>(row);
    } else {
      load<1>(row);
    }
  }

  template <int COUNT>
  DEVICE void load(const float* row) {
    typedef Vector<float, COUNT> Logits;
    Logits logits[VALUES / COUNT];
#pragma unroll
    for (int i = 0; i < VALUES; i += COUNT) logits[i / COUNT] = Logits::load(row + min(first + i, experts - COUNT));
#pragma unroll
    for (int i = 0; i < VALUES; ++i) keys[i] = is_there(i) ? key_of(logits[i / COUNT].at[i % COUNT]) : 0;
  }

  // Makes keys of scores out of keys of logits.
  DEVICE void rank(const float* bias, bool by_sigmoid) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) most = max(most, keys[i]);
    const float top = logit_of(warp_max(most));
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const float logit = logit_of(keys[i]);
      scores[i] = by_sigmoid ? 1.0f / (1.0f + expf(-logit)) : expf(logit - top);
      total += is_there(i) ? scores[i] : 0.0f;
    }
    total = by_sigmoid ? 1.0f : warp_sum(total);
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      scores[i] /= total;
      const float ranked = SCORED == 2 ? logit_of(keys[i]) : scores[i];
      keys[i] = is_there(i) ? key_of(ranked + (bias ? bias[first + i] : 0.0f)) : 0;
    }
  }

  // Of experts in groups that are not looked at no key is left. A lane keeps the sum of the group with its number.
  DEVICE void keep_groups(int num_groups, int groups_taken, int group_best, uint32_t lanes_below, int lane) {
    const int size = experts / num_groups;
    uint32_t own = 0;
#pragma unroll 1
    for (int group = 0; group < num_groups; ++group) {
      uint32_t best = 0, second = 0;
#pragma unroll
      for (int i = 0; i < VALUES; ++i) {
        const uint32_t key = is_there(i) && (first + i) / size == group ? keys[i] : 0;
        second = max(second, min(best, key));
        best = max(best, key);
      }
      const uint32_t most = warp_max(best);
      const uint32_t holders = __ballot_sync(ALL_LANES, best == most);
      const uint32_t next = warp_max(best == most && !(holders & lanes_below) ? second : best);
      const uint32_t sum = key_of(group_best == 2 ? logit_of(most) + logit_of(next) : logit_of(most));
      own = lane == group ? sum : own;
    }
    uint32_t looked_at = 0;
#pragma unroll 1
    for (int round = 0; round < groups_taken; ++round) {
      const uint32_t most = warp_max(looked_at >> lane & 1 ? 0 : own);
      const uint32_t holders = __ballot_sync(ALL_LANES, own == most && !(looked_at >> lane & 1));
      looked_at |= holders & -holders;
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
      if (is_there(i) && !(looked_at >> ((first + i) / size) & 1)) keys[i] = 0;
  }

  DEVICE bool is_there(int i) const { return first + i < experts; }
  DEVICE bool has(int i) const { return bits >> i & 1; }

  DEVICE void choose(int taken, uint32_t lanes_below, float nearness) {
#pragma unroll 1
    for (int round = 0; round < taken; ++round) {
      uint32_t best = 0;
#pragma unroll
      for (int i = 0; i < VALUES; ++i) best = max(best, has(i) ? 0 : keys[i]);
      const uint32_t most = warp_max(best);
      const uint32_t holders = __ballot_sync(ALL_LANES, best == most);
      if (round == 0) largest = most;
#if SPARSE
      const float top = logit_of(most);
      float near = 0.0f;
#pragma unroll
      for (int i = 0; i < VALUES; ++i) {
        const float logit = logit_of(keys[i]);
#ifdef BUG_MAGNITUDE
        const bool is_far = top - logit > nearness * fmaxf(logit, top);
#else
        const bool is_far = top - logit > nearness * fmaxf(fabsf(logit), top);
#endif
        near += is_there(i) && !has(i) && !is_far ? expf(logit - top) : 0.0f;
      }
      near = warp_sum(near);
#endif
#ifdef BUG_TIES
      if (best != most || holders & ~(lanes_below << 1 | 1)) continue;
#else
      if (best != most || holders & lanes_below) continue;
#endif
      uint32_t lowest = 0;
#pragma unroll
      for (int i = VALUES - 1; i >= 0; --i)
        if (keys[i] == most && !has(i)) lowest = 1u << i;
      bits |= lowest;
#if SPARSE
#pragma unroll
      for (int i = 0; i < VALUES; ++i)
        if (lowest >> i & 1) scores[i] = __fdividef(1.0f, near);
#endif
    }
  }
};

KERNEL __launch_bounds__(WARPS* WARP_SIZE, 1)
route(const float* logits, const int64_t* slots, const int64_t* matrices, int32_t* chosen, float* weights, Task* tasks, int tokens, int experts,
      int taken, int normalises, int num_tasks
#if SCORED
      , const float* bias, int by_sigmoid, float scale, const float* expert_scale
#endif
#if GROUPED
      , int num_groups, int groups_taken, int group_best
#endif
#if SPARSE
      , float nearness
#endif
) {
  __shared__ int counts[WARPS][ROOM];  // of each warp's pairs; then which of its expert's pairs is the next
  __shared__ int first_tasks[ROOM], totals[ROOM];
  __shared__ int tasks_of_warps[WARPS];
  DYNAMIC_SHARED(shared);
  typedef Vector<int64_t, 2> Addresses;
  if (!chosen) chosen = reinterpret_cast<int32_t*>(shared);

  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
  const int stretch = (tokens + warps - 1) / warps;
  const int first_token = min(tokens, warp * stretch), end_token = min(tokens, first_token + stretch);
  const int used_warps = (tokens + stretch - 1) / stretch;
  const uint32_t lanes_below = (1u << lane) - 1;
  Addresses addresses[ADDRESSES / 2];  // of the thread's expert, on their way while logits are not there yet
  if ((int)threadIdx.x < experts)
    for (int i = 0; i < ADDRESSES / 2; ++i) addresses[i] = Addresses::load(matrices + (int)threadIdx.x * ADDRESSES + 2 * i);
  for (int i = lane; i < ROOM; i += WARP_SIZE) counts[warp][i] = 0;
  __syncwarp();
#ifdef BUG_EARLY_BARRIER
  __syncthreads();
#endif
  wait_for_previous_kernel();
  let_next_kernel_start();

  const auto is_padding = [&](int token) { return slots && slots[token] < 0; };
  for (int token = first_token; token < end_token; ++token) {
    if (is_padding(token)) continue;
    Choice choice(logits + (int64_t)token * experts, lane * VALUES, experts);
#if SCORED
    choice.rank(bias, by_sigmoid);
#endif
#if GROUPED
    choice.keep_groups(num_groups, groups_taken, group_best, lanes_below, lane);
#endif
#if SPARSE
    choice.choose(taken, lanes_below, nearness);
#else
    choice.choose(taken, lanes_below, 0.0f);
#endif
    const float largest = logit_of(choice.largest);
    float parts[VALUES], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      parts[i] = SCORED || SPARSE ? choice.scores[SCORED || SPARSE ? i : 0] : expf(logit_of(choice.keys[i]) - largest);
      sum += (normalises ? choice.has(i) : choice.is_there(i)) ? parts[i] : 0.0f;
    }
    sum = warp_sum(sum);
#if SCORED
    sum = (normalises ? sum : 1.0f) / scale;
#elif SPARSE
    sum = 1.0f;
#endif
    int place = 0;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) place += __popc(__ballot_sync(ALL_LANES, choice.has(i)) & lanes_below);
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      if (!choice.has(i)) continue;
      const int64_t pair = (int64_t)token * taken + place++;
      chosen[pair] = lane * VALUES + i;
      float weight = __fdividef(parts[i], sum);
#if SCORED
      if (expert_scale) weight *= expert_scale[lane * VALUES + i];
#endif
      weights[pair] = weight;
      ++counts[warp][lane * VALUES + i];
    }
  }
#ifndef BUG_EARLY_BARRIER
  __syncthreads();
#endif

  // A thread an expert, of which there are no more.
  int total = 0;
  if ((int)threadIdx.x < experts) {
    for (int i = 0; i < used_warps; ++i) {
      const int count = counts[i][threadIdx.x];
      counts[i][threadIdx.x] = total;
      total += count;
    }
    totals[threadIdx.x] = total;
  }
  const int own_tasks = (total + ROWS - 1) / ROWS;
  int upto = own_tasks;
  for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
    const int other = __shfl_up_sync(ALL_LANES, upto, distance);
    if (lane >= distance) upto += other;
  }
  if (lane == WARP_SIZE - 1) tasks_of_warps[warp] = upto;
  __syncthreads();
  int before = 0, all = 0;
  for (int i = 0; i < warps; ++i) {
    before += i < warp ? tasks_of_warps[i] : 0;
    all += tasks_of_warps[i];
  }
  const int first_task = before + upto - own_tasks;
  if ((int)threadIdx.x < experts) first_tasks[threadIdx.x] = first_task;
  __syncthreads();

  // Of its expert's tasks a thread writes all but the pairs, which come from the warps that chose.
  for (int i = 0; i < own_tasks; ++i) {
    Task& task = tasks[first_task + i];
#pragma unroll
    for (int j = 0; j < ADDRESSES / 2; ++j) addresses[j].store(task.addresses + 2 * j);
    task.count = min(ROWS, total - i * ROWS);
#pragma unroll
    for (int j = 0; j < ENDS; ++j) task.zeros[j] = 0;
  }
#ifndef BUG_NO_END
  for (int i = threadIdx.x; i < (num_tasks - all) * (TASK_BYTES / 16); i += blockDim.x)
    reinterpret_cast<uint4*>(tasks + all)[i] = make_uint4(0, 0, 0, 0);
#endif
  for (int token = first_token; token < end_token; ++token) {
    if (is_padding(token)) continue;
    for (int place = lane; place < taken; place += WARP_SIZE) {
      const int pair = token * taken + place, expert = chosen[pair], at = counts[warp][expert]++;
      Task& task = tasks[first_tasks[expert] + at / ROWS];
      task.pairs[at % ROWS] = pair;
      if (at == totals[expert] - 1)
        for (int i = at % ROWS + 1; i < ROWS; ++i) task.pairs[i] = pair;
    }
#ifndef BUG_NO_ORDER
    __syncwarp();  // the next token may have taken the same expert
#endif
  }
}
EXPORT(route)
