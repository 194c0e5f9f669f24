// Who runs, who waits for whom, and the launch of a grid.
#include "machine.h"

#include <algorithm>
#include <cstdio>

#include "../emulation/orders.h"

namespace ptx {
namespace {

const Table& table() {
  static const Table all = [] {
    Table table;
    add_arithmetic(table), add_conversions(table), add_memory(table), add_meetings(table), add_products(table);
    return table;
  }();
  return all;
}

struct Program {
  std::vector<Op> ops;
  std::vector<int32_t> operands;
  std::vector<uint64_t> registers;  // as they are at a thread's start: constants, the rest poison
  std::vector<std::pair<int, int>> specials;  // register, which
};

struct Dim {
  uint32_t x, y, z;
};

const Program* program;
Dim grid, block, block_index;
std::vector<Thread> threads;
std::vector<std::vector<uint64_t>> register_files;
std::vector<std::vector<unsigned char>> locals;
int live;
int missing;  // whom the last one waited for that did not meet all others
char failure[1024];
const Op* running;

uint64_t special(const Thread& t, int which) {
  const auto of = [](const Dim& dim, int axis) { return axis == 0 ? dim.x : axis == 1 ? dim.y : dim.z; };
  const Dim thread = {t.id % block.x, t.id / block.x % block.y, t.id / (block.x * block.y)};
  const Dim dims[] = {thread, block, block_index, grid};
  if (which < 12) return of(dims[which / 3], which % 3);
  return which == 12 ? t.lane : t.warp;
}

// All that must meet at the instruction where `t` waits; none if one is not there yet.
std::vector<Thread*>& partners_of(Thread& t) {
  static std::vector<Thread*> partners;
  partners.clear();
  const Kind kind = t.at->meaning.kind;
  const int lanes = kind == Kind::BLOCK ? (int)threads.size() : kind == Kind::WARPGROUP ? WARPGROUP * WARP : WARP;
  const int first = t.id / lanes * lanes, last = std::min<int>(first + lanes, threads.size());
  const uint32_t mask = kind == Kind::LANES ? t.get<uint32_t>(*t.at, t.at->count - 1) : ~0u;  // the last operand
  if (!(mask >> t.lane & 1)) fail("a lane takes part with a mask that leaves it out");
  if (first <= missing && missing < last && threads[missing].state == State::READY && mask >> threads[missing].lane & 1)
    return partners;
  const auto not_yet = [&](const Thread& other) -> std::vector<Thread*>& {
    missing = other.id;
    partners.clear();
    return partners;
  };
  for (int i = first; i < last; ++i) {
    Thread& other = threads[i];
    if (other.state == State::DONE || !(mask >> other.lane & 1)) continue;
    if (other.state != State::MEETING) return not_yet(other);
    // Lanes of a warp meet at one instruction, the warps of a block at any barrier of the same kind.
    const Op* at = t.at;
    if (kind == Kind::BLOCK && other.warp != t.warp) {
      const bool is_first = partners.empty() || partners.back()->warp != other.warp;
      at = is_first ? other.at : partners.back()->at;
    }
    if (other.at != at || at->meaning.meet != t.at->meaning.meet) return not_yet(other);
    if (kind == Kind::LANES && other.get<uint32_t>(*at, at->count - 1) != mask) fail("lanes meet with other masks");
    partners.push_back(&other);
  }
  return partners;
}

void try_to_meet(Thread& t) {
  std::vector<Thread*>& partners = partners_of(t);
  if (partners.empty()) return;
  running = t.at;
  t.at->meaning.meet(partners, *t.at);
  for (Thread* partner : partners) partner->state = State::READY;
}

void end(Thread& t) {
  end_thread(t);
  t.state = State::DONE;
  --live;
  // Those that wait for it wait for others now.
  for (Thread& other : threads)
    if (other.state == State::MEETING && (other.warp == t.warp || other.at->meaning.kind == Kind::BLOCK)) try_to_meet(other);
}

void run(Thread& t) {
  const Op* const ops = program->ops.data();
  for (;;) {
    const Op& op = ops[t.pc++];
    if (op.guard >= 0 && (t.registers[op.guard] & 1) == op.negated) continue;
    running = &op;
    switch (op.meaning.kind) {
      case Kind::ALONE:
        op.meaning.run(t, op);
        break;
      case Kind::EXIT:
        end(t);
        return;
      default:
        t.state = State::MEETING;
        t.at = &op;
        try_to_meet(t);
        if (t.state != State::READY) return;
    }
  }
}

void start(Thread& t, int id) {
  register_files[id] = program->registers;
  locals[id].assign(memory.local_bytes, POISON);
  t.registers = register_files[id].data();
  t.local = locals[id].data();
  t.id = id, t.lane = id % WARP, t.warp = id / WARP, t.pc = 0, t.state = State::READY, t.warp_epoch = 0;
  t.open_copies.clear(), t.copies.clear(), t.open_products.clear(), t.products.clear(), t.sums.clear();
  for (const auto& [at, which] : program->specials) t.registers[at] = special(t, which);
}

void run_block(const std::vector<long>& order) {
  begin_block_memory();
  live = order.size(), missing = 0;
  for (int i = 0; i < live; ++i) start(threads[i], i);
  while (live) {
    bool moved = false;
    for (long i : order)
      if (threads[i].state == State::READY) run(threads[i]), moved = true;
    if (!moved) {
      std::string lines;
      for (const Thread& t : threads)
        if (t.state == State::MEETING && lines.size() < 200) lines += " " + std::to_string(t.id) + "@" + std::to_string(t.at->line);
      fail("deadlock: threads wait for others that never come, at lines" + lines);
    }
  }
  end_block_traffic();
}

}  // namespace
}  // namespace ptx

using namespace ptx;

extern "C" {

const char* ptx_failure() { return failure; }

// The number of an instruction of that name among all, or -1.
int ptx_meaning(const char* name) {
  const auto found = table().find(name);
  return found == table().end() ? -1 : (int)std::distance(table().begin(), found);
}

void* ptx_program(const Line* lines, long num_lines, const int32_t* operands, long num_operands, const uint64_t* registers,
                  long num_registers, const int32_t* specials, long num_specials) {
  std::vector<Meaning> meanings;
  for (const auto& entry : table()) meanings.push_back(entry.second);
  Program& made = *new Program;
  made.operands.assign(operands, operands + num_operands);
  made.registers.assign(registers, registers + num_registers);
  for (long i = 0; i < num_specials; ++i) made.specials.push_back({specials[2 * i], specials[2 * i + 1]});
  for (const Line* line = lines; line < lines + num_lines; ++line)
    made.ops.push_back({meanings[line->meaning], made.operands.data() + line->first, line->count, line->guard, line->negated != 0,
                        line->is_signed != 0, line->bytes, line->width, line->extra, line->line});
  return &made;
}

// dims: grid x y z, block x y z. ranges: from, to of each piece of global memory. shared: where it begins, and ends. Returns 0, or 1
// with a message in ptx_failure.
int ptx_launch(const void* which, const uint32_t* dims, const unsigned char* params, long param_bytes, const uint64_t* ranges,
               long num_ranges, const uint32_t* shared, int local_bytes, unsigned seed, long only_block) {
  program = (const Program*)which;
  grid = {dims[0], dims[1], dims[2]}, block = {dims[3], dims[4], dims[5]};
  failure[0] = 0;
  memory = Memory();
  memory.params.assign(params, params + param_bytes);
  for (long i = 0; i < num_ranges; ++i) memory.global.push_back({ranges[2 * i], ranges[2 * i + 1]});
  memory.shared_begin = shared[0], memory.shared_end = shared[1], memory.local_bytes = local_bytes;
  const long count = (long)block.x * block.y * block.z;
  threads.resize(count), register_files.resize(count), locals.resize(count);
  const std::vector<long> order = order_of(count, seed);
  try {
    for (long i : order_of((long)grid.x * grid.y * grid.z, seed)) {
      if (only_block >= 0 && i != only_block) continue;
      block_index = {(uint32_t)(i % grid.x), (uint32_t)(i / grid.x % grid.y), (uint32_t)(i / ((long)grid.x * grid.y))};
      run_block(order);
    }
  } catch (const std::runtime_error& error) {
    snprintf(failure, sizeof failure, "%s, in block (%u, %u, %u), line %d", error.what(), block_index.x, block_index.y,
             block_index.z, running ? running->line : 0);
    return 1;
  }
  return 0;
}
}
