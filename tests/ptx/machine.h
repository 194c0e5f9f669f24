// A GPU that executes PTX, the code that NVRTC makes of a kernel, instruction by instruction, on a CPU.
//
// Emulation (../emulation) compiles a kernel's C++ with g++ and stands in for what is written in PTX there. Here it is the other way
// round: what runs is what a GPU is given, the inline assembly included. Each thread has its own registers and goes on alone until an
// instruction that lanes, warps or the block execute together. The semantics are those of the PTX ISA, written here from it alone.
//
// It ends a launch that does what a GPU would not survive, or would not say: an access outside the launch's tensors, shared memory or
// local memory, or not on its boundary; two threads that touch a byte of shared memory with no barrier between them, one of them
// writing; lanes that meet at different instructions; operands of wgmma that change under way, or that were written past it without
// a fence. Registers and shared memory begin as 0xff; cp.async lands, and wgmma multiplies, at the wait.
//
// Not seen: what ptxas makes of it, timing, blocks that would run at once, races in global memory, an array of shared memory that is
// overrun into the next, a missing wgmma.fence. Chapters of the PTX ISA are those of version 9.0.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptx {

constexpr int WARP = 32, WARPGROUP = 4;
constexpr unsigned char POISON = 0xff;
// Generic addresses of what is not global memory.
constexpr uint64_t SHARED_BASE = 1ull << 60, LOCAL_BASE = 1ull << 61;

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }

struct Thread;
struct Op;
using Run = void (*)(Thread&, const Op&);
// Of all the threads that met, in order of their numbers.
using Meet = void (*)(std::vector<Thread*>&, const Op&);
enum class Kind { ALONE, LANES, WARP, WARPGROUP, BLOCK, EXIT };

struct Meaning {
  Run run = nullptr;
  Meet meet = nullptr;
  Kind kind = Kind::ALONE;
};
using Table = std::unordered_map<std::string, Meaning>;

// As Python writes it (code.py has the same fields).
struct Line {
  int32_t meaning, guard, negated, first, count, bytes, width, is_signed;
  int64_t extra;
  int32_t line;
};

struct Op {
  Meaning meaning;
  const int32_t* at;  // registers
  int count, guard;
  bool negated, is_signed;
  int bytes, width;  // of an element; elements
  int64_t extra;     // an offset, or where a branch goes
  int line;
};

struct Copy {
  uint32_t target;
  uint64_t source;
  int bytes;
};

// Of wgmma: what it was given when it began, of which nothing may change until the wait.
struct Product {
  const Op* op;
  void (*end)(std::vector<Thread*>& lanes, const std::vector<const Product*>& products);  // of all lanes
  uint32_t a[4];
  std::vector<unsigned char> b;
};

// While products are under way their registers are poison.
struct Sums {
  std::vector<int32_t> registers;
  std::vector<float> values;
};

enum class State { READY, MEETING, DONE };

struct Thread {
  uint64_t* registers;
  unsigned char* local;
  int id, lane, warp, pc;
  State state;
  const Op* at;  // where it waits
  uint32_t warp_epoch;
  std::vector<Copy> open_copies;
  std::vector<std::vector<Copy>> copies;
  std::vector<Product> open_products;
  std::vector<std::vector<Product>> products;
  std::vector<Sums> sums;  // of products under way

  template <class T>
  T get(const Op& op, int i) const {
    if (i >= op.count) fail("an operand that is not there");
    T value;
    memcpy(&value, &registers[op.at[i]], sizeof value);
    return value;
  }
  template <class T>
  void set(const Op& op, int i, T value) {
    if (i >= op.count) fail("an operand that is not there");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    registers[op.at[i]] = bits;
  }
};

// ---- memory (memory.cpp) ----

enum class Access { READ, WRITE, ATOMIC, PRODUCT };

// Where the bytes at an address are; fails where the access may not be. value: what the instruction `op` is about to write, which
// lanes of a warp may all write if it is the same.
unsigned char* global_at(uint64_t address, int bytes);
unsigned char* shared_at(Thread& thread, uint32_t address, int bytes, Access access, const Op* op = nullptr,
                         const unsigned char* value = nullptr);
void begin_block_memory();
void end_thread(const Thread& thread);
void next_epoch();  // at a barrier of the block

// ---- traffic (traffic.cpp): what a warp's accesses cost, where it is asked for ----

void note_traffic(const Thread& thread, const Op& op, bool is_shared, uint64_t address, int bytes);
void end_block_traffic();

struct Memory {
  std::vector<std::pair<uint64_t, uint64_t>> global;  // from, to
  std::vector<unsigned char> params;
  std::vector<unsigned char> shared;
  uint32_t shared_begin = 0, shared_end = 0;
  int local_bytes = 0;
};
extern Memory memory;

// ---- what instructions mean ----

void add_arithmetic(Table& table);
void add_conversions(Table& table);
void add_memory(Table& table);
void add_meetings(Table& table);
void add_products(Table& table);

// ---- small floats (conversions.cpp); to: to nearest even ----

float from_half(uint16_t bits);
float from_bf16(uint16_t bits);
float from_e4m3(uint8_t bits);
uint16_t to_half(double x);
uint16_t to_bf16(double x);
uint8_t to_e4m3(double x);  // saturates

inline float flush(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }

}  // namespace ptx
