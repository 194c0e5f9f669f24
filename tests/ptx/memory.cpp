// Loads and stores, and who may touch what: bounds, boundaries, and an order between the threads that share a byte.
#include "machine.h"

namespace ptx {

Memory memory;

namespace {

constexpr int MOST_THREADS = 1024;
constexpr int NOBODY = -1, SEVERAL = -2, UNDER_WAY = -3;

// The last accesses to a byte of shared memory. An epoch begins at each barrier of the block, and within it one of a warp's own at
// each of the warp's.
struct Byte {
  int writer = NOBODY, reader = NOBODY;  // threads
  int writer_warp = NOBODY, reader_warp = NOBODY;
  uint32_t write_epoch = 0, read_epoch = 0, write_warp_epoch = 0, read_warp_epoch = 0;
  uint32_t write_fences = 0;  // of its writer until then
  const Op* written_by = nullptr;
  bool atomic = false;
};

std::vector<Byte> bytes;
uint32_t epoch;
std::vector<uint32_t> fences;  // for products, by thread

std::string name_of(int thread) {
  return thread == SEVERAL ? "several threads" : "thread " + std::to_string(thread);
}

// Whether an access by `who`, of warp `warp`, before came without a barrier in between.
bool is_unordered(const Thread& t, int who, int warp, uint32_t then, uint32_t warp_then) {
  if (who == NOBODY || who == t.id || then != epoch) return false;
  return warp != t.warp || warp_then >= t.warp_epoch;
}

void note(Thread& t, Byte& byte, uint32_t address, Access access, const Op* op, bool is_same) {
  const auto race = [&](const char* first, int who, const char* second) {
    fail("a race in shared memory at " + std::to_string(address) + ": thread " + std::to_string(t.id) + " " + second + " what " +
         name_of(who) + " " + first + ", and no barrier between them");
  };
  if (byte.writer == UNDER_WAY)
    fail("shared memory at " + std::to_string(address) + " is touched while a cp.async to it is under way");
  const bool is_read = access == Access::READ || access == Access::PRODUCT;
  const bool both_atomic = access == Access::ATOMIC && byte.atomic;
  const bool one_write = is_same && op == byte.written_by && byte.writer_warp == t.warp;
  if (!both_atomic && !one_write && is_unordered(t, byte.writer, byte.writer_warp, byte.write_epoch, byte.write_warp_epoch))
    race("wrote", byte.writer, is_read ? "reads" : "writes");
  if (access == Access::PRODUCT && byte.writer >= 0 && fences[byte.writer] == byte.write_fences)
    fail("wgmma reads what thread " + std::to_string(byte.writer) + " wrote without a fence");
  if (is_read) {
    // A warp's own reads ahead of its barrier are done; other warps meet the newer one.
    const bool fresh = byte.reader == NOBODY || byte.read_epoch != epoch ||
                       (byte.reader_warp == t.warp && byte.read_warp_epoch < t.warp_epoch);
    byte.reader = fresh || byte.reader == t.id ? t.id : SEVERAL;
    byte.reader_warp = fresh || byte.reader_warp == t.warp ? t.warp : SEVERAL;
    byte.read_warp_epoch = fresh ? t.warp_epoch : std::max(byte.read_warp_epoch, t.warp_epoch);
    byte.read_epoch = epoch;
    return;
  }
  if (is_unordered(t, byte.reader, byte.reader_warp, byte.read_epoch, byte.read_warp_epoch)) race("read", byte.reader, "writes");
  byte.writer = t.id, byte.writer_warp = t.warp, byte.write_epoch = epoch, byte.write_warp_epoch = t.warp_epoch;
  byte.atomic = access == Access::ATOMIC, byte.written_by = op, byte.write_fences = fences[t.id];
}

void check_boundary(uint64_t address, int bytes) {
  if (address % bytes) fail("an access of " + std::to_string(bytes) + " bytes at an address that is no multiple of them");
}

uint32_t shared_offset(uint32_t address, int count) {
  if (address < memory.shared_begin || address + (uint64_t)count > memory.shared_end)
    fail("an access at " + std::to_string(address) + ", outside of the block's shared memory");
  return address - memory.shared_begin;
}

}  // namespace

unsigned char* global_at(uint64_t address, int count) {
  static size_t last = 0;
  const auto holds = [&](const std::pair<uint64_t, uint64_t>& range) {
    return address >= range.first && address + count <= range.second;
  };
  check_boundary(address, count);
  if (last < memory.global.size() && holds(memory.global[last])) return (unsigned char*)address;
  for (last = 0; last < memory.global.size(); ++last)
    if (holds(memory.global[last])) return (unsigned char*)address;
  fail(address ? "an access outside of the launch's tensors" : "an access through a null pointer");
}

unsigned char* shared_at(Thread& t, uint32_t address, int count, Access access, const Op* op, const unsigned char* value) {
  check_boundary(address, count);
  const uint32_t offset = shared_offset(address, count);
  for (int i = 0; i < count; ++i)
    note(t, bytes[offset + i], address + i, access, op, value && value[i] == memory.shared[offset + i]);
  return &memory.shared[offset];
}

void begin_block_memory() {
  memory.shared.assign(memory.shared_end - memory.shared_begin, POISON);
  bytes.assign(memory.shared.size(), Byte());
  epoch = 1;
  fences.assign(MOST_THREADS, 0);
}

void next_epoch() { ++epoch; }

void end_thread(const Thread& t) {
  if (!t.open_copies.empty() || !t.copies.empty()) fail("a thread ends with cp.async copies not waited for");
  if (!t.open_products.empty() || !t.products.empty()) fail("a thread ends with products of wgmma not waited for");
}

namespace {

unsigned char* local_at(Thread& t, uint64_t offset, int count) {
  check_boundary(offset, count);
  if (offset + count > (uint64_t)memory.local_bytes) fail("an access outside of the thread's local memory");
  return t.local + offset;
}

enum class Space { GENERIC, GLOBAL, SHARED, LOCAL, PARAM };

template <Space SPACE>
unsigned char* place(Thread& t, uint64_t address, int count, Access access, const Op* op = nullptr,
                     const unsigned char* value = nullptr) {
  if constexpr (SPACE == Space::GLOBAL) return global_at(address, count);
  if constexpr (SPACE == Space::SHARED) return shared_at(t, (uint32_t)address, count, access, op, value);
  if constexpr (SPACE == Space::LOCAL) return local_at(t, address, count);
  if constexpr (SPACE == Space::PARAM) {
    if (address + count > memory.params.size()) fail("an access outside of the parameters");
    return &memory.params[address];
  }
  if (address >= LOCAL_BASE) return local_at(t, address - LOCAL_BASE, count);
  if (address >= SHARED_BASE) return shared_at(t, (uint32_t)(address - SHARED_BASE), count, access, op, value);
  return global_at(address, count);
}

// Addresses of shared memory have 32 bits, in registers of 32 or 64.
template <Space SPACE>
uint64_t address_in(const Thread& t, const Op& op, int i) {
  return SPACE == Space::SHARED ? t.get<uint32_t>(op, i) + (uint32_t)op.extra : t.get<uint64_t>(op, i) + op.extra;
}

template <Space SPACE>
void note_traffic_in(const Thread& t, const Op& op, uint64_t address) {
  if (SPACE == Space::LOCAL || SPACE == Space::PARAM || address >= LOCAL_BASE) return;
  note_traffic(t, op, SPACE == Space::SHARED || address >= SHARED_BASE, address, op.bytes * op.width);
}

template <Space SPACE>
void load(Thread& t, const Op& op) {
  const uint64_t address = address_in<SPACE>(t, op, op.width);
  const unsigned char* from = place<SPACE>(t, address, op.bytes * op.width, Access::READ);
  note_traffic_in<SPACE>(t, op, address);
  for (int i = 0; i < op.width; ++i) {
    uint64_t value = 0;
    memcpy(&value, from + i * op.bytes, op.bytes);
    const int above = 64 - 8 * op.bytes;
    t.set<uint64_t>(op, i, op.is_signed ? (uint64_t)((int64_t)(value << above) >> above) : value);
  }
}

template <Space SPACE>
void store(Thread& t, const Op& op) {
  unsigned char value[16];
  for (int i = 0; i < op.width; ++i) memcpy(value + i * op.bytes, &t.registers[op.at[1 + i]], op.bytes);
  const int count = op.bytes * op.width;
  const uint64_t address = address_in<SPACE>(t, op, 0);
  memcpy(place<SPACE>(t, address, count, Access::WRITE, &op, value), value, count);
  note_traffic_in<SPACE>(t, op, address);
}

template <Space SPACE, auto F>
void atomic(Thread& t, const Op& op) {
  unsigned char* at = place<SPACE>(t, address_in<SPACE>(t, op, 1), 4, Access::ATOMIC);
  uint32_t old;
  memcpy(&old, at, 4);
  const uint32_t next = F(old, t.get<uint32_t>(op, 2));
  memcpy(at, &next, 4);
  t.set<uint32_t>(op, 0, old);
}

template <Space SPACE>
void add_space(Table& table, const std::string& space) {
  table["ld" + space] = {load<SPACE>}, table["st" + space] = {store<SPACE>};
  table["atom" + space + ".add.u32"] = {atomic<SPACE, [](uint32_t old, uint32_t by) { return old + by; }>};
  table["atom" + space + ".inc.u32"] = {atomic<SPACE, [](uint32_t old, uint32_t last) { return old >= last ? 0 : old + 1; }>};
}

// As late as it may be: at the wait. Until then what it writes is nobody's.
void copy_async(Thread& t, const Op& op) {
  const uint32_t target = t.get<uint32_t>(op, 0);
  const uint64_t source = t.get<uint64_t>(op, 1);
  const uint32_t bytes_read = t.get<uint32_t>(op, 3);  // the rest is zeros
  if (t.get<uint32_t>(op, 2) != 16 || bytes_read > 16) fail("a cp.async of another size");
  check_boundary(source, 16);
  if (bytes_read) global_at(source, 16);
  if (bytes_read) note_traffic(t, op, false, source, 16);
  memset(shared_at(t, target, 16, Access::WRITE), POISON, 16);
  for (int i = 0; i < 16; ++i) bytes[shared_offset(target, 16) + i].writer = UNDER_WAY;
  t.open_copies.push_back({target, source, (int)bytes_read});
}

void wait_copies(Thread& t, const Op& op) {
  const size_t left = t.get<uint32_t>(op, 0);
  while (t.copies.size() > left) {
    for (const Copy& copy : t.copies.front()) {
      const uint32_t offset = shared_offset(copy.target, 16);
      for (int i = 0; i < 16; ++i) bytes[offset + i].writer = t.id;
      unsigned char* to = shared_at(t, copy.target, 16, Access::WRITE);
      memset(to, 0, 16);
      if (copy.bytes) memcpy(to, (const void*)copy.source, copy.bytes);
    }
    t.copies.erase(t.copies.begin());
  }
}

template <uint64_t BASE>
void to_generic(Thread& t, const Op& op) { t.set<uint64_t>(op, 0, BASE + t.get<uint64_t>(op, 1)); }

// Another address than of that space is what PTX does not define.
template <uint64_t BASE, uint64_t END>
void from_generic(Thread& t, const Op& op) {
  const uint64_t address = t.get<uint64_t>(op, 1);
  if (address < BASE || address >= END) fail("cvta.to of an address in another space");
  t.set<uint64_t>(op, 0, address - BASE);
}

}  // namespace

void add_memory(Table& table) {
  add_space<Space::GENERIC>(table, ""), add_space<Space::GLOBAL>(table, ".global"), add_space<Space::SHARED>(table, ".shared");
  add_space<Space::LOCAL>(table, ".local"), add_space<Space::PARAM>(table, ".param");
  table["cvta.shared.u64"] = {to_generic<SHARED_BASE>}, table["cvta.local.u64"] = {to_generic<LOCAL_BASE>};
  table["cvta.global.u64"] = {to_generic<0>}, table["cvta.to.global.u64"] = {from_generic<0, SHARED_BASE>};
  table["cvta.to.shared.u64"] = {from_generic<SHARED_BASE, LOCAL_BASE>};
  table["cvta.to.local.u64"] = {from_generic<LOCAL_BASE, 2 * LOCAL_BASE>};
  table["cp.async.cg.shared.global"] = table["cp.async.cg.shared.global.L2::cache_hint"] = {copy_async};
  table["cp.async.commit_group"] = {[](Thread& t, const Op&) {
    t.copies.push_back(std::move(t.open_copies));
    t.open_copies.clear();
  }};
  table["cp.async.wait_group"] = {wait_copies};
  table["fence.proxy.async.shared::cta"] = {[](Thread& t, const Op&) { ++fences[t.id]; }};
  table["createpolicy.fractional.L2::evict_first.b64"] = {[](Thread& t, const Op& op) { t.set<uint64_t>(op, 0, 0); }};
}

}  // namespace ptx
