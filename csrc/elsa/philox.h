// The keep mask of dropout: Philox4x32-10 (Salmon et al., SC 2011), a register of counters at once.
// elsa_core/backends/philox.py says which word decides on which weight.
#pragma once

#include "attention.h"
#include "simd.h"

namespace elsa {
namespace {

// The upper and the lower halves of x * factor.
ELSA_INLINE void multiply(Bits x, uint32_t factor, Bits& high, Bits& low) {
#if defined(__AVX512F__)
  const __m512i v = reinterpret_cast<__m512i>(x), f = _mm512_set1_epi64(factor);
  const __m512i even = _mm512_mul_epu32(v, f), odd = _mm512_mul_epu32(_mm512_srli_epi64(v, 32), f);
  high = reinterpret_cast<Bits>(_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd));
  low = reinterpret_cast<Bits>(_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32)));
#elif defined(__AVX2__)
  const __m256i v = reinterpret_cast<__m256i>(x), f = _mm256_set1_epi64x(factor);
  const __m256i even = _mm256_mul_epu32(v, f), odd = _mm256_mul_epu32(_mm256_srli_epi64(v, 32), f);
  high = reinterpret_cast<Bits>(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa));
  low = reinterpret_cast<Bits>(_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa));
#else
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t product = static_cast<uint64_t>(x[i]) * factor;
    high[i] = static_cast<uint32_t>(product >> 32);
    low[i] = static_cast<uint32_t>(product);
  }
#endif
}

// take(j, factors) for each register of the keys [first, first + count) of one query row of one
// head: `kept` where a weight is kept, else 0. first must be a multiple of 4, count of kLanes.
template <class Take>
ELSA_INLINE void each_factor(const Dropout& d, int64_t head, int64_t row, int64_t first,
                             int64_t count, Take take) {
  // Lane 4 g + i counts keys of register i, group g: the words then come out in the keys' order.
  Bits spread;
  for (int l = 0; l < kLanes; ++l) spread[l] = static_cast<uint32_t>(l % 4 * (kLanes / 4) + l / 4);
  const Bits none = {};
  for (int64_t j = 0; j < count; j += 4 * kLanes) {
    Bits a = spread + static_cast<uint32_t>((first + j) / 4);
    Bits b = none + static_cast<uint32_t>(row), c = none + static_cast<uint32_t>(head);
    Bits e = none + d.offset;
    uint32_t key = static_cast<uint32_t>(d.seed), second = static_cast<uint32_t>(d.seed >> 32);
    for (int round = 0; round < 10; ++round) {
      Bits high, low, other_high, other_low;
      multiply(a, 0xD2511F53u, high, low);
      multiply(c, 0xCD9E8D57u, other_high, other_low);
      a = other_high ^ b ^ key;
      b = other_low;
      c = high ^ e ^ second;
      e = low;
      key += 0x9E3779B9u;
      second += 0xBB67AE85u;
    }
    const auto factor = [&d](Bits word) {
      return reinterpret_cast<Ints>(word >> 1) >= d.threshold ? splat(d.kept) : Floats{};
    };
    const Floats w0 = factor(a), w1 = factor(b), w2 = factor(c), w3 = factor(e);
    const Floats early = shuffle<Interleave<0>>(w0, w1), late = shuffle<Interleave<1>>(w0, w1);
    const Floats early2 = shuffle<Interleave<0>>(w2, w3), late2 = shuffle<Interleave<1>>(w2, w3);
    const Floats ordered[4] = {
        shuffle<Exchange<2, 0>>(early, early2), shuffle<Exchange<2, 1>>(early, early2),
        shuffle<Exchange<2, 0>>(late, late2), shuffle<Exchange<2, 1>>(late, late2)};
    for (int i = 0; i < 4 && j + i * kLanes < count; ++i) take(j + i * kLanes, ordered[i]);
  }
}

}  // namespace
}  // namespace elsa
