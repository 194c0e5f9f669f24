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

namespace {

constexpr size_t STACK_BYTES = 128 << 10;

struct AsyncCopy {
  void* target;
  const void* source;
  int bytes, source_bytes;
};

struct Fiber : Thread {
  void* stack_pointer;
  char* stack;
  bool done, blocked;
  std::vector<AsyncCopy> open_copies;
  std::vector<std::vector<AsyncCopy>> copy_groups;
};

// A meeting point of the lanes in `mask`. What they exchange lies in one of two buffers, so that a lane may arrive at the next
// exchange while others still read this one.
struct Meeting {
  unsigned mask;
  unsigned round = 0;
  std::vector<Fiber*> waiting;
  alignas(16) unsigned char slots[2][WARP][SLOT_BYTES];
};

struct Warp {
  unsigned live = 0;
  std::list<Meeting> meetings;
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
void* scheduler_stack_pointer;
std::vector<Fiber*> at_block_barrier;
int live_threads;
unsigned order_seed = 0;
long only_block = -1;
char failure[512];
const Call* launched;

Fiber& running() { return *static_cast<Fiber*>(current); }

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
  __sanitizer_start_switch_fiber(&fake, fiber.stack, STACK_BYTES);
  emulation_switch(&scheduler_stack_pointer, fiber.stack_pointer);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}
void entered() { __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size); }
// What the stack's last thread left of its frames, which it never returned from, would be taken for this one's.
void clean_stack(Fiber& fiber) { __asan_unpoison_memory_region(fiber.stack, STACK_BYTES); }
#else
void to_scheduler(bool) { emulation_switch(&running().stack_pointer, scheduler_stack_pointer); }
void to_fiber(Fiber& fiber) { emulation_switch(&scheduler_stack_pointer, fiber.stack_pointer); }
void entered() {}
void clean_stack(Fiber&) {}
#endif

void wait_for_turn() {
  running().blocked = true;
  to_scheduler(false);
}

void release(std::vector<Fiber*>& waiting) {
  for (Fiber* fiber : waiting) fiber->blocked = false;
  waiting.clear();
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

// Wait for all live lanes of the meeting's mask.
void meet(Meeting& meeting) {
  meeting.waiting.push_back(&running());
  if ((int)meeting.waiting.size() == __builtin_popcount(meeting.mask & warps[current->warp].live)) {
    ++meeting.round;
    release(meeting.waiting);
  } else {
    wait_for_turn();
  }
}

void run_fiber() {
  entered();
  launched->run(launched->context);
  Fiber& fiber = running();
  if (!fiber.open_copies.empty() || !fiber.copy_groups.empty()) fail("a thread ends with cp.async copies not waited for");
  end_products();
  fiber.done = true;
  --live_threads;
  Warp& warp = warps[fiber.warp];
  warp.live &= ~(1u << fiber.lane);
  for (Meeting& meeting : warp.meetings)
    if (!meeting.waiting.empty() && (int)meeting.waiting.size() == __builtin_popcount(meeting.mask & warp.live)) {
      ++meeting.round;
      release(meeting.waiting);
    }
  if (live_threads && (int)at_block_barrier.size() == live_threads) release(at_block_barrier);
  to_scheduler(true);
  abort();
}

void start_fiber(int id) {
  Fiber& fiber = fibers[id];
  if (!fiber.stack) fiber.stack = (char*)aligned_alloc(64, STACK_BYTES);
  clean_stack(fiber);
  fiber.lane = id % WARP;
  fiber.warp = id / WARP;
  fiber.done = fiber.blocked = false;
  fiber.open_copies.clear();
  fiber.copy_groups.clear();
  fiber.thread = {id % block_dim.x, id / block_dim.x % block_dim.y, id / (block_dim.x * block_dim.y)};
  warps[fiber.warp].live |= 1u << fiber.lane;
  // The stack as emulation_switch leaves one: six saved registers under the address to return to, here the fiber's start.
  void** top = (void**)(fiber.stack + STACK_BYTES - 64);
  *--top = nullptr;
  *--top = (void*)run_fiber;
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
}

void run_block(const std::vector<long>& order) {
  const int threads = order.size();
  if ((int)fibers.size() < threads) fibers.resize(threads);
  warps.assign((threads + WARP - 1) / WARP, Warp());
  at_block_barrier.clear();
  live_threads = threads;
  start_products();
  for (int i = 0; i < threads; ++i) start_fiber(i);
  while (live_threads && !failure[0]) {
    bool moved = false;
    for (long i : order) {
      Fiber& fiber = fibers[i];
      if (fiber.done || fiber.blocked) continue;
      current = &fiber;
      to_fiber(fiber);
      if (failure[0]) return;
      moved = true;
    }
    if (!moved) {
      for (Fiber& fiber : fibers)
        if (!fiber.done) current = &fiber;
      snprintf(failure, sizeof failure, "deadlock in block (%u, %u, %u): %d threads wait for others that never come",
               block_index.x, block_index.y, block_index.z, live_threads);
    }
  }
}

}  // namespace

void give_way() { to_scheduler(false); }

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
  at_block_barrier.push_back(&running());
  if ((int)at_block_barrier.size() == live_threads) {
    release(at_block_barrier);
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
  memcpy(slots[current->lane], value, bytes);
  meet(meeting);
  return slots;
}

// The copy happens at the wait; until then its target is poison.
void copy_async(void* target, const void* source, int bytes, int source_bytes) {
  running().open_copies.push_back({target, source, bytes, source_bytes});
  memset(target, POISON, bytes);
  note_copy(target, false);
}

void commit_copies() {
  running().copy_groups.push_back(std::move(running().open_copies));
  running().open_copies.clear();
}

void wait_copies(int left) {
  auto& groups = running().copy_groups;
  while ((int)groups.size() > left) {
    for (const AsyncCopy& copy : groups[0]) {
      if (copy.source_bytes) {
        memcpy(copy.target, copy.source, copy.source_bytes);
      } else {
        memset(copy.target, 0, copy.bytes);
      }
      note_copy(copy.target, true);
    }
    groups.erase(groups.begin());
  }
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
  const std::vector<long> thread_order = order_of((long)dims[3] * dims[4] * dims[5], order_seed);
  for (long block : order_of((long)dims[0] * dims[1] * dims[2], order_seed)) {
    if (only_block >= 0 && block != only_block) continue;
    block_index = {(unsigned)(block % dims[0]), (unsigned)(block / dims[0] % dims[1]),
                   (unsigned)(block / ((long)dims[0] * dims[1]))};
    poison(dynamic_shared, shared_bytes);
    if (call.shared) poison(call.shared, call.shared_end - call.shared);
    run_block(thread_order);
    if (failure[0]) break;
  }
  free(memory);
  return failure[0] != 0;
}

}  // namespace emulation

extern "C" {
void emulation_set_order(unsigned seed) { emulation::order_seed = seed; }
void emulation_set_only_block(long block) { emulation::only_block = block; }
const char* emulation_failure() { return emulation::failure; }
}
