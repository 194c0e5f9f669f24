// Products of matrices: mma.sync over a warp, wgmma over four. Which lane holds which element is the PTX ISA's (9.7.14, 9.7.15).
#include <algorithm>
#include <cmath>

#include "machine.h"

namespace ptx {
namespace {

using Threads = std::vector<Thread*>;

struct Place {
  int row, column;
};
// Of element i of a lane's part of A (rows x depth), B (depth x 8) and of the sums (rows x 8).
struct Shape {
  int depth, a, b, d;  // a, b, d: elements of a lane
  Place (*of_a)(int lane, int i);
  Place (*of_b)(int lane, int i);
};

Place sum_place(int lane, int i) { return {lane / 4 + 8 * (i / 2), lane % 4 * 2 + i % 2}; }

// Two 16-bit elements a register.
constexpr Shape M16N8K16 = {16, 8, 4, 4,
                            [](int lane, int i) { return Place{lane / 4 + 8 * (i / 2 % 2), lane % 4 * 2 + i % 2 + 8 * (i / 4)}; },
                            [](int lane, int i) { return Place{lane % 4 * 2 + i % 2 + 8 * (i / 2), lane / 4}; }};
constexpr Shape M16N8K8 = {8, 4, 2, 4, [](int lane, int i) { return Place{lane / 4 + 8 * (i / 2), lane % 4 * 2 + i % 2}; },
                           [](int lane, int i) { return Place{lane % 4 * 2 + i, lane / 4}; }};
// Four 8-bit ones.
constexpr Shape M8N8K16_BYTES = {16, 4, 4, 2, [](int lane, int i) { return Place{lane / 4, lane % 4 * 4 + i}; },
                                 [](int lane, int i) { return Place{lane % 4 * 4 + i, lane / 4}; }};
constexpr Shape M16N8K16_BYTES = {16, 8, 4, 4,
                                  [](int lane, int i) { return Place{lane / 4 + 8 * (i / 4), lane % 4 * 4 + i % 4}; },
                                  [](int lane, int i) { return Place{lane % 4 * 4 + i, lane / 4}; }};
constexpr Shape M16N8K32_BYTES = {
    32, 16, 8, 4,
    [](int lane, int i) { return Place{lane / 4 + 8 * (i / 4 % 2), lane % 4 * 4 + i % 4 + 16 * (i / 8)}; },
    [](int lane, int i) { return Place{lane % 4 * 4 + i % 4 + 16 * (i / 4), lane / 4}; }};

float of_byte(int8_t x) { return x; }

template <class Bits>
Bits element(const Thread& t, const Op& op, int first, int i) {
  const uint32_t word = t.get<uint32_t>(op, first + i / (4 / sizeof(Bits)));
  return word >> 8 * sizeof(Bits) * (i % (4 / sizeof(Bits)));
}

// How tensor cores add, which the PTX ISA leaves open: as Ampere's do (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor
// cores"), for Hopper's lose less. Eight products at a time and the sum so far, each cut off one bit behind the last of the
// largest, and what they add up to cut off, not rounded, to a float. So long sums drift towards zero.
constexpr int ADDED_AT_ONCE = 8;

float add_products(float sum, const double* products, int count) {
  for (int first = 0; first < count; first += ADDED_AT_ONCE) {
    const double* const last = products + std::min(first + ADDED_AT_ONCE, count);
    double most = std::fabs(sum), exact = sum;
    for (const double* product = products + first; product < last; ++product) {
      most = std::max(most, std::fabs(*product));
      exact += *product;
    }
    if (!std::isfinite(exact) || most == 0) {
      sum = exact;
      continue;
    }
    const double unit = __builtin_bit_cast(double, __builtin_bit_cast(uint64_t, most) & 0x7ffull << 52) * 0x1p-24;
    const double in_units = 1 / unit;
    int64_t units = sum * in_units;
    for (const double* product = products + first; product < last; ++product) units += (int64_t)(*product * in_units);
    const double total = units * unit;
    sum = total;
    if (std::isfinite(sum) && std::fabs(sum) > std::fabs(total)) sum = std::nextafter(sum, 0.0f);
  }
  return sum;
}

// Sums of integers wrap.
int32_t add_products(int32_t sum, const double* products, int count) {
  int64_t total = sum;
  for (int i = 0; i < count; ++i) total += (int64_t)products[i];
  return (int32_t)total;
}

template <const Shape& SHAPE, class Sum, class Bits, auto NUMBER>
void multiply(Threads& threads, const Op& op) {
  if (threads.size() != WARP) fail("mma.sync without all lanes");
  const int words_a = SHAPE.a * sizeof(Bits) / 4, words_b = SHAPE.b * sizeof(Bits) / 4;
  const int at_a = SHAPE.d, at_b = at_a + words_a, at_c = at_b + words_b;
  double a[16][32], b[32][8];
  for (const Thread* t : threads) {
    for (int i = 0; i < SHAPE.a; ++i) {
      const Place place = SHAPE.of_a(t->lane, i);
      a[place.row][place.column] = NUMBER(element<Bits>(*t, op, at_a, i));
    }
    for (int i = 0; i < SHAPE.b; ++i) {
      const Place place = SHAPE.of_b(t->lane, i);
      b[place.row][place.column] = NUMBER(element<Bits>(*t, op, at_b, i));
    }
  }
  for (Thread* t : threads)
    for (int i = 0; i < SHAPE.d; ++i) {
      const Place place = sum_place(t->lane, i);
      double products[SHAPE.depth];
      for (int k = 0; k < SHAPE.depth; ++k) products[k] = a[place.row][k] * b[k][place.column];
      t->set<Sum>(op, i, add_products(t->get<Sum>(op, at_c + i), products, SHAPE.depth));
    }
}

// 16 bytes of B, eight elements of row n from depth 8 * chunk on: a K-major matrix as its descriptor has it (9.7.15.5.1.2).
const unsigned char* row_of_b(Thread& t, uint64_t descriptor, int n, int chunk) {
  const auto field = [&](int first) { return (uint32_t)(descriptor >> first & 0x3fff) << 4; };
  const int pattern = descriptor >> 62, bits = pattern ? 4 - pattern : 0;  // 1, 2, 3: rows of 128, 64, 32 bytes
  if (descriptor >> 49 & 7) fail("wgmma: a base offset");
  uint32_t address = field(0) + n / 8 * field(32) + n % 8 * (16u << bits) + chunk * (bits ? 16 : field(16));
  address ^= (address >> 7 & ((1u << bits) - 1)) << 4;
  return shared_at(t, address, 16, Access::PRODUCT);
}

std::vector<unsigned char> bytes_of_b(Thread& t, uint64_t descriptor, int columns) {
  std::vector<unsigned char> bytes(columns * 32);
  for (int n = 0; n < columns; ++n)
    for (int chunk = 0; chunk < 2; ++chunk) memcpy(&bytes[n * 32 + chunk * 16], row_of_b(t, descriptor, n, chunk), 16);
  return bytes;
}

// The sums that a product adds to, taken out of their registers by the first that is under way.
Sums& sums_of(Thread& t, const Op& op, int count) {
  const std::vector<int32_t> registers(op.at, op.at + count);
  for (Sums& sums : t.sums)
    if (sums.registers == registers) return sums;
  Sums sums = {registers, {}};
  for (int i = 0; i < count; ++i) {
    sums.values.push_back(t.get<float>(op, i));
    t.set<uint32_t>(op, i, ~0u);
  }
  t.sums.push_back(sums);
  return t.sums.back();
}

bool is_under_way(const Thread& t, const Sums& sums) {
  const auto adds = [&](const Product& product) { return product.op->at[0] == sums.registers[0]; };
  const auto has_one = [&](const std::vector<Product>& group) { return std::any_of(group.begin(), group.end(), adds); };
  return has_one(t.open_products) || std::any_of(t.products.begin(), t.products.end(), has_one);
}

void put_back(Thread& t, const Sums& sums) {
  for (size_t i = 0; i < sums.registers.size(); ++i) {
    uint64_t& place = t.registers[sums.registers[i]];
    if (place != ~0u) fail("wgmma: sums are written under way");
    place = 0;
    memcpy(&place, &sums.values[i], sizeof(float));
  }
}

// Of the 16 rows of a warp, in tiles of eight columns.
template <int COLUMNS, auto NUMBER>
void end_product(Threads& lanes, const std::vector<const Product*>& products) {
  const Op& op = *products[0]->op;
  constexpr int SUMS = COLUMNS / 2;
  const std::vector<unsigned char>& bytes = products[0]->b;
  if (bytes != bytes_of_b(*lanes[0], lanes[0]->get<uint64_t>(op, SUMS + 4), COLUMNS)) fail("wgmma: B changes under way");
  double a[16][16], b[16][COLUMNS];
  for (Thread* t : lanes)
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = products[t->lane]->a[i / 2];
      if (word != t->get<uint32_t>(op, SUMS + i / 2)) fail("wgmma: registers of A change under way");
      const Place place = M16N8K16.of_a(t->lane, i);
      a[place.row][place.column] = NUMBER(word >> 16 * (i % 2));
    }
  for (int n = 0; n < COLUMNS; ++n)
    for (int k = 0; k < 16; ++k) b[k][n] = NUMBER(bytes[n * 32 + 2 * k] | bytes[n * 32 + 2 * k + 1] << 8);
  for (Thread* t : lanes) {
    std::vector<float>& sums = sums_of(*t, op, SUMS).values;
    for (int i = 0; i < SUMS; ++i) {
      const Place place = sum_place(t->lane, i % 4);
      double products[16];
      for (int k = 0; k < 16; ++k) products[k] = a[place.row][k] * b[k][i / 4 * 8 + place.column];
      sums[i] = add_products(sums[i], products, 16);
    }
  }
}

// d[64 x COLUMNS] += a[64 x 16] b[16 x COLUMNS]: operands are the sums, four registers of A, B's descriptor, four immediates.
template <int COLUMNS, auto NUMBER>
void begin_product(Threads& threads, const Op& op) {
  if (threads.size() != WARPGROUP * WARP) fail("wgmma without all threads of a warpgroup");
  constexpr int SUMS = COLUMNS / 2, AT_B = SUMS + 4;
  const uint64_t descriptor = threads[0]->get<uint64_t>(op, AT_B);
  for (Thread* t : threads) {
    if (t->get<uint64_t>(op, AT_B) != descriptor) fail("wgmma: threads of a warpgroup have other matrices");
    // Sums are added to, neither operand is negated, B is not transposed: the only ones in use.
    for (int i = 0; i < 4; ++i)
      if (t->get<uint32_t>(op, AT_B + 1 + i) != (i < 3)) fail("wgmma: scales or a transposition");
    Product product = {&op, end_product<COLUMNS, NUMBER>, {}, {}};
    for (int i = 0; i < 4; ++i) product.a[i] = t->get<uint32_t>(op, SUMS + i);
    if (t->lane == 0) product.b = bytes_of_b(*t, descriptor, COLUMNS);  // one lane looks for its warp
    t->open_products.push_back(std::move(product));
    sums_of(*t, op, SUMS);
  }
}

void wait_products(Threads& lanes, const Op& op) {
  if (lanes.size() != WARP) fail("wgmma.wait_group without all lanes");
  const size_t left = lanes[0]->get<uint32_t>(op, 0);
  while (lanes[0]->products.size() > left) {
    for (Thread* t : lanes)
      if (t->products.empty() || t->products[0].size() != lanes[0]->products[0].size()) fail("wgmma: lanes began other products");
    for (size_t i = 0; i < lanes[0]->products[0].size(); ++i) {
      std::vector<const Product*> products;
      for (Thread* t : lanes) products.push_back(&t->products[0][i]);
      products[0]->end(lanes, products);
    }
    for (Thread* t : lanes) t->products.erase(t->products.begin());
  }
  for (Thread* t : lanes)
    std::erase_if(t->sums, [&](const Sums& sums) { return !is_under_way(*t, sums) && (put_back(*t, sums), true); });
}

void commit_products(Thread& t, const Op&) {
  t.products.push_back(std::move(t.open_products));
  t.open_products.clear();
}

template <int COLUMNS>
void add_group(Table& table) {
  const std::string name = "wgmma.mma_async.sync.aligned.m64n" + std::to_string(COLUMNS) + "k16.f32.";
  table[name + "bf16.bf16"] = {nullptr, begin_product<COLUMNS, from_bf16>, Kind::WARPGROUP};
  table[name + "f16.f16"] = {nullptr, begin_product<COLUMNS, from_half>, Kind::WARPGROUP};
}

}  // namespace

void add_products(Table& table) {
  const auto product = [&](const char* name, Meet meet) {
    table[std::string("mma.sync.aligned.") + name] = {nullptr, meet, Kind::WARP};
  };
  product("m16n8k16.row.col.f32.bf16.bf16.f32", multiply<M16N8K16, float, uint16_t, from_bf16>);
  product("m16n8k16.row.col.f32.f16.f16.f32", multiply<M16N8K16, float, uint16_t, from_half>);
  product("m16n8k8.row.col.f32.f16.f16.f32", multiply<M16N8K8, float, uint16_t, from_half>);
  product("m8n8k16.row.col.s32.s8.s8.s32", multiply<M8N8K16_BYTES, int32_t, int8_t, of_byte>);
  product("m16n8k16.row.col.s32.s8.s8.s32", multiply<M16N8K16_BYTES, int32_t, int8_t, of_byte>);
  product("m16n8k32.row.col.s32.s8.s8.s32", multiply<M16N8K32_BYTES, int32_t, int8_t, of_byte>);
  product("m16n8k32.row.col.f32.e4m3.e4m3.f32", multiply<M16N8K32_BYTES, float, uint8_t, from_e4m3>);
  add_group<64>(table), add_group<96>(table), add_group<128>(table), add_group<192>(table);
  table["wgmma.fence.sync.aligned"] = {[](Thread&, const Op&) {}};
  table["wgmma.commit_group.sync.aligned"] = {commit_products};
  table["wgmma.wait_group.sync.aligned"] = {nullptr, wait_products, Kind::WARP};
}

}  // namespace ptx
