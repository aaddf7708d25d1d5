// Register-blocked micro-kernels: a tile of query rows against a panel of keys, and against the
// values.
#pragma once

#include "kernel.h"
#include "simd.h"

namespace elsa {
namespace {

// Rows and vectors of one register tile: the accumulators, one operand vector each and a broadcast
// fill the register file (16 registers on SSE and AVX2, 32 on AVX-512 and NEON).
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 12;
#elif defined(__AVX2__)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 4;
#endif
constexpr int kTileVectors = 2;
constexpr int kPanel = kTileVectors * kLanes;  // keys of one packed panel

// Rows of a tile of three vectors, where a third vector takes the place of one left alone: too few
// multiply-adds wait for the loads of a single one. 0 for none.
#if defined(__AVX512F__)
constexpr int kTripleRows = 8;
#else
constexpr int kTripleRows = 0;
#endif

constexpr int kNarrow = kLanes / 4;  // keys of a narrow panel, see narrow_score_tile
// Keys of a block that go into panels; the rest, if any, make one narrow panel.
constexpr int64_t wide_keys(int64_t keys) {
  return keys > kLanes && keys % kLanes <= kNarrow ? keys - keys % kLanes : keys;
}

// Of the `wide` keys in panels, those before the last panel of three vectors, if there is one.
constexpr int64_t paired_keys(int64_t wide) {
  const int64_t vectors = ceil_div(wide, kLanes);
  return kTripleRows > 0 && vectors > 1 && vectors % 2 == 1 ? (vectors - 3) * kLanes : wide;
}

constexpr int kFewChunk = 16;       // terms of a sum that are added by themselves where `few` holds
constexpr int64_t kFewQueries = 8;  // see few_sums
constexpr int64_t kDepthChunk = 96;  // head dimensions summed in one accumulator chain
constexpr int64_t kSumChunk = 100;   // keys summed in one accumulator chain; see values_tile
// Head dimensions of a chain: as many chains as kDepthChunk asks for, of nearly equal length.
constexpr int64_t depth_chunk(int64_t depth) {
  const int64_t chunks = ceil_div(depth, kDepthChunk);
  return chunks > 1 ? ceil_div(depth, chunks) : depth;
}
// Floats from one row of a buffer to the next: an odd number of cache lines spreads the rows over
// the sets, and as few as hold `count` keep them on few pages.
constexpr int64_t row_stride(int64_t count) { return ((count + 15) / 16 | 1) * 16; }

struct ScoreTile {
  const float* query;  // [R][query_stride]
  int64_t query_stride;
  const float* const* query_rows;  // in their place, of tiles whose rows lie apart: [R] rows
  const float* panel;              // [depth][vectors * kLanes]
  int64_t depth;
  float* scores;  // [R][score_stride]
  int64_t score_stride;
  float* row_max;   // [R][kLanes], running
  int64_t valid;    // keys that exist from the panel's start on
  int64_t visible;  // keys that the first row may see from there on; one more with each row
  bool few;         // the whole problem has few queries or keys, see few_sums
  bool scaled;      // scores are multiplied by scale here (and not in the softmax)
  float scale;
  const float* bias;  // [R][bias_stride], null for none; read only where `scaled`
  int64_t bias_stride;
  bool hides;  // the bias is a boolean mask's: -inf replaces the score, NaN included
};
constexpr int64_t kAllVisible = int64_t{1} << 62;  // no row of a tile is hidden from a key

// sums[r] = weight(r, i) * the vector at x + i * step, over whole chunks of `count` terms, for
// problems of few queries or few keys (of which no more than kLanes go into panels): registers are
// to spare, and chains of 8, of even and of odd terms, round less and wait less. PyTorch's products
// of so small matrices have such short chains too. Returns the terms summed.
template <int R, class Weight>
ELSA_INLINE int64_t few_sums(Weight weight, const float* x, int64_t step, int64_t count,
                             Floats (&sums)[R]) {
  ELSA_UNROLL
  for (int r = 0; r < R; ++r) sums[r] = Floats{};
  int64_t i = 0;
  while (i + kFewChunk <= count) {
    Floats even[R], odd[R];
    ELSA_UNROLL
    for (int r = 0; r < R; ++r) even[r] = odd[r] = Floats{};
    for (const int64_t end = i + kFewChunk; i < end; i += 2, x += 2 * step) {
      const Floats first = load(x), second = load(x + step);
      ELSA_UNROLL
      for (int r = 0; r < R; ++r) {
        even[r] = even[r] + splat(weight(r, i)) * first;
        odd[r] = odd[r] + splat(weight(r, i + 1)) * second;
      }
    }
    ELSA_UNROLL
    for (int r = 0; r < R; ++r) sums[r] += even[r] + odd[r];
  }
  return i;
}

// Steps of a register tile: R rows of V vectors of sums.
template <int R, int V, class Step>
ELSA_INLINE void each(Step step) {
  ELSA_UNROLL
  for (int r = 0; r < R; ++r) {
    ELSA_UNROLL
    for (int v = 0; v < V; ++v) step(r, v);
  }
}
template <int R, int V>
ELSA_INLINE void clear(Floats (&acc)[R][V]) {
  each<R, V>([&](int r, int v) { acc[r][v] = Floats{}; });
}
// acc[r] += weight(r) * the V vectors at p.
template <int R, int V, class Weight>
ELSA_INLINE void add_product(Floats (&acc)[R][V], const float* p, Weight weight) {
  Floats x[V];
  ELSA_UNROLL
  for (int v = 0; v < V; ++v) x[v] = load(p + v * kLanes);
  ELSA_UNROLL
  for (int r = 0; r < R; ++r) {
    const Floats w = splat(weight(r));
    ELSA_UNROLL
    for (int v = 0; v < V; ++v) acc[r][v] = acc[r][v] + w * x[v];
  }
}
// row(r): where the sums of row r lie.
template <int R, int V, class Row>
ELSA_INLINE void add_stored(Floats (&acc)[R][V], Row row) {
  each<R, V>([&](int r, int v) { acc[r][v] += load(row(r) + v * kLanes); });
}
template <int R, int V, class Row>
ELSA_INLINE void store_rows(const Floats (&acc)[R][V], Row row) {
  each<R, V>([&](int r, int v) { store(row(r) + v * kLanes, acc[r][v]); });
}

// The row after `row`. Computed there and then: the addresses of all rows do not fit in registers.
template <class T>
ELSA_INLINE T* row_after(T* row, int64_t stride) {
  row += stride;
  asm("" : "+r"(row));
  return row;
}

// Rows of queries lie `query_stride` apart, or with Apart anywhere.
template <int R, int V, bool Apart>
void score_tile(const ScoreTile& t) {
  Floats acc[R][V];
  clear(acc);
  if (const float* const bias = Apart && kLanes == 16 ? nullptr : t.bias) {
    // The next panel's part of the bias: too many rows for the hardware to follow.
    ELSA_UNROLL
    for (int r = 0; r < R; ++r) {
      const float* ahead = bias + r * t.bias_stride + V * kLanes;
      for (int i = 0; i < V * kLanes; i += 16) __builtin_prefetch(ahead + i);
    }
  }
  const float* rows[R];
  ELSA_UNROLL
  for (int r = 0; r < R; ++r) rows[r] = Apart ? t.query_rows[r] : t.query + r * t.query_stride;
  const float* query = t.query;
  const float* panel = t.panel;
  const int64_t query_stride = t.query_stride;
  int64_t d = 0;
  const int64_t depth = t.depth;
  const int64_t chunk = t.few ? depth : depth_chunk(depth);
  float* const parked = t.scores;  // sums of the chunks so far wait where the scores will be
  const int64_t parked_stride = t.score_stride;
  const auto place = [=](int r) { return parked + r * parked_stride; };
  if (V <= kTileVectors && t.few) {
    ELSA_UNROLL
    for (int v = 0; v < V; ++v) {
      Floats sums[R];
      d = few_sums([&](int r, int64_t i) { return rows[r][i]; }, panel + v * kLanes, kPanel, depth,
                   sums);
      ELSA_UNROLL
      for (int r = 0; r < R; ++r) acc[r][v] = sums[r];
    }
    panel += d * kPanel;
    query += d;
  }
  for (int64_t end = chunk;; end += chunk) {
    const int64_t stop = end < depth ? end : depth;
    ELSA_UNROLL_BY_4
    for (; d < stop; ++d) {
      add_product(acc, panel, [&](int r) { return Apart ? rows[r][d] : query[r * query_stride]; });
      panel += V > kTileVectors ? V * kLanes : kPanel;
      if (!Apart) ++query;
    }
    if (end > chunk) add_stored(acc, place);
    if (end >= depth) break;
    store_rows(acc, place);
    clear(acc);
  }
  // Copies, because the compiler must assume that the stores below change `t`.
  const int64_t valid = t.valid, visible = t.visible;
  const bool whole = valid >= V * kLanes && visible >= V * kLanes;
  if (t.scaled && t.bias) {
    const float scale = t.scale;
    const int64_t bias_stride = t.bias_stride;
    const float* bias = t.bias;
    const bool hides = !Apart && t.hides;
    ELSA_UNROLL
    for (int r = 0; r < R; ++r) {
      ELSA_UNROLL
      for (int v = 0; v < V; ++v) {
        const float* p = bias + v * kLanes;
        const Floats added = v + 1 < V ? load(p) : load_first(p, valid - v * kLanes, 0.0f);
        // as the backward computes it, which subtracts the forward's lse
        acc[r][v] = rounded_product(acc[r][v] * scale) + added;
        if (hides) acc[r][v] = added == splat(-kInf) ? added : acc[r][v];
      }
      bias = row_after(bias, bias_stride);
    }
  } else if (t.scaled) {
    each<R, V>([&](int r, int v) { acc[r][v] = acc[r][v] * t.scale; });
  }
  if (!whole) {
    ELSA_UNROLL
    for (int r = 0; r < R; ++r) {
      const int64_t count = visible + r < valid ? visible + r : valid;
      ELSA_UNROLL
      for (int v = 0; v < V; ++v) acc[r][v] = keep_first(acc[r][v], count - v * kLanes);
    }
  }
  float* scores = t.scores;
  float* const row_max = t.row_max;
  ELSA_UNROLL
  for (int r = 0; r < R; ++r) {
    Floats m = load(row_max + r * kLanes);
    ELSA_UNROLL
    for (int v = 0; v < V; ++v) {
      store(scores + v * kLanes, acc[r][v]);
      m = max(acc[r][v], m);
    }
    store(row_max + r * kLanes, m);
    scores = row_after(scores, parked_stride);
  }
}

// Of four rows, the sums over the head dimensions that lie side by side: [key][row].
ELSA_INLINE Floats sums_of_keys(const Floats* x) {
  const Floats a = shuffle<Interleave<0>>(x[0], x[1]), b = shuffle<Interleave<1>>(x[0], x[1]);
  const Floats c = shuffle<Interleave<0>>(x[2], x[3]), d = shuffle<Interleave<1>>(x[2], x[3]);
  return (shuffle<Exchange<2, 0>>(a, c) + shuffle<Exchange<2, 1>>(a, c)) +
         (shuffle<Exchange<2, 0>>(b, d) + shuffle<Exchange<2, 1>>(b, d));
}

// The plain products with the last keys of a row when they are few: kLanes / 4 of them share a
// register, four head dimensions side by side. One class token beyond a multiple of 16 would
// otherwise cost a whole panel. sums: [key][row of the group of 4]. Queries are read in whole
// groups of four head dimensions.
template <int R, bool Apart>
ELSA_INLINE void narrow_sums(const ScoreTile& t, float (&sums)[(R + 3) / 4][kLanes]) {
  constexpr int kGroups = (R + 3) / 4;
  Floats acc[kGroups * 4];
  const float* query[R];
  ELSA_UNROLL
  for (int r = 0; r < R; ++r) query[r] = Apart ? t.query_rows[r] : t.query + r * t.query_stride;
  ELSA_UNROLL
  for (int r = 0; r < kGroups * 4; ++r) acc[r] = Floats{};
  const float* panel = t.panel;
  for (int64_t d = 0; d < t.depth; d += 4) {
    const Floats key = load(panel);
    ELSA_UNROLL
    for (int r = 0; r < R; ++r) acc[r] = acc[r] + load_repeated(query[r] + d) * key;
    panel += kLanes;
  }
  ELSA_UNROLL
  for (int g = 0; g < kGroups; ++g) store(sums[g], sums_of_keys(acc + 4 * g));
}

template <int R>
void narrow_score_tile(const ScoreTile& t) {
  float sums[(R + 3) / 4][kLanes];
  narrow_sums<R, false>(t, sums);
  for (int r = 0; r < R; ++r) {
    const int64_t count = t.visible + r < t.valid ? t.visible + r : t.valid;
    float* scores = t.scores + r * t.score_stride;
    float most = t.row_max[r * kLanes];
    store(scores, splat(-kInf));
    for (int64_t j = 0; j < count; ++j) {
      float s = sums[r / 4][j * 4 + r % 4];
      const float added = t.bias ? t.bias[r * t.bias_stride + j] : 0.0f;
      if (t.scaled) s = t.hides && added == -kInf ? added : rounded_product(s * t.scale) + added;
      scores[j] = s;
      most = s > most ? s : most;
    }
    t.row_max[r * kLanes] = most;
  }
}

// Of rows that lie apart, a row of scores is a key's: [valid][score_stride], whole groups of 4.
template <int R>
void narrow_key_tile(const ScoreTile& t) {
  float sums[(R + 3) / 4][kLanes];
  narrow_sums<R, true>(t, sums);
  for (int g = 0; g < (R + 3) / 4; ++g) {
    for (int64_t j = 0; j < t.valid; ++j) {
      __builtin_memcpy(t.scores + j * t.score_stride + 4 * g, sums[g] + 4 * j, 4 * sizeof(float));
    }
  }
}

struct ValueTile {
  const float* weights;  // [R][weight_stride], or transposed [count][weight_stride]
  int64_t weight_stride;
  const float* values;  // [count][value_stride], then the narrow ones
  int64_t value_stride;
  int64_t count;        // at most kSumChunk
  const float* narrow;  // [narrow_count][narrow_stride], weights of the keys after those
  int64_t narrow_stride;
  int64_t narrow_count;
  float* out;  // [R][out_stride]
  int64_t out_stride;
  float* const* out_rows;  // in their place, of tiles whose rows lie apart: [R] rows, from
  int64_t column;          // `column` on
  bool accumulate;
  bool few;             // the whole problem has few queries, see few_sums
  const float* factor;  // [R], multiplied on at the end; null for none
};

// One short chain per call: sums over many keys are trees of chunks, which keeps the rounding error
// of long rows at that of short ones. Rows of the output lie `out_stride` apart, or with Apart
// anywhere. Transposed, they are keys, and sums run over query rows.
template <int R, int V, bool Apart, bool Transposed = false>
void value_tile(const ValueTile& t) {
  Floats acc[R][V];
  clear(acc);
  const float* values = t.values;
  const float* weights = t.weights;
  const int64_t count = t.count, weight_stride = t.weight_stride, value_stride = t.value_stride;
  const float* rows[R];
  ELSA_UNROLL
  for (int r = 0; r < R; ++r) rows[r] = weights + r * weight_stride;
  int64_t j = 0;
  if (!Apart && !Transposed && t.few) {
    ELSA_UNROLL
    for (int v = 0; v < V; ++v) {
      Floats sums[R];
      j = few_sums([&](int r, int64_t i) { return rows[r][i]; }, values + v * kLanes, value_stride,
                   count, sums);
      ELSA_UNROLL
      for (int r = 0; r < R; ++r) acc[r][v] = sums[r];
    }
    values += j * value_stride;
    weights += j;
  }
  ELSA_UNROLL_BY_4
  for (; j < count; ++j) {
    add_product(acc, values, [&](int r) {
      return Apart ? rows[r][j] : weights[Transposed ? r : r * weight_stride];
    });
    values += value_stride;
    if (!Apart) weights += Transposed ? weight_stride : 1;
  }
  if constexpr (Apart) {
    const float* narrow = t.narrow;
    for (int64_t i = 0; i < t.narrow_count; ++i) {
      add_product(acc, values, [=](int r) { return narrow[r]; });
      values += value_stride;
      narrow += t.narrow_stride;
    }
  }
  float* out[R];
  ELSA_UNROLL
  for (int r = 0; r < R; ++r) out[r] = Apart ? t.out_rows[r] + t.column : t.out + r * t.out_stride;
  const auto row = [&](int r) { return out[r]; };
  if (t.accumulate) add_stored(acc, row);
  if (t.factor) {
    each<R, V>([&](int r, int v) { acc[r][v] *= t.factor[r]; });
  }
  store_rows(acc, row);
}

using ScoreFunction = void (*)(const ScoreTile&);
using ValueFunction = void (*)(const ValueTile&);

// Indexed by [rows - 1], of two by [vectors - 1] before.
template <class Rows>
struct TileTable;
template <int... I>
struct TileTable<Lanes<I...>> {
  template <bool Apart>
  static constexpr ScoreFunction score[2][sizeof...(I)] = {{score_tile<I + 1, 1, Apart>...},
                                                           {score_tile<I + 1, 2, Apart>...}};
  static constexpr ScoreFunction triple[] = {score_tile<I + 1, 3, true>...};
  static constexpr ScoreFunction narrow[] = {narrow_score_tile<I + 1>...};
  static constexpr ScoreFunction narrow_key[] = {narrow_key_tile<I + 1>...};
  template <bool Apart, bool Transposed = false>
  static constexpr ValueFunction value[2][sizeof...(I)] = {
      {value_tile<I + 1, 1, Apart, Transposed>...}, {value_tile<I + 1, 2, Apart, Transposed>...}};
};
template <int Rows>
using TilesOf = TileTable<typename MakeLanes<Rows>::type>;
using Tiles = TilesOf<kTileRows>;

// scores -> exp2((scores - maximum) * to_log2) in place; lane-wise partial sums, in two chains.
// `count` is a multiple of kLanes; surplus lanes hold -inf. One vector at a time: the processor
// overlaps them by itself, and the constants stay in registers. Frozen: scores may exceed the
// maximum, and weights that exceed float32 are inf.
template <bool Frozen = false>
ELSA_INLINE Floats exponentiate(float* scores, int64_t count, float maximum, float to_log2) {
  Floats sum = {}, other = {};
  for (int64_t j = 0; j < count; j += kLanes) {
    Floats x = (load(scores + j) - maximum) * to_log2;
    if (Frozen) x = x > 128.0f ? splat(128.0f) : x;
    const Floats e = exp2_nonpositive(x);
    store(scores + j, e);
    const Floats added = other + e;
    other = sum;
    sum = added;
  }
  return sum + other;
}

// One step of reduce_rows: two vectors, each of Width lanes for as many rows, become one of both's.
template <int Width, class Combine>
ELSA_INLINE void combine_pairs(Floats (&x)[kLanes / 2], Combine combine) {
  ELSA_UNROLL
  for (int r = 0; r < kLanes / (2 * Width); ++r) {
    const Floats a = x[2 * r], b = x[2 * r + 1];
    x[r] = combine(shuffle<Exchange<Width, 0>>(a, b), shuffle<Exchange<Width, 1>>(a, b));
  }
}

// Lane r of the result is all lanes of rows[r] in one: kLanes reductions by a transposition that
// halves what is left at each of its steps.
template <class Combine>
ELSA_INLINE Floats reduce_rows(const float* rows, Combine combine) {
  Floats x[kLanes / 2];
  ELSA_UNROLL
  for (int r = 0; r < kLanes / 2; ++r) {
    const Floats a = load(rows + 2 * r * kLanes), b = load(rows + (2 * r + 1) * kLanes);
    x[r] = combine(shuffle<Interleave<0>>(a, b), shuffle<Interleave<1>>(a, b));
  }
  combine_pairs<2>(x, combine);
  if constexpr (kLanes >= 8) combine_pairs<4>(x, combine);
  if constexpr (kLanes == 16) combine_pairs<8>(x, combine);
  return x[0];
}
ELSA_INLINE Floats row_maxima(const float* rows) {
  return reduce_rows(rows, [](Floats a, Floats b) { return max(a, b); });
}
ELSA_INLINE Floats row_sums(const float* rows) {
  return reduce_rows(rows, [](Floats a, Floats b) { return a + b; });
}

}  // namespace
}  // namespace elsa
