// Runs CUDA kernels on a CPU: the same source, compiled by g++, with one fiber for each CUDA thread.
//
// A block's threads run one at a time and give way only where CUDA threads wait for each other: barriers, warp exchanges.
// The order in which they get their turn is a seed's choice, so a missing barrier gives other numbers in another order.
// Blocks run one after another, in an order of the seed's choice too. What a thread may not read yet is poisoned with 0xff
// bytes, which are NaN in every float type: shared memory before the block writes it, the target of a cp.async before the wait.
//
// Not seen: bank conflicts, timing, memory ordering between blocks that would run at once, wgmma, tensor-map copies.
// x86-64 and g++ only; compile with -fno-strict-aliasing.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <utility>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Static shared memory lives in a section of its own, so that it can be poisoned. Only for variables of plain functions.
#undef __shared__
#define __shared__ static __attribute__((section("cuda_shared")))
#undef __launch_bounds__
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __noinline__ __attribute__((noinline))
#define DYNAMIC_SHARED(name) unsigned char* name = emulation::dynamic_shared
#define EXPORT(kernel) \
  extern "C" int emulated_##kernel(const unsigned* dims, size_t shared_bytes, void** args) { \
    return emulation::launch(kernel, dims, shared_bytes, args); \
  }

extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __start_cuda_shared[];
extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __stop_cuda_shared[];
extern "C" void emulation_switch(void** save_stack_pointer, void* to);

namespace emulation {

constexpr size_t STACK_BYTES = 128 << 10;
constexpr int WARP = 32, SLOT_BYTES = 64;
constexpr unsigned FULL_MASK = ~0u;
constexpr unsigned char POISON = 0xff;

struct AsyncCopy {
  void* target;
  const void* source;
  int bytes, source_bytes;
};

struct Fiber {
  void* stack_pointer;
  char* stack;
  uint3 thread;
  int lane, warp;
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

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Fiber* current;
inline void* scheduler_stack_pointer;
inline unsigned char* dynamic_shared;
inline dim3 grid_dim, block_dim;
inline uint3 block_index;
inline std::vector<Fiber*> at_block_barrier;
inline int live_threads;
inline unsigned order_seed = 0;
inline long only_block = -1;
inline long num_switches = 0;
inline char failure[512];
inline void (*call_kernel)(void*);
inline void* call_context;

#if defined(__SANITIZE_ADDRESS__)
inline const void* scheduler_bottom;
inline size_t scheduler_size;
inline void to_scheduler(bool forever) {
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(forever ? nullptr : &fake, scheduler_bottom, scheduler_size);
  emulation_switch(&current->stack_pointer, scheduler_stack_pointer);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}
inline void to_fiber(Fiber& fiber) {
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, fiber.stack, STACK_BYTES);
  emulation_switch(&scheduler_stack_pointer, fiber.stack_pointer);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}
inline void entered() { __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size); }
// What the stack's last thread left of its frames, which it never returned from, would be taken for this one's.
inline void clean_stack(Fiber& fiber) { __asan_unpoison_memory_region(fiber.stack, STACK_BYTES); }
#else
inline void to_scheduler(bool) { emulation_switch(&current->stack_pointer, scheduler_stack_pointer); }
inline void to_fiber(Fiber& fiber) { emulation_switch(&scheduler_stack_pointer, fiber.stack_pointer); }
inline void entered() {}
inline void clean_stack(Fiber&) {}
#endif

// Not memset: under AddressSanitizer there are gaps between variables of shared memory, and only this may run across them.
inline void poison(void* target, size_t bytes) {
  asm volatile("rep stosb" : "+D"(target), "+c"(bytes) : "a"(POISON) : "memory");
}

// Ends the launch with a message; the fibers are left where they are.
[[noreturn]] inline void fail(const char* what) {
  if (!failure[0])
    snprintf(failure, sizeof failure, "%s, in block (%u, %u, %u), thread (%u, %u, %u)", what, block_index.x, block_index.y,
             block_index.z, current->thread.x, current->thread.y, current->thread.z);
  to_scheduler(true);
  abort();
}

inline void wait_for_turn() {
  current->blocked = true;
  ++num_switches;
  to_scheduler(false);
}

inline void release(std::vector<Fiber*>& waiting) {
  for (Fiber* fiber : waiting) fiber->blocked = false;
  waiting.clear();
}

inline void block_barrier() {
  at_block_barrier.push_back(current);
  if ((int)at_block_barrier.size() == live_threads) {
    release(at_block_barrier);
  } else {
    wait_for_turn();
  }
}

inline Meeting& meeting_of(unsigned mask) {
  Warp& warp = warps[current->warp];
  if (!(mask >> current->lane & 1)) fail("a lane calls a warp function with a mask that leaves it out");
  for (Meeting& meeting : warp.meetings)
    if (meeting.mask == mask) return meeting;
  warp.meetings.emplace_back();
  warp.meetings.back().mask = mask;
  return warp.meetings.back();
}

// Wait for all live lanes of the meeting's mask.
inline void meet(Meeting& meeting) {
  meeting.waiting.push_back(current);
  if ((int)meeting.waiting.size() == __builtin_popcount(meeting.mask & warps[current->warp].live)) {
    ++meeting.round;
    release(meeting.waiting);
  } else {
    wait_for_turn();
  }
}

// Every lane of mask puts a value down; returns where they all lie: [lane] of SLOT_BYTES.
template <class T>
const unsigned char (*put_down(unsigned mask, const T& value))[SLOT_BYTES] {
  static_assert(sizeof(T) <= SLOT_BYTES);
  Meeting& meeting = meeting_of(mask);
  auto slots = meeting.slots[meeting.round & 1];
  memcpy(slots[current->lane], &value, sizeof(T));
  meet(meeting);
  return slots;
}

template <class T>
T take(const unsigned char (*slots)[SLOT_BYTES], int lane) {
  T value;
  memcpy(&value, slots[lane & (WARP - 1)], sizeof(T));
  return value;
}

template <class T>
T exchange(unsigned mask, T value, int source) {
  auto slots = put_down(mask, value);
  if (!(mask >> (source & (WARP - 1)) & 1)) return value;  // undefined on a GPU
  return take<T>(slots, source);
}

inline void run_fiber() {
  entered();
  call_kernel(call_context);
  if (!current->open_copies.empty() || !current->copy_groups.empty()) fail("a thread ends with cp.async copies not waited for");
  current->done = true;
  --live_threads;
  Warp& warp = warps[current->warp];
  warp.live &= ~(1u << current->lane);
  for (Meeting& meeting : warp.meetings)
    if (!meeting.waiting.empty() && (int)meeting.waiting.size() == __builtin_popcount(meeting.mask & warp.live)) {
      ++meeting.round;
      release(meeting.waiting);
    }
  if (live_threads && (int)at_block_barrier.size() == live_threads) release(at_block_barrier);
  to_scheduler(true);
  abort();
}

// 0: as numbered; 1: backwards; others: shuffled by the seed.
inline std::vector<long> order_of(long count) {
  std::vector<long> order(count);
  for (long i = 0; i < count; ++i) order[i] = i;
  if (order_seed == 1) std::reverse(order.begin(), order.end());
  if (order_seed > 1) {
    unsigned state = order_seed;
    for (long i = count - 1; i > 0; --i) {
      state = state * 1664525u + 1013904223u;
      std::swap(order[i], order[(state >> 8) % (i + 1)]);
    }
  }
  return order;
}

inline void start_fiber(int id) {
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

inline void run_block(const std::vector<long>& order) {
  const int threads = order.size();
  if ((int)fibers.size() < threads) fibers.resize(threads);
  warps.assign((threads + WARP - 1) / WARP, Warp());
  at_block_barrier.clear();
  live_threads = threads;
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

template <class... Args, size_t... I>
void call_with(void (*kernel)(Args...), void** args, std::index_sequence<I...>) {
  kernel(*(Args*)args[I]...);
}

// dims: grid x y z, block x y z. Returns 0, or 1 with a message in `failure`.
template <class... Args>
int launch(void (*kernel)(Args...), const unsigned* dims, size_t shared_bytes, void** args) {
  failure[0] = 0;
  void* memory = nullptr;  // exactly as large as asked for, so that AddressSanitizer sees an access past its end
  if (posix_memalign(&memory, 128, std::max<size_t>(1, shared_bytes))) abort();
  dynamic_shared = (unsigned char*)memory;
  grid_dim = dim3(dims[0], dims[1], dims[2]);
  block_dim = dim3(dims[3], dims[4], dims[5]);
  struct Call {
    void (*kernel)(Args...);
    void** args;
  } call{kernel, args};
  call_context = &call;
  call_kernel = [](void* context) {
    Call* call = (Call*)context;
    call_with(call->kernel, call->args, std::index_sequence_for<Args...>{});
  };
  const std::vector<long> thread_order = order_of((long)dims[3] * dims[4] * dims[5]);
  for (long block : order_of((long)dims[0] * dims[1] * dims[2])) {
    if (only_block >= 0 && block != only_block) continue;
    block_index = {(unsigned)(block % dims[0]), (unsigned)(block / dims[0] % dims[1]),
                   (unsigned)(block / ((long)dims[0] * dims[1]))};
    poison(dynamic_shared, shared_bytes);
    if (__start_cuda_shared) poison(__start_cuda_shared, __stop_cuda_shared - __start_cuda_shared);
    run_block(thread_order);
    if (failure[0]) break;
  }
  free(memory);
  return failure[0] != 0;
}

}  // namespace emulation

extern "C" {
__attribute__((used)) inline void emulation_set_order(unsigned seed) { emulation::order_seed = seed; }
__attribute__((used)) inline void emulation_set_only_block(long block) { emulation::only_block = block; }
__attribute__((used)) inline const char* emulation_failure() { return emulation::failure; }
}

#include "cuda_intrinsics.h"
