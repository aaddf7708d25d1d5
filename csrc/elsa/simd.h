// One register of floats, written with the compilers' vector extensions so that one source serves
// every instruction set. Everything here has internal linkage: a copy compiled for AVX-512 must
// never be the one that the linker keeps for the others.
#pragma once

#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define ELSA_INLINE inline __attribute__((always_inline))
#define ELSA_NOINLINE __attribute__((noinline))

#if defined(__clang__)
#define ELSA_UNROLL _Pragma("clang loop unroll(full)")
#define ELSA_UNROLL_BY_4 _Pragma("clang loop unroll_count(4)")
#else
#define ELSA_UNROLL _Pragma("GCC unroll 16")
#define ELSA_UNROLL_BY_4 _Pragma("GCC unroll 4")
#endif

namespace elsa {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef float FloatsUnaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint16_t HalvesUnaligned __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

constexpr float kInf = __builtin_inff();
constexpr float kLog2E = 1.44269504088896340736f;

ELSA_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

ELSA_INLINE Floats load(const float* p) { return *reinterpret_cast<const FloatsUnaligned*>(p); }
ELSA_INLINE void store(float* p, Floats x) { *reinterpret_cast<FloatsUnaligned*>(p) = x; }
ELSA_INLINE Floats splat(float x) { return x - Floats{}; }
// The first `count` lanes.
ELSA_INLINE void store_first(float* p, Floats x, int64_t count) {
  if (count >= kLanes) {
    store(p, x);
  } else {
    for (int i = 0; i < count; ++i) p[i] = x[i];
  }
}

// A product of floats that is rounded before it is added to anything: the compiler would make one
// operation of the two in some callers and not in others, whose results are to be the same.
template <class T>
ELSA_INLINE T rounded_product(T product) {
#if defined(__AVX512F__)
  asm("" : "+v"(product));
#elif defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#else
  asm("" : "+m"(product));
#endif
  return product;
}

ELSA_INLINE Ints lane_index() {
  Ints index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  return index;
}
// True in the first `count` lanes.
ELSA_INLINE Ints first_lanes(int64_t count) {
  return lane_index() < static_cast<int32_t>(smaller(count, kLanes));
}

// The first `count` lanes at p, `rest` in the others; no memory beyond them is read.
ELSA_INLINE Floats load_first(const float* p, int64_t count, float rest) {
#if defined(__AVX512F__)
  const int lanes = count < kLanes ? static_cast<int>(count) : kLanes;
  return reinterpret_cast<Floats>(
      _mm512_mask_loadu_ps(_mm512_set1_ps(rest), static_cast<__mmask16>((1u << lanes) - 1), p));
#elif defined(__AVX2__)
  const Ints inside = first_lanes(count);
  const __m256 x = _mm256_maskload_ps(p, reinterpret_cast<__m256i>(inside));
  return inside ? reinterpret_cast<Floats>(x) : splat(rest);
#else
  if (count >= kLanes) return load(p);
  Floats x = splat(rest);
  for (int i = 0; i < count; ++i) x[i] = p[i];
  return x;
#endif
}

// Compares false on NaN, so that a NaN in `a` gives `b`: the same rule as x86's maxps.
ELSA_INLINE Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(
      _mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Floats>(
      _mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
  return a > b ? a : b;
#endif
}

template <int... I>
struct Lanes {};
template <int N, int... I>
struct MakeLanes : MakeLanes<N - 1, N - 1, I...> {};
template <int... I>
struct MakeLanes<0, I...> {
  using type = Lanes<I...>;
};

// Lane i of the result is lane Pattern::from(i) of the concatenation of a and b.
template <class Pattern, int... I>
ELSA_INLINE Floats shuffle(Floats a, Floats b, Lanes<I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Pattern::from(I)...);
#else
  return __builtin_shuffle(a, b, Ints{Pattern::from(I)...});
#endif
}
template <class Pattern>
ELSA_INLINE Floats shuffle(Floats a, Floats b) {
  return shuffle<Pattern>(a, b, typename MakeLanes<kLanes>::type{});
}

// Blocks of `Width` lanes, alternately from a and from b: the even ones of each, or the odd ones.
template <int Width, int Odd>
struct Exchange {
  static constexpr int from(int i) {
    return i / (2 * Width) * (2 * Width) + Odd * Width + i % Width + (i / Width % 2 ? kLanes : 0);
  }
};
// Within each 128-bit lane: {a0, b0, a1, b1} or, with High, {a2, b2, a3, b3}.
template <int High>
struct Interleave {
  static constexpr int from(int i) {
    return i / 4 * 4 + 2 * High + i % 4 / 2 + (i % 2 ? kLanes : 0);
  }
};

// x with the lanes from `count` on replaced by -inf.
ELSA_INLINE Floats keep_first(Floats x, int64_t count) {
  return first_lanes(count) ? x : splat(-kInf);
}

// 2^x for x <= 0, within 1.25 ulp (1.01 with fused multiply-add) down to 2^-126, and zero from
// 2^-127 on (on AVX-512 below 2^-126); NaN stays NaN.
#if defined(__AVX512F__)
// x = i + k / 16 + f: 2^(k / 16) is a look-up within one register, which leaves so short a
// polynomial, the minimax fit of relative error on [0, 1/16] with value 1 at 0 (1.4e-9).
ELSA_INLINE Floats exp2_nonpositive(Floats x) {
  constexpr Floats kPowers = {
      0x1p+0f,        0x1.0b5586p+0f, 0x1.172b84p+0f, 0x1.2387a6p+0f,
      0x1.306fe0p+0f, 0x1.3dea64p+0f, 0x1.4bfdaep+0f, 0x1.5ab07ep+0f,
      0x1.6a09e6p+0f, 0x1.7a1148p+0f, 0x1.8ace54p+0f, 0x1.9c4918p+0f,
      0x1.ae89fap+0f, 0x1.c199bep+0f, 0x1.d5818ep+0f, 0x1.ea4afap+0f,
  };
  const __m512 v = reinterpret_cast<__m512>(x);
  // Adding 1.5 * 2^19 leaves k in the four low bits, all that the look-up reads.
  const __m512 shifted =
      _mm512_add_round_ps(v, _mm512_set1_ps(786432.0f), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  const Floats power = reinterpret_cast<Floats>(
      _mm512_permutexvar_ps(_mm512_castps_si512(shifted), reinterpret_cast<__m512>(kPowers)));
  constexpr int kBelow = 4 << 4 | _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  const Floats f = reinterpret_cast<Floats>(_mm512_reduce_ps(v, kBelow));
  Floats p = splat(0.05666298419237137f);
  p = p * f + 0.24018490314483643f;
  p = p * f + 0.693147599697113f;
  p = power * f * p + power;
  // No subnormal results: they would slow down all that multiplies them.
  const __mmask16 normal = _mm512_cmp_ps_mask(v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return reinterpret_cast<Floats>(_mm512_maskz_scalef_ps(normal, reinterpret_cast<__m512>(p), v));
}
#else
// The polynomial is the minimax fit of relative error on [-1/2, 1/2] with value 1 at 0 (2.0e-9).
ELSA_INLINE Floats exp2_nonpositive(Floats x) {
  // Adding 1.5 * 2^23 + 127 rounds to an integer and leaves its float exponent in the low bits.
  constexpr float kRound = 12582912.0f + 127.0f;
  x = max(splat(-127.0f), x);
  const Floats shifted = x + kRound;
  const Floats f = x - (shifted - kRound);
  Floats p = splat(0.00015353361959569156f);
  p = p * f + 0.0013398873852565885f;
  p = p * f + 0.00961843691766262f;
  p = p * f + 0.055503323674201965f;
  p = p * f + 0.24022647738456726f;
  p = p * f + 0.6931471824645996f;
  p = p * f + 1.0f;
  const Ints exponent = reinterpret_cast<Ints>(shifted) << 23;
  return p * reinterpret_cast<Floats>(exponent);
}
#endif

// Natural logarithm of a positive normal number, within 2 ulp; NaN stays NaN. The polynomial is
// Cephes' logf.
ELSA_INLINE Floats log_positive(Floats x) {
  // Splits x = 2^e * m with m in [sqrt(1/2), sqrt(2)).
  // The subtraction is unsigned: a NaN of negative sign would overflow a signed one.
  const Ints bits = reinterpret_cast<Ints>(reinterpret_cast<Bits>(x) - 0x3f3504f3u);
  const Floats e = __builtin_convertvector(bits >> 23, Floats);
  const Floats m = reinterpret_cast<Floats>((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
  const Floats square = m * m;
  Floats p = splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  p = p * m * square - 2.12194440e-4f * e - 0.5f * square;
  const Floats log = (m + p) + 0.693359375f * e;
  return x == x ? log : x;
}

// In place: rows[i][j] <-> rows[j][i].
ELSA_INLINE void transpose(Floats (&rows)[kLanes]) {
  Floats t[kLanes];
  ELSA_UNROLL
  for (int g = 0; g < kLanes; g += 4) {
    const Floats a = shuffle<Interleave<0>>(rows[g], rows[g + 1]);
    const Floats b = shuffle<Interleave<1>>(rows[g], rows[g + 1]);
    const Floats c = shuffle<Interleave<0>>(rows[g + 2], rows[g + 3]);
    const Floats d = shuffle<Interleave<1>>(rows[g + 2], rows[g + 3]);
    t[g + 0] = shuffle<Exchange<2, 0>>(a, c);
    t[g + 1] = shuffle<Exchange<2, 1>>(a, c);
    t[g + 2] = shuffle<Exchange<2, 0>>(b, d);
    t[g + 3] = shuffle<Exchange<2, 1>>(b, d);
  }
  if constexpr (kLanes >= 8) {
    ELSA_UNROLL
    for (int g = 0; g < kLanes; g += 8) {
      ELSA_UNROLL
      for (int i = 0; i < 4; ++i) {
        rows[g + i] = shuffle<Exchange<4, 0>>(t[g + i], t[g + 4 + i]);
        rows[g + 4 + i] = shuffle<Exchange<4, 1>>(t[g + i], t[g + 4 + i]);
      }
    }
  } else {
    for (int i = 0; i < kLanes; ++i) rows[i] = t[i];
  }
  if constexpr (kLanes == 16) {
    ELSA_UNROLL
    for (int i = 0; i < 8; ++i) {
      const Floats low = rows[i], high = rows[8 + i];
      rows[i] = shuffle<Exchange<8, 0>>(low, high);
      rows[8 + i] = shuffle<Exchange<8, 1>>(low, high);
    }
  }
}

// IEEE half -> float. The multiplication rebiases the exponent and normalises subnormals exactly.
ELSA_INLINE Floats from_half(Halves h) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(h)));
#elif defined(__F16C__)
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(h)));
#else
  const Ints bits = __builtin_convertvector(h, Ints);
  const Floats scaled = reinterpret_cast<Floats>((bits & 0x7fff) << 13) * 0x1p112f;
  const Ints special = ((bits & 0x7c00) == 0x7c00) & 0x7f800000;
  return reinterpret_cast<Floats>(reinterpret_cast<Ints>(scaled) | special |
                                  ((bits & 0x8000) << 16));
#endif
}
ELSA_INLINE Floats from_bfloat(Halves h) {
  return reinterpret_cast<Floats>(__builtin_convertvector(h, Ints) << 16);
}

// float -> IEEE half, to nearest even.
ELSA_INLINE uint16_t to_half(float x) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (bits < 0x38800000u) {
    // Adding 1/2 makes the float adder round at the half's subnormal spacing, 2^-24.
    float magnitude;
    __builtin_memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    __builtin_memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  const uint32_t odd = bits >> 13 & 1u;
  return static_cast<uint16_t>(sign | ((bits + 0xfffu + odd - 0x38000000u) >> 13));
#endif
}
// float -> bfloat16, to nearest even.
ELSA_INLINE uint16_t to_bfloat(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// The same for a register.
ELSA_INLINE Halves to_half(Floats x) {
#if defined(__AVX512F__)
  return reinterpret_cast<Halves>(
      _mm512_cvtps_ph(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  return reinterpret_cast<Halves>(
      _mm256_cvtps_ph(reinterpret_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
#else
  Halves h;
  for (int i = 0; i < kLanes; ++i) h[i] = to_half(x[i]);
  return h;
#endif
}
ELSA_INLINE Halves to_bfloat(Floats x) {
  const Bits bits = reinterpret_cast<Bits>(x);
  const Bits nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const Bits nan = bits >> 16 | 0x40u;
  return __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? nan : nearest, Halves);
}

// Four floats at p, repeated over the register.
ELSA_INLINE Floats load_repeated(const float* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_broadcast_f32x4(_mm_loadu_ps(p)));
#elif defined(__AVX2__)
  return reinterpret_cast<Floats>(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)));
#else
  return load(p);
#endif
}

}  // namespace
}  // namespace elsa
