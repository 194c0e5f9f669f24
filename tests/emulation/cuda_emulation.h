// Runs CUDA kernels on a CPU: the same source, compiled by g++, with one fiber for each CUDA thread.
//
// A block's threads run one at a time and give way only where CUDA threads wait for each other: barriers, warp exchanges.
// The order in which they get their turn is a seed's choice, so a missing barrier gives other numbers in another order.
// Blocks run one after another, in an order of the seed's choice too. What a thread may not read yet is poisoned with 0xff
// bytes, which are NaN in every float type: shared memory before the block writes it, the target of a cp.async before the wait.
//
// Not seen: bank conflicts, timing, memory ordering between blocks that would run at once, tensor-map copies.
// x86-64 and g++ only; compile with -fno-strict-aliasing.
//
// Here is what a kernel's code needs to see. The rest is compiled once for all kernels: fibers in fibers.cpp, what CUDA computes
// for a warp or a block in warps.cpp, what it computes for four warps while they go on in warpgroups.cpp.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

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

namespace emulation {

constexpr int WARP = 32, SLOT_BYTES = 64, RESULT_BYTES = 16;
constexpr unsigned FULL_MASK = ~0u;
constexpr unsigned char POISON = 0xff;

struct Thread {
  uint3 thread;
  int lane, warp;
};
typedef const unsigned char (*Slots)[SLOT_BYTES];
typedef unsigned char (*Results)[RESULT_BYTES];

extern Thread* current;
extern unsigned char* dynamic_shared;
extern size_t dynamic_bytes;
extern dim3 grid_dim, block_dim;
extern uint3 block_index;
extern bool with_products;  // of warpgroups: where a kernel has none, nothing is kept for them

[[noreturn]] void fail(const char* what);  // ends the launch with a message
void give_way();  // the other threads have their turn
void poison(void* target, size_t bytes);
void block_barrier();
int block_reduce(int value, int (*combine)(int, int));
void warp_barrier(unsigned mask);
unsigned live_lanes();  // of the current thread's warp
void copy_async_16(void* target, const void* source, bool in_range);  // zeros where it is not
void commit_copies();
void wait_copies(int left);

// Products of warpgroups: see wgmma.cuh.
void start_products();  // of a block
void end_products();    // of a thread
void note_copy(const void* target, bool landed);
void begin_product(float* d, const uint32_t* a, uint64_t b, int columns, bool in_bf16);
void fence_registers(const uint32_t* a, int count);  // of fragments of four
void commit_products();
void wait_products(int left);
void fence_copies();
uint32_t shared_address(const void* pointer);

// Every lane of mask puts a value down; returns where they all lie: [lane] of SLOT_BYTES.
Slots put_down(unsigned mask, const void* value, size_t bytes);
template <class T>
Slots put_down(unsigned mask, const T& value) {
  static_assert(sizeof(T) <= SLOT_BYTES);
  return put_down(mask, &value, sizeof value);
}

// Every lane of mask puts a value down, of which `together` makes all lanes' results, once, before any of them goes on; returns
// the lane's own.
const void* compute(unsigned mask, const void* value, size_t bytes, void (*together)(Slots slots, Results results));

template <class T>
T take(Slots slots, int lane) {
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

// A kernel with its arguments, and where its static shared memory begins and ends.
struct Call {
  void (*run)(void* context);
  void* context;
  unsigned char *shared, *shared_end;
};
int run_grid(const Call& call, const unsigned* dims, size_t shared_bytes);

template <class... Args, size_t... I>
void call_with(void (*kernel)(Args...), void** args, std::index_sequence<I...>) {
  kernel(*(Args*)args[I]...);
}

// dims: grid x y z, block x y z. Returns 0, or 1 with a message for emulation_failure.
template <class... Args>
int launch(void (*kernel)(Args...), const unsigned* dims, size_t shared_bytes, void** args) {
  struct Context {
    void (*kernel)(Args...);
    void** args;
  } context{kernel, args};
  auto run = [](void* address) {
    Context* context = (Context*)address;
    call_with(context->kernel, context->args, std::index_sequence_for<Args...>{});
  };
  return run_grid({run, &context, __start_cuda_shared, __stop_cuda_shared}, dims, shared_bytes);
}

}  // namespace emulation

#include "cuda_intrinsics.h"
