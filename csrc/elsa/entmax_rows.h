// The mathematics of rows of scores: weights, thresholds, and lists of the keys that weigh
// something.
#pragma once

#include "simd.h"
#include "tiles.h"

namespace elsa {
namespace {

// alpha = 1.5 and alpha = 2 need neither logarithms nor exponentials.
enum class Form { kHalf, kOne, kAny };

constexpr float kEps = 0x1p-23f;
constexpr float kSlack = 1.0f + 4 * kEps;  // of limits, for the rounding of what is compared

ELSA_INLINE Floats minimum(Floats a, Floats b) { return a < b ? a : b; }
ELSA_INLINE Floats magnitude(Floats x) {
  return reinterpret_cast<Floats>(reinterpret_cast<Ints>(x) & 0x7fffffff);
}
ELSA_INLINE Floats square_root(Floats x) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_sqrt_ps(reinterpret_cast<__m512>(x)));
#elif defined(__AVX2__)
  return reinterpret_cast<Floats>(_mm256_sqrt_ps(reinterpret_cast<__m256>(x)));
#else
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}
ELSA_INLINE bool any(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(mask)) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found |= mask[i];
  return found != 0;
#endif
}
ELSA_INLINE float sum_of(Floats x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// A sum in chains of at most 64 terms.
class Sum {
 public:
  ELSA_INLINE void add(Floats x) {
    chain_ += x;
    if (++terms_ % 64 == 0) fold();
  }
  ELSA_INLINE Floats lanes() const { return total_ + chain_; }

 private:
  ELSA_INLINE void fold() {
    total_ += chain_;
    chain_ = Floats{};
  }
  Floats chain_ = {}, total_ = {};
  int64_t terms_ = 0;
};

// a = alpha - 1 and what is derived from it.
struct Exponent {
  explicit Exponent(double value)
      : form(value == 0.5   ? Form::kHalf
             : value == 1.0 ? Form::kOne
                            : Form::kAny),
        exact(value),
        a(static_cast<float>(value)),
        to_log2(static_cast<float>(1.44269504088896340736 / value)),
        reach(static_cast<float>(1.0 / value) * kSlack) {
    // A product of the high part and a float's exponent is exact.
    const uint32_t mask = 0xffff0000u;
    uint32_t bits;
    __builtin_memcpy(&bits, &a, 4);
    bits &= mask;
    __builtin_memcpy(&high, &bits, 4);
    low = static_cast<float>(value - static_cast<double>(high));
    // A step of relative size d leaves an error of the order of d^(1 / a), of d^2 for a <= 1 / 2.
    const double power = value < 0.5 ? 0.5 : value;
    const double found = __builtin_pow(static_cast<double>(kEps), power) / 16;
    const double least = value > 1.0 ? 1.0 : 8.0;  // of rounding
    close = static_cast<float>(found > least * kEps ? found : least * kEps);
  }

  // x^-a for x >= 1.
  ELSA_INLINE Floats inverse_power(Floats x) const {
    if (form == Form::kHalf) return 1.0f / square_root(x);
    if (form == Form::kOne) return 1.0f / x;
    // x = 2^e m, m in [sqrt(1/2), sqrt(2)): the whole part of a e is an exponent, so that what
    // goes through exp2 is small and keeps its digits.
    const Ints bits = reinterpret_cast<Ints>(reinterpret_cast<Bits>(x) - 0x3f3504f3u);
    const Floats e = __builtin_convertvector(bits >> 23, Floats);
    const Floats m = reinterpret_cast<Floats>((bits & 0x007fffff) + 0x3f3504f3);
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
    const Floats product = e * high;
    const Floats whole = (product + kRound) - kRound;
    const Floats part = (product - whole) + (e * low + log_positive(m) * (kLog2E * a));
    // part lies in [-2.1, 2.1]: 2^-(part + 3) is 2^-part / 8
    const Floats power = exp2_nonpositive(-(part + 3.0f));
    const Ints scale = (130 - __builtin_convertvector(whole, Ints)) << 23;
    const Floats found = power * reinterpret_cast<Floats>(scale);
    return x == x ? found : x;
  }

  Form form;
  double exact;
  float a, to_log2;
  float reach;  // from this distance below the maximum on no key weighs anything, at any slope
  float close, high, low;
};

// Of scores at the distances x <= 0 from the maximum: r = v^(1 / a), and r / v.
struct Powers {
  Floats v, r, over;
};
template <Form F>
ELSA_INLINE Powers powers(Floats x, Floats slope, const Exponent& e) {
  // max(), in this order, keeps NaN.
  if constexpr (F != Form::kAny) {
    const Floats v = max(Floats{}, x * slope + 1.0f);
    if constexpr (F == Form::kHalf) return {v, v * v, v};
    return {v, v, v == 0.0f ? Floats{} : splat(1.0f)};
  }
  const Floats v = max(Floats{}, x * slope + 1.0f);
  const Ints none = v == 0.0f;
  const Floats u = none ? splat(1.0f) : v;
  const Floats inverse = 1.0f / u;
  // What v lost to rounding, relative to it, is the rest of the logarithm; below 1/2, where v - 1
  // is not exact, v has all its digits.
  const Floats lost = v < 0.5f ? Floats{} : x * slope - (v - 1.0f);
  const Floats log = log_positive(u) + lost * inverse;
  const Floats r = none ? Floats{} : exp2_nonpositive(log * e.to_log2);
  return {v, r, r * inverse};
}

// Z and Y = sum(r / v) of kLanes rows: x [count][kLanes], count a multiple of kLanes.
struct RowSums {
  Floats z, y;
};
template <Form F>
ELSA_NOINLINE RowSums row_sums_of(const float* x, int64_t count, Floats slope, const Exponent& e) {
  RowSums found = {};
  for (int64_t first = 0; first < count; first += 64) {
    const int64_t end = first + 64 < count ? first + 64 : count;
    Floats z[2] = {}, y[2] = {};
    for (int64_t j = first; j < end; j += 2) {
      ELSA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const Powers p = powers<F>(load(x + (j + i) * kLanes), slope, e);
        z[i] += p.r;
        y[i] += p.over;
      }
    }
    found.z += z[0] + z[1];
    found.y += y[0] + y[1];
  }
  return found;
}
ELSA_INLINE RowSums row_sums_of(const float* x, int64_t count, Floats slope, const Exponent& e) {
  if (e.form == Form::kHalf) return row_sums_of<Form::kHalf>(x, count, slope, e);
  if (e.form == Form::kOne) return row_sums_of<Form::kOne>(x, count, slope, e);
  return row_sums_of<Form::kAny>(x, count, slope, e);
}

// Writes the lanes of x and of index that `keep` selects, one after another, and garbage up to a
// whole register; gives how many.
ELSA_INLINE int64_t put(Floats x, Ints index, Ints keep, float* values, int32_t* numbers) {
#if defined(__AVX512F__)
  const __mmask16 mask = _mm512_movepi32_mask(reinterpret_cast<__m512i>(keep));
  store(values,
        reinterpret_cast<Floats>(_mm512_maskz_compress_ps(mask, reinterpret_cast<__m512>(x))));
  _mm512_storeu_si512(numbers, _mm512_maskz_compress_epi32(mask, reinterpret_cast<__m512i>(index)));
  return __builtin_popcount(mask);
#else
  int64_t count = 0;
#if defined(__AVX2__)
  unsigned mask = static_cast<unsigned>(_mm256_movemask_ps(reinterpret_cast<__m256>(keep)));
  if (mask == 0) return 0;
  float lanes[kLanes];
  int32_t indices[kLanes];
  __builtin_memcpy(lanes, &x, sizeof(lanes));
  __builtin_memcpy(indices, &index, sizeof(indices));
  for (; mask != 0; mask &= mask - 1, ++count) {
    const int i = __builtin_ctz(mask);
    values[count] = lanes[i];
    numbers[count] = indices[i];
  }
#else
  if (!any(keep)) return 0;
  for (int i = 0; i < kLanes; ++i) {
    values[count] = x[i];
    numbers[count] = index[i];
    count -= keep[i];
  }
#endif
  return count;
#endif
}

// The keys of a row that may weigh something: values and key numbers, in the keys' order, padded by
// one register.
struct List {
  float* values;
  int32_t* keys;
  int64_t count;

  // Appends scores [0, count) of the keys from `first` on whose distance to `base` is above
  // `limit`; NaN is.
  ELSA_INLINE void append(const float* scores, int64_t first, int64_t present, float base,
                          float limit) {
    for (int64_t j = 0; j < present; j += kLanes) {
      const Floats s = load(scores + j);
      const Ints inside = first_lanes(present - j);
      const Ints keep = ~(s - base <= limit) & inside;
      count += put(s, lane_index() + static_cast<int32_t>(first + j), keep, values + count,
                   keys + count);
    }
  }
  // Takes `base` off the values, and drops those that are then at or below `limit`.
  ELSA_INLINE void reduce(float base, float limit) {
    int64_t kept = 0;
    for (int64_t j = 0; j < count; j += kLanes) {
      const Floats x = load(values + j) - base;
      const Ints inside = first_lanes(count - j);
      kept += put(x, load_keys(j), ~(x <= limit) & inside, values + kept, keys + kept);
    }
    count = kept;
  }
  // Distances -> weights r / Z; those that are zero leave the list.
  template <Form F>
  ELSA_NOINLINE void weigh(float slope, float total, const Exponent& e) {
    int64_t kept = 0;
    for (int64_t j = 0; j < count; j += kLanes) {
      const Floats p = powers<F>(load(values + j), splat(slope), e).r / total;
      const Ints inside = first_lanes(count - j);
      kept += put(p, load_keys(j), ~(p <= 0.0f) & inside, values + kept, keys + kept);
    }
    count = kept;
  }
  ELSA_INLINE Ints load_keys(int64_t j) const {
    Ints index;
    __builtin_memcpy(&index, keys + j, sizeof(index));
    return index;
  }
};

// m, b and Z of kLanes rows.
struct Solved {
  Floats top, slope, total;
};

// The lists of kLanes rows side by side: columns [count][kLanes], padded with -inf to a multiple of
// kLanes, which is given.
ELSA_NOINLINE int64_t side_by_side(List (&lists)[kLanes], int64_t rows, float* columns) {
  int64_t most = 0;
  for (int i = 0; i < rows; ++i) most = lists[i].count > most ? lists[i].count : most;
  most = ceil_div(most, kLanes) * kLanes;
  for (int i = 0; i < rows; ++i) {
    for (int64_t j = lists[i].count; j < most; ++j) lists[i].values[j] = -kInf;
  }
  for (int64_t j = 0; j < most; j += kLanes) {
    Floats block[kLanes];
    ELSA_UNROLL
    for (int i = 0; i < kLanes; ++i) block[i] = load(lists[i < rows ? i : 0].values + j);
    transpose(block);
    ELSA_UNROLL
    for (int i = 0; i < kLanes; ++i) store(columns + (j + i) * kLanes, block[i]);
  }
  return most;
}

// The slopes of kLanes rows, from the lists of their scores, which become distances to the maxima.
// With c = a / b the condition is c = Z(c)^-a; a step is Newton's, within the enclosure that c and
// Z^-a make, and for a > 1 a bisection where it does not halve that. As `solve` in
// elsa_core/backends/eager_entmax.py, but each row ends at its own last step.
// Lanes from `rows` on have no list of their own.
ELSA_NOINLINE Solved solve(List (&lists)[kLanes], int64_t rows, Floats top, int64_t keys,
                           const Exponent& e, float* columns) {
  constexpr int kMostSteps = 60;
  for (int i = 0; i < rows; ++i) lists[i].reduce(top[i] == -kInf ? 0.0f : top[i], -e.reach);
  int64_t count = side_by_side(lists, rows, columns);
  Floats c = splat(1.0f), high = c;
  Floats low = e.inverse_power(splat(static_cast<float>(keys)));
  Ints active = c == c;
  for (int step = 0; step < kMostSteps; ++step) {
    if (step == 2) {  // the upper end has come down: fewer keys are left
      for (int i = 0; i < rows; ++i) lists[i].reduce(0.0f, -high[i] * e.reach * kSlack);
      count = side_by_side(lists, rows, columns);
    }
    const RowSums sums = row_sums_of(columns, count, e.a / c, e);
    const Floats other = sums.z == 0.0f ? c : e.inverse_power(sums.z);
    const Floats width = high - low;
    low = max(low, minimum(c, other));
    high = minimum(high, max(c, other));
    const Floats ratio = sums.y == 0.0f ? Floats{} : sums.z / sums.y;
    Floats next = minimum(max(low, c - ratio * (c - other)), high);
    if (step > 0 && e.a > 1.0f) {
      const Floats middle = square_root(low * high);
      next = high - low > 0.5f * width ? middle : next;
    }
    // For a > 1 a weight that has just come makes Y large and steps small. What bounds the distance
    // to the root is c - Z^-a, for Z^-a falls with c.
    const Floats distance = magnitude((e.a > 1.0f ? other : next) - c);
    const Ints goes_on = minimum(distance, high - low) > c * e.close;
    c = active ? next : c;
    active &= goes_on;
    if (!any(active)) break;
  }
  Solved found = {top, e.a / c, {}};
  const Floats total = row_sums_of(columns, count, found.slope, e).z;
  found.total = total == 0.0f ? splat(1.0f) : total;
  return found;
}

// h with d p / d alpha = h - U sum(h) / sum(U), up to multiples of U, for weights p > 0; `slant` in
// elsa_core/backends/eager_entmax.py. `inverse` is p^-a.
ELSA_INLINE Floats slant(Floats p, Floats inverse, const Exponent& e) {
  const Floats log_p = log_positive(max(p, splat(0x1p-126f)));
  const Floats l = log_p * e.a;
  const float square = e.a * e.a;
  if (e.a > 1.0f) return p * (1.0f - l) / square;
  // (e^y - 1 - y) 2 / y^2 for y = -l: the terms are positive, and the difference loses digits.
  constexpr int kTerms = 15;
  const Floats y = -l;
  Floats series = splat(1.0f);
  ELSA_UNROLL
  for (int k = kTerms; k > 2; --k) series = series * y * (1.0f / static_cast<float>(k)) + 1.0f;
  const Floats large = (inverse - 1.0f + l) / square;
  return -p * (y < 2.0f ? log_p * log_p * (0.5f * series) : large);
}

}  // namespace
}  // namespace elsa
