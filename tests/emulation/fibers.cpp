// Threads of a CUDA block as fibers: who runs, who waits for whom, the launch of a grid. Compiled once for all kernels.
#include <list>
#include <vector>

#include "cuda_emulation.h"
#include "orders.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// emulation_switch(save, to): saves the stack pointer and the registers that a function must keep (System V ABI, x86-64), and
// goes on where the stack `to` was left.
extern "C" __attribute__((visibility("hidden"))) void emulation_switch(void** save_stack_pointer, void* to);
asm(R"(
.pushsection .text
.globl emulation_switch
.hidden emulation_switch
.type emulation_switch, @function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.popsection
)");

namespace emulation {

Thread* current;
unsigned char* dynamic_shared;
size_t dynamic_bytes;
dim3 grid_dim, block_dim;
uint3 block_index;
bool with_products;

namespace {

constexpr size_t STACK_BYTES = 128 << 10;
// Threads wait at the same place, each on a stack of its own: what lies there must not all fall into the same sets of a cache.
constexpr size_t STACK_SHIFT = 448, STACK_SHIFTS = 64, ALLOCATED_BYTES = STACK_BYTES + STACK_SHIFT * STACK_SHIFTS;

struct AsyncCopy {
  void* target;
  const void* source;
  bool in_range;
};

struct Fiber : Thread {
  void* stack_pointer;
  char* stack;
  int position;  // in the order
  bool done;
  std::vector<AsyncCopy> copies;    // not waited for, in order
  std::vector<size_t> copy_groups;  // where each ends among them
};

// A meeting point of the lanes in `mask`. What they exchange lies in one of two buffers, so that a lane may arrive at the next
// exchange while others still read this one.
struct Meeting {
  unsigned mask;
  unsigned round = 0;
  unsigned arrived = 0;  // lanes
  bool computed[2];
  alignas(16) unsigned char slots[2][WARP][SLOT_BYTES];
  alignas(16) unsigned char results[2][WARP][RESULT_BYTES];
};

// Threads, by their positions in the order in which they get their turn.
struct Positions {
  std::vector<uint64_t> words;

  void reset(size_t count) { words.assign((count + 63) / 64, 0); }
  void add(int position) { words[position / 64] |= 1ull << position % 64; }
  void remove(int position) { words[position / 64] &= ~(1ull << position % 64); }
  void move_to(Positions& others) {
    for (size_t i = 0; i < words.size(); ++i) others.words[i] |= std::exchange(words[i], 0);
  }
  // The first behind `position`, or, behind the last, the first of all; -1 where there is none.
  int next(int position) const {
    const int count = words.size(), first = (position + 1) / 64;
    if (first < count)
      if (const uint64_t bits = words[first] & ~0ull << (position + 1) % 64) return first * 64 + __builtin_ctzll(bits);
    for (int word = first + 1; word < count; ++word)
      if (words[word]) return word * 64 + __builtin_ctzll(words[word]);
    for (int word = 0; word < count; ++word)
      if (words[word]) return word * 64 + __builtin_ctzll(words[word]);
    return -1;
  }
};

struct Warp {
  unsigned live = 0;
  std::list<Meeting> meetings;
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<long> thread_order;
Positions ready, at_block_barrier;
int num_at_block_barrier;
void* scheduler_stack_pointer;
int live_threads;
unsigned order_seed = 0;
long only_block = -1;
char failure[512];
const Call* launched;

Fiber& running() { return *static_cast<Fiber*>(current); }

// Whose turn is next, or none's.
Fiber* next_after(int position) {
  const int next = ready.next(position);
  return next < 0 ? nullptr : &fibers[thread_order[next]];
}

#if defined(__SANITIZE_ADDRESS__)
const void* scheduler_bottom;
size_t scheduler_size;
void to_scheduler(bool forever) {
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(forever ? nullptr : &fake, scheduler_bottom, scheduler_size);
  emulation_switch(&running().stack_pointer, scheduler_stack_pointer);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}
void to_fiber(Fiber& fiber) {
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, fiber.stack, ALLOCATED_BYTES);
  emulation_switch(&scheduler_stack_pointer, fiber.stack_pointer);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}
void entered() { __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size); }
// What the stack's last thread left of its frames, which it never returned from, would be taken for this one's.
void clean_stack(Fiber& fiber) { __asan_unpoison_memory_region(fiber.stack, ALLOCATED_BYTES); }
// By way of the scheduler, whose stack alone is told to each fiber.
void to_next(bool forever) { to_scheduler(forever); }
#else
void to_scheduler(bool) { emulation_switch(&running().stack_pointer, scheduler_stack_pointer); }
void to_fiber(Fiber& fiber) { emulation_switch(&scheduler_stack_pointer, fiber.stack_pointer); }
void entered() {}
void clean_stack(Fiber&) {}
void to_next(bool) {
  Fiber& from = running();
  Fiber* const to = next_after(from.position);
  if (to == &from) return;
  if (to) current = to;
  emulation_switch(&from.stack_pointer, to ? to->stack_pointer : scheduler_stack_pointer);
}
#endif

void wait_for_turn() {
  ready.remove(running().position);
  to_next(false);
}

void leave_block_barrier() {
  at_block_barrier.move_to(ready);
  num_at_block_barrier = 0;
}

Meeting& meeting_of(unsigned mask) {
  Warp& warp = warps[current->warp];
  if (!(mask >> current->lane & 1)) fail("a lane calls a warp function with a mask that leaves it out");
  for (Meeting& meeting : warp.meetings)
    if (meeting.mask == mask) return meeting;
  warp.meetings.emplace_back();
  warp.meetings.back().mask = mask;
  return warp.meetings.back();
}

// All its live lanes go on.
void end_round(Meeting& meeting) {
  ++meeting.round;
  const Fiber* const lanes = &fibers[current->warp * WARP];
  for (; meeting.arrived; meeting.arrived &= meeting.arrived - 1) ready.add(lanes[__builtin_ctz(meeting.arrived)].position);
}

// Wait for all live lanes of the meeting's mask.
void meet(Meeting& meeting) {
  if (!meeting.arrived) meeting.computed[meeting.round & 1] = false;
  meeting.arrived |= 1u << current->lane;
  if (meeting.arrived == (meeting.mask & warps[current->warp].live)) {
    end_round(meeting);
  } else {
    wait_for_turn();
  }
}

void run_fiber() {
  entered();
  launched->run(launched->context);
  Fiber& fiber = running();
  if (!fiber.copies.empty() || !fiber.copy_groups.empty()) fail("a thread ends with cp.async copies not waited for");
  if (with_products) end_products();
  fiber.done = true;
  ready.remove(fiber.position);
  --live_threads;
  Warp& warp = warps[fiber.warp];
  warp.live &= ~(1u << fiber.lane);
  for (Meeting& meeting : warp.meetings)
    if (meeting.arrived && meeting.arrived == (meeting.mask & warp.live)) end_round(meeting);
  if (live_threads && num_at_block_barrier == live_threads) leave_block_barrier();
  to_next(true);
  abort();
}

void start_fiber(int id) {
  Fiber& fiber = fibers[id];
  if (!fiber.stack) fiber.stack = (char*)aligned_alloc(64, ALLOCATED_BYTES);
  clean_stack(fiber);
  fiber.lane = id % WARP;
  fiber.warp = id / WARP;
  fiber.done = false;
  fiber.copies.clear();
  fiber.copy_groups.clear();
  fiber.thread = {id % block_dim.x, id / block_dim.x % block_dim.y, id / (block_dim.x * block_dim.y)};
  warps[fiber.warp].live |= 1u << fiber.lane;
  // The stack as emulation_switch leaves one: six saved registers under the address to return to, here the fiber's start.
  void** top = (void**)(fiber.stack + ALLOCATED_BYTES - id % STACK_SHIFTS * STACK_SHIFT - 64);
  *--top = nullptr;
  *--top = (void*)run_fiber;
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
}

void start_warp(Warp& warp) {
  warp.live = 0;
  while (warp.meetings.size() > 1) warp.meetings.pop_back();
  for (Meeting& meeting : warp.meetings) meeting.arrived = 0;  // most blocks have but this one
}

void run_block() {
  const int threads = thread_order.size(), num_warps = (threads + WARP - 1) / WARP;
  if ((int)fibers.size() < threads) fibers.resize(threads);
  if ((int)warps.size() < num_warps) warps.resize(num_warps);
  for (int i = 0; i < num_warps; ++i) start_warp(warps[i]);
  ready.reset(threads);
  at_block_barrier.reset(threads);
  num_at_block_barrier = 0;
  live_threads = threads;
  if (with_products) start_products();
  for (int i = 0; i < threads; ++i) start_fiber(i);
  for (int i = 0; i < threads; ++i) {
    fibers[thread_order[i]].position = i;
    ready.add(i);
  }
  int position = -1;
  while (Fiber* fiber = next_after(position)) {
    current = fiber;
    to_fiber(*fiber);
    if (failure[0]) return;
    position = running().position;
  }
  if (live_threads)
    snprintf(failure, sizeof failure, "deadlock in block (%u, %u, %u): %d threads wait for others that never come",
             block_index.x, block_index.y, block_index.z, live_threads);
}

}  // namespace

void give_way() { to_next(false); }

// Not memset: under AddressSanitizer there are gaps between variables of shared memory, and only this may run across them.
void poison(void* target, size_t bytes) {
  asm volatile("rep stosb" : "+D"(target), "+c"(bytes) : "a"(POISON) : "memory");
}

// The fibers are left where they are.
void fail(const char* what) {
  if (!failure[0])
    snprintf(failure, sizeof failure, "%s, in block (%u, %u, %u), thread (%u, %u, %u)", what, block_index.x, block_index.y,
             block_index.z, current->thread.x, current->thread.y, current->thread.z);
  to_scheduler(true);
  abort();
}

void block_barrier() {
  at_block_barrier.add(running().position);
  if (++num_at_block_barrier == live_threads) {
    leave_block_barrier();
  } else {
    wait_for_turn();
  }
}

int block_reduce(int value, int (*combine)(int, int)) {
  static std::vector<int> values;
  static int result;
  values.push_back(value);
  const bool last = (int)values.size() == live_threads;
  if (last) {
    result = values[0];
    for (size_t i = 1; i < values.size(); ++i) result = combine(result, values[i]);
    values.clear();
  }
  block_barrier();
  const int mine = result;
  block_barrier();
  return mine;
}

void warp_barrier(unsigned mask) { meet(meeting_of(mask)); }

unsigned live_lanes() { return warps[current->warp].live; }

Slots put_down(unsigned mask, const void* value, size_t bytes) {
  Meeting& meeting = meeting_of(mask);
  auto slots = meeting.slots[meeting.round & 1];
  if (bytes == sizeof(int)) {  // most are
    memcpy(slots[current->lane], value, sizeof(int));
  } else {
    memcpy(slots[current->lane], value, bytes);
  }
  meet(meeting);
  return slots;
}

const void* compute(unsigned mask, const void* value, size_t bytes, void (*together)(Slots slots, Results results)) {
  Meeting& meeting = meeting_of(mask);
  const int buffer = meeting.round & 1;
  memcpy(meeting.slots[buffer][current->lane], value, bytes);
  meet(meeting);
  if (!std::exchange(meeting.computed[buffer], true)) together(meeting.slots[buffer], meeting.results[buffer]);
  return meeting.results[buffer][current->lane];
}

// The copy happens at the wait; until then its target is poison, and another one to it would come before or after.
void copy_async_16(void* target, const void* source, bool in_range) {
  for (const AsyncCopy& copy : running().copies) {
    if (copy.target == target) fail("a cp.async to where another one is under way");
  }
  running().copies.push_back({target, source, in_range});
  memset(target, POISON, 16);
  if (with_products) note_copy(target, false);
}

void commit_copies() { running().copy_groups.push_back(running().copies.size()); }

void wait_copies(int left) {
  auto& copies = running().copies;
  auto& groups = running().copy_groups;
  if ((int)groups.size() <= left) return;
  const size_t finished = groups.size() - left, count = groups[finished - 1];
  for (size_t i = 0; i < count; ++i) {
    const AsyncCopy& copy = copies[i];
    if (copy.in_range) {
      memcpy(copy.target, copy.source, 16);
    } else {
      memset(copy.target, 0, 16);
    }
    if (with_products) note_copy(copy.target, true);
  }
  copies.erase(copies.begin(), copies.begin() + count);
  groups.erase(groups.begin(), groups.begin() + finished);
  for (size_t& group : groups) group -= count;
}

// dims: grid x y z, block x y z. Returns 0, or 1 with a message in `failure`.
int run_grid(const Call& call, const unsigned* dims, size_t shared_bytes) {
  failure[0] = 0;
  void* memory = nullptr;  // exactly as large as asked for, so that AddressSanitizer sees an access past its end
  if (posix_memalign(&memory, 128, std::max<size_t>(1, shared_bytes))) abort();
  dynamic_shared = (unsigned char*)memory;
  dynamic_bytes = shared_bytes;
  grid_dim = dim3(dims[0], dims[1], dims[2]);
  block_dim = dim3(dims[3], dims[4], dims[5]);
  launched = &call;
  thread_order = order_of((long)dims[3] * dims[4] * dims[5], order_seed);
  for (long block : order_of((long)dims[0] * dims[1] * dims[2], order_seed)) {
    if (only_block >= 0 && block != only_block) continue;
    block_index = {(unsigned)(block % dims[0]), (unsigned)(block / dims[0] % dims[1]),
                   (unsigned)(block / ((long)dims[0] * dims[1]))};
    poison(dynamic_shared, shared_bytes);
    if (call.shared) poison(call.shared, call.shared_end - call.shared);
    run_block();
    if (failure[0]) break;
  }
  free(memory);
  return failure[0] != 0;
}

}  // namespace emulation

extern "C" {
void emulation_set_order(unsigned seed) { emulation::order_seed = seed; }
void emulation_set_with_products(bool has) { emulation::with_products = has; }
void emulation_set_only_block(long block) { emulation::only_block = block; }
const char* emulation_failure() { return emulation::failure; }
}
