// Numbers and predicates of one thread.
#include <cfenv>
#include <cmath>
#include <limits>

#include "machine.h"

namespace ptx {
namespace {

template <class R, class A, auto F>
void unary(Thread& t, const Op& op) { t.set<R>(op, 0, F(t.get<A>(op, 1))); }
template <class R, class A, auto F>
void binary(Thread& t, const Op& op) { t.set<R>(op, 0, F(t.get<A>(op, 1), t.get<A>(op, 2))); }
template <class R, class A, auto F>
void ternary(Thread& t, const Op& op) { t.set<R>(op, 0, F(t.get<A>(op, 1), t.get<A>(op, 2), t.get<A>(op, 3))); }

template <class T>
using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;

template <class T>
T upper_half(T a, T b) { return T(Wide<T>(a) * Wide<T>(b) >> 8 * sizeof(T)); }

template <class T>
T divide(T a, T b) {
  if (!b || (std::is_signed_v<T> && b == T(-1) && a == std::numeric_limits<T>::min())) fail("a division that PTX does not define");
  return a / b;
}

template <class T>
void add_integers(Table& table, const std::string& type) {
  table["add." + type] = {binary<T, T, [](T a, T b) { return T(a + b); }>};
  table["sub." + type] = {binary<T, T, [](T a, T b) { return T(a - b); }>};
  table["mul.lo." + type] = {binary<T, T, [](T a, T b) { return T(a * b); }>};
  table["mad.lo." + type] = {ternary<T, T, [](T a, T b, T c) { return T(a * b + c); }>};
  table["mul.hi." + type] = {binary<T, T, upper_half<T>>};
  table["div." + type] = {binary<T, T, divide<T>>};
  table["rem." + type] = {binary<T, T, [](T a, T b) { return T(a - divide(a, b) * b); }>};
  table["min." + type] = {binary<T, T, [](T a, T b) { return a < b ? a : b; }>};
  table["max." + type] = {binary<T, T, [](T a, T b) { return b < a ? a : b; }>};
  table["neg." + type] = {unary<T, T, [](T a) { return T(-a); }>};
  table["shr." + type] = {[](Thread& t, const Op& op) {  // by more bits than there are: as by all of them
    const uint32_t by = t.get<uint32_t>(op, 2), bits = 8 * sizeof(T);
    const T a = t.get<T>(op, 1);
    t.set<T>(op, 0, by < bits ? T(a >> by) : a < 0 ? T(-1) : T(0));
  }};
}

template <class T, class Product>
void add_wide(Table& table, const std::string& type) {
  table["mul.wide." + type] = {binary<Product, T, [](T a, T b) { return Product(a) * Product(b); }>};
  table["mad.wide." + type] = {[](Thread& t, const Op& op) {
    t.set<Product>(op, 0, Product(t.get<T>(op, 1)) * Product(t.get<T>(op, 2)) + t.get<Product>(op, 3));
  }};
}

template <class T>
void add_bits(Table& table, const std::string& type) {
  table["and." + type] = {binary<T, T, [](T a, T b) { return T(a & b); }>};
  table["or." + type] = {binary<T, T, [](T a, T b) { return T(a | b); }>};
  table["xor." + type] = {binary<T, T, [](T a, T b) { return T(a ^ b); }>};
  table["not." + type] = {unary<T, T, [](T a) { return T(~a); }>};
  table["shl." + type] = {[](Thread& t, const Op& op) {
    const uint32_t by = t.get<uint32_t>(op, 2);
    t.set<T>(op, 0, by < 8 * sizeof(T) ? T(t.get<T>(op, 1) << by) : T(0));
  }};
  table["bfi." + type] = {[](Thread& t, const Op& op) {
    const T a = t.get<T>(op, 1), b = t.get<T>(op, 2);
    const uint32_t from = t.get<uint32_t>(op, 3) & 0xff, length = t.get<uint32_t>(op, 4) & 0xff, bits = 8 * sizeof(T);
    T mask = 0;
    for (uint32_t i = from; i < from + length && i < bits; ++i) mask |= T(1) << i;
    t.set<T>(op, 0, T((b & ~mask) | ((from < bits ? a << from : T(0)) & mask)));
  }};
}

// flushed: denormal numbers count as zero, before and after.
template <class T, bool FLUSHED>
T clean(T x) {
  if constexpr (FLUSHED && sizeof(T) == 4) return flush(x);
  return x;
}
template <class T, bool FLUSHED, auto F>
void float_unary(Thread& t, const Op& op) { t.set<T>(op, 0, clean<T, FLUSHED>(F(clean<T, FLUSHED>(t.get<T>(op, 1))))); }
template <class T, bool FLUSHED, auto F>
void float_binary(Thread& t, const Op& op) {
  t.set<T>(op, 0, clean<T, FLUSHED>(F(clean<T, FLUSHED>(t.get<T>(op, 1)), clean<T, FLUSHED>(t.get<T>(op, 2)))));
}
template <class T, bool FLUSHED, auto F>
void float_ternary(Thread& t, const Op& op) {
  const T a = clean<T, FLUSHED>(t.get<T>(op, 1)), b = clean<T, FLUSHED>(t.get<T>(op, 2)), c = clean<T, FLUSHED>(t.get<T>(op, 3));
  t.set<T>(op, 0, clean<T, FLUSHED>(F(a, b, c)));
}

float fma_downward(float a, float b, float c) {
  const int before = std::fegetround();
  std::fesetround(FE_DOWNWARD);
  volatile float x = a, y = b, z = c;  // computed here, not before
  volatile float result = std::fma(x, y, z);
  std::fesetround(before);
  return result;
}

float add_toward_zero(float a, float b) {
  const int before = std::fegetround();
  std::fesetround(FE_TOWARDZERO);
  volatile float x = a, y = b;
  volatile float result = x + y;
  std::fesetround(before);
  return result;
}

// What an approximation gives: up to two units in the last place beside the exact number, as CUDA's guide has it; how many
// follows from the operand's bits.
template <class T>
T approximate(T exact, double operand) {
  if constexpr (std::is_same_v<T, float>) {
    if (!std::isnormal(exact) || std::isinf(operand)) return exact;
    const int32_t off = (int)((__builtin_bit_cast(uint64_t, operand) * 0x9e3779b97f4a7c15ull >> 32) % 5) - 2;
    const float beside = __builtin_bit_cast(float, __builtin_bit_cast(int32_t, exact) + off);
    if (std::isnormal(beside)) return beside;
  }
  return exact;
}

// By 2^126 and more it is 0, or NaN.
template <class T>
T approximate_quotient(T a, T b) {
  if (std::fabs(b) > 0x1p126 && !std::isinf(b)) return std::isinf(a) ? NAN : std::copysign(T(0), a * std::copysign(T(1), b));
  return approximate(T(a / b), (double)a + 3.0 * b);
}

template <class T, bool FLUSHED>
void add_floats(Table& table, const std::string& type) {
  for (const char* rounding : {"", "rn."}) {
    const std::string suffix = rounding + type;
    table["add." + suffix] = {float_binary<T, FLUSHED, [](T a, T b) { return a + b; }>};
    table["sub." + suffix] = {float_binary<T, FLUSHED, [](T a, T b) { return a - b; }>};
    table["mul." + suffix] = {float_binary<T, FLUSHED, [](T a, T b) { return a * b; }>};
  }
  table["fma.rn." + type] = {float_ternary<T, FLUSHED, [](T a, T b, T c) { return std::fma(a, b, c); }>};
  table["div.rn." + type] = {float_binary<T, FLUSHED, [](T a, T b) { return a / b; }>};
  table["rcp.rn." + type] = {float_unary<T, FLUSHED, [](T a) { return T(1) / a; }>};
  table["sqrt.rn." + type] = {float_unary<T, FLUSHED, [](T a) { return std::sqrt(a); }>};
  table["div.approx." + type] = {float_binary<T, FLUSHED, approximate_quotient<T>>};
  table["rcp.approx." + type] = {float_unary<T, FLUSHED, [](T a) { return approximate(T(1) / a, a); }>};
  table["sqrt.approx." + type] = {float_unary<T, FLUSHED, [](T a) { return approximate(std::sqrt(a), a); }>};
  table["rsqrt.approx." + type] = {float_unary<T, FLUSHED, [](T a) { return approximate(T(1 / std::sqrt((double)a)), a); }>};
  table["ex2.approx." + type] = {
      float_unary<T, FLUSHED, [](T a) { return a == 0 ? T(1) : approximate(T(std::exp2((double)a)), a); }>};
  table["lg2.approx." + type] = {float_unary<T, FLUSHED, [](T a) { return approximate(T(std::log2((double)a)), a); }>};
  table["neg." + type] = {float_unary<T, FLUSHED, [](T a) { return -a; }>};
  table["abs." + type] = {float_unary<T, FLUSHED, [](T a) { return std::fabs(a); }>};
  // Of a number and NaN, the number; -0 is less than +0.
  table["min." + type] = {float_binary<T, FLUSHED, [](T a, T b) { return a == b && std::signbit(b) ? b : std::fmin(a, b); }>};
  table["max." + type] = {float_binary<T, FLUSHED, [](T a, T b) { return a == b && std::signbit(a) ? b : std::fmax(a, b); }>};
}

template <class T, bool FLUSHED, auto F>
void compare(Thread& t, const Op& op) {
  t.set<uint64_t>(op, 0, F(clean<T, FLUSHED>(t.get<T>(op, 1)), clean<T, FLUSHED>(t.get<T>(op, 2))));
}

template <class T, bool FLUSHED = false>
void add_comparisons(Table& table, const std::string& type) {
  table["setp.eq." + type] = {compare<T, FLUSHED, [](T a, T b) { return a == b; }>};
  table["setp.lt." + type] = {compare<T, FLUSHED, [](T a, T b) { return a < b; }>};
  table["setp.le." + type] = {compare<T, FLUSHED, [](T a, T b) { return a <= b; }>};
  table["setp.gt." + type] = {compare<T, FLUSHED, [](T a, T b) { return b < a; }>};
  table["setp.ge." + type] = {compare<T, FLUSHED, [](T a, T b) { return b <= a; }>};
  if constexpr (std::is_integral_v<T>) {
    table["setp.ne." + type] = {compare<T, FLUSHED, [](T a, T b) { return a != b; }>};
  } else {  // ne is false for NaN; those that end in u are true
    table["setp.ne." + type] = {compare<T, FLUSHED, [](T a, T b) { return a < b || b < a; }>};
    table["setp.equ." + type] = {compare<T, FLUSHED, [](T a, T b) { return !(a < b || b < a); }>};
    table["setp.neu." + type] = {compare<T, FLUSHED, [](T a, T b) { return a != b; }>};
    table["setp.ltu." + type] = {compare<T, FLUSHED, [](T a, T b) { return !(b <= a); }>};
    table["setp.leu." + type] = {compare<T, FLUSHED, [](T a, T b) { return !(b < a); }>};
    table["setp.gtu." + type] = {compare<T, FLUSHED, [](T a, T b) { return !(a <= b); }>};
    table["setp.geu." + type] = {compare<T, FLUSHED, [](T a, T b) { return !(a < b); }>};
    table["setp.num." + type] = {compare<T, FLUSHED, [](T a, T b) { return a == a && b == b; }>};
    table["setp.nan." + type] = {compare<T, FLUSHED, [](T a, T b) { return a != a || b != b; }>};
  }
}

// Of bits that any type may hold.
template <class T>
void add_moves(Table& table, const std::string& type) {
  table["selp." + type] = {[](Thread& t, const Op& op) { t.set<T>(op, 0, t.get<T>(op, t.get<uint64_t>(op, 3) & 1 ? 1 : 2)); }};
  table["mov." + type] = {[](Thread& t, const Op& op) { t.set<T>(op, 0, t.get<T>(op, 1)); }};
}

uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t choice = selector >> 4 * i & 0xf;
    uint32_t byte = bytes >> 8 * (choice & 7) & 0xff;
    if (choice & 8) byte = byte & 0x80 ? 0xff : 0;  // its sign, eight times
    result |= byte << 8 * i;
  }
  return result;
}

// Two numbers in a word.
template <auto FROM, auto TO, auto F, int OPERANDS>
void pairs(Thread& t, const Op& op) {
  uint32_t result = 0;
  for (int half = 0; half < 2; ++half) {
    double x[3] = {};
    for (int i = 0; i < OPERANDS; ++i) x[i] = FROM(t.get<uint32_t>(op, 1 + i) >> 16 * half & 0xffff);
    result |= (uint32_t)TO(F(x[0], x[1], x[2])) << 16 * half;
  }
  t.set<uint32_t>(op, 0, result);
}

template <auto FROM, auto TO>
void add_pairs(Table& table, const std::string& type) {
  for (const char* rounding : {"", "rn."}) {
    const std::string suffix = rounding + type;
    table["add." + suffix] = {pairs<FROM, TO, [](double a, double b, double) { return a + b; }, 2>};
    table["sub." + suffix] = {pairs<FROM, TO, [](double a, double b, double) { return a - b; }, 2>};
    table["mul." + suffix] = {pairs<FROM, TO, [](double a, double b, double) { return a * b; }, 2>};
  }
  table["fma.rn." + type] = {pairs<FROM, TO, [](double a, double b, double c) { return a * b + c; }, 3>};
}

}  // namespace

void add_arithmetic(Table& table) {
  add_integers<uint16_t>(table, "u16"), add_integers<int16_t>(table, "s16");
  add_integers<uint32_t>(table, "u32"), add_integers<int32_t>(table, "s32");
  add_integers<uint64_t>(table, "u64"), add_integers<int64_t>(table, "s64");
  add_wide<int16_t, int32_t>(table, "s16"), add_wide<uint16_t, uint32_t>(table, "u16");
  add_wide<int32_t, int64_t>(table, "s32"), add_wide<uint32_t, uint64_t>(table, "u32");
  add_bits<uint16_t>(table, "b16"), add_bits<uint32_t>(table, "b32"), add_bits<uint64_t>(table, "b64");
  add_floats<float, false>(table, "f32"), add_floats<float, true>(table, "ftz.f32"), add_floats<double, false>(table, "f64");
  add_comparisons<uint16_t>(table, "u16"), add_comparisons<int16_t>(table, "s16"), add_comparisons<uint16_t>(table, "b16");
  add_comparisons<uint32_t>(table, "u32"), add_comparisons<int32_t>(table, "s32"), add_comparisons<uint32_t>(table, "b32");
  add_comparisons<uint64_t>(table, "u64"), add_comparisons<int64_t>(table, "s64"), add_comparisons<uint64_t>(table, "b64");
  add_comparisons<float>(table, "f32"), add_comparisons<float, true>(table, "ftz.f32"), add_comparisons<double>(table, "f64");
  for (const char* letter : {"b", "u", "s"}) {
    add_moves<uint16_t>(table, letter + std::string("16"));
    add_moves<uint32_t>(table, letter + std::string("32"));
    add_moves<uint64_t>(table, letter + std::string("64"));
  }
  add_moves<uint32_t>(table, "f32"), add_moves<uint64_t>(table, "f64"), add_moves<uint64_t>(table, "pred");
  add_pairs<from_half, to_half>(table, "f16x2"), add_pairs<from_bf16, to_bf16>(table, "bf16x2");

  using Bit = uint64_t;
  table["and.pred"] = {binary<Bit, Bit, [](Bit a, Bit b) { return a & b; }>};
  table["or.pred"] = {binary<Bit, Bit, [](Bit a, Bit b) { return a | b; }>};
  table["xor.pred"] = {binary<Bit, Bit, [](Bit a, Bit b) { return a ^ b; }>};
  table["not.pred"] = {unary<Bit, Bit, [](Bit a) { return a ^ 1; }>};
  table["clz.b32"] = {unary<uint32_t, uint32_t, [](uint32_t a) { return a ? __builtin_clz(a) : 32; }>};
  table["popc.b32"] = {unary<uint32_t, uint32_t, [](uint32_t a) { return uint32_t(__builtin_popcount(a)); }>};
  table["prmt.b32"] = {ternary<uint32_t, uint32_t, permuted>};
  table["fma.rm.ftz.f32"] = {float_ternary<float, true, fma_downward>};
  table["add.rz.ftz.f32"] = {float_binary<float, true, add_toward_zero>};
  table["copysign.f32"] = {binary<float, float, [](float sign, float value) { return std::copysign(value, sign); }>};
  // Only the upper half is computed.
  table["rcp.approx.ftz.f64"] = {
      unary<uint64_t, double, [](double a) { return __builtin_bit_cast(uint64_t, 1 / a) & ~0xffffffffull; }>};

  table["bra"] = {[](Thread& t, const Op& op) { t.pc = op.extra; }};
  table["ret"] = {nullptr, nullptr, Kind::EXIT};
  // What orders memory among blocks, or tells other kernels, has nothing to do where blocks run one after another.
  const Run nothing = [](Thread&, const Op&) {};
  for (const char* name : {"membar.gl", "membar.sys", "nanosleep.u32", "griddepcontrol.wait", "griddepcontrol.launch_dependents"})
    table[name] = {nothing};
}

}  // namespace ptx
