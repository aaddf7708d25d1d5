// Micro-kernels over rows that lie anywhere: queries are read and outputs written where the image
// has them. Otherwise as tiles.h, whose panels and register tiles they share.
#pragma once

#include "simd.h"
#include "tiles.h"

namespace elsa {
namespace {

struct RowScores {
  const float* const* query;  // [R] rows of `depth`; the narrow tile reads whole groups of 4
  const float* panel;
  int64_t depth;
  float* scores;  // [R][stride]; of the narrow tile [valid][stride], whole groups of 4 rows
  int64_t stride;
  float* row_max;  // [R][kLanes], running; not the narrow tile's
  int64_t valid;   // keys that exist from the panel's start on
  bool few;        // no more than kLanes keys go into panels
  bool scaled;     // scores are multiplied by scale here (and not in the softmax)
  float scale;
  const float* bias;  // [R][bias_stride], null for none; read only where `scaled`
  int64_t bias_stride;
  const float* bias_end;  // no read at or beyond it
};

// The row after `row`. Computed there and then: the addresses of all rows do not fit in registers.
template <class T>
ELSA_INLINE T* row_after(T* row, int64_t stride) {
  row += stride;
  asm("" : "+r"(row));
  return row;
}

template <int R, int V>
void row_score_tile(const RowScores& t) {
  Floats acc[R][V];
  clear(acc);
  const float* query[R];
  ELSA_UNROLL
  for (int r = 0; r < R; ++r) query[r] = t.query[r];
#if !defined(__AVX512F__)
  if (const float* const bias = t.bias) {
    // The next panel's part of the bias: too many rows for the hardware to follow.
    ELSA_UNROLL
    for (int r = 0; r < R; ++r) {
      const float* ahead = bias + r * t.bias_stride + V * kLanes;
      for (int i = 0; i < V * kLanes; i += 16) __builtin_prefetch(ahead + i);
    }
  }
#endif
  const float* panel = t.panel;
  const int64_t depth = t.depth;
  int64_t d = 0, chunk = depth_chunk(depth);
  if (V == 1 && t.few) {
    Floats sums[R];
    d = few_scores(query, panel, depth, sums);
    set_column(acc, 0, sums);
    panel += d * kPanel;
    chunk = depth;
  }
  for (int64_t end = chunk;; end += chunk) {
    const int64_t stop = end < depth ? end : depth;
    ELSA_UNROLL_BY_4
    for (; d < stop; ++d) {
      add_product(acc, panel, [&](int r) { return query[r][d]; });
      panel += V > kTileVectors ? V * kLanes : kPanel;
    }
    if (end > chunk) {
      add_stored(acc,
                 [scores = t.scores, stride = t.stride](int r) { return scores + r * stride; });
    }
    if (end >= depth) break;
    park(acc, t.scores, t.stride);
  }
  // Copies, because the compiler must assume that the stores below change `t`.
  const int64_t valid = t.valid, stride = t.stride;
  const bool whole = valid >= V * kLanes;
  if (t.scaled && t.bias) {
    const float scale = t.scale;
    const int64_t bias_stride = t.bias_stride;
    const float* bias = t.bias;
    ELSA_UNROLL
    for (int r = 0; r < R; ++r) {
      ELSA_UNROLL
      for (int v = 0; v < V; ++v) {
        const float* p = bias + v * kLanes;
#if defined(__AVX512F__)
        const Floats added = v + 1 < V ? load(p) : load_first(p, valid - v * kLanes, 0.0f);
#else
        const Floats added = whole ? load(p) : load_before(p, t.bias_end);
#endif
        acc[r][v] = acc[r][v] * scale + added;
      }
      bias = row_after(bias, bias_stride);
    }
  } else if (t.scaled) {
    ELSA_UNROLL
    for (int r = 0; r < R; ++r) {
      ELSA_UNROLL
      for (int v = 0; v < V; ++v) acc[r][v] = acc[r][v] * t.scale;
    }
  }
  if (!whole) {
    ELSA_UNROLL
    for (int r = 0; r < R; ++r) {
      ELSA_UNROLL
      for (int v = 0; v < V; ++v) acc[r][v] = keep_first(acc[r][v], valid - v * kLanes);
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
    scores = row_after(scores, stride);
  }
}

// The plain products of the last few keys, as narrow_score_tile; a row of scores is a key's.
template <int R>
void row_narrow_tile(const RowScores& t) {
  constexpr int kGroups = (R + 3) / 4;
  Floats acc[kGroups * 4];
  const float* query[R];
  ELSA_UNROLL
  for (int r = 0; r < R; ++r) query[r] = t.query[r];
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
  for (int g = 0; g < kGroups; ++g) {
    float sums[kLanes];  // [key][row of the group]
    store(sums, sums_of_keys(acc + 4 * g));
    for (int64_t j = 0; j < t.valid; ++j) {
      __builtin_memcpy(t.scores + j * t.stride + 4 * g, sums + 4 * j, 4 * sizeof(float));
    }
  }
}

struct RowSums {
  const float* weights;  // [R][stride]
  int64_t stride;
  const float* values;  // [count][value_stride]
  int64_t value_stride;
  int64_t count;
  const float* narrow;  // [narrow_count][narrow_stride], the weights of the keys after those
  int64_t narrow_stride;
  int64_t narrow_count;
  float* const* out;  // [R] rows, from `column` on
  int64_t column;
  bool accumulate;
  const float* factor;  // [R], multiplied on at the end; null for none
};

template <int R, int V>
void row_value_tile(const RowSums& t) {
  Floats acc[R][V];
  clear(acc);
  const float* weights[R];
  ELSA_UNROLL
  for (int r = 0; r < R; ++r) weights[r] = t.weights + r * t.stride;
  const float* values = t.values;
  const int64_t count = t.count, value_stride = t.value_stride;
  ELSA_UNROLL_BY_4
  for (int64_t j = 0; j < count; ++j) {
    add_product(acc, values, [&](int r) { return weights[r][j]; });
    values += value_stride;
  }
  const float* narrow = t.narrow;
  for (int64_t j = 0; j < t.narrow_count; ++j) {
    add_product(acc, values, [=](int r) { return narrow[r]; });
    values += value_stride;
    narrow += t.narrow_stride;
  }
  float* out[R];
  ELSA_UNROLL
  for (int r = 0; r < R; ++r) out[r] = t.out[r] + t.column;
  const auto row = [&](int r) { return out[r]; };
  if (t.accumulate) add_stored(acc, row);
  multiply(acc, t.factor);
  store_rows(acc, row);
}

using RowScoreFunction = void (*)(const RowScores&);
using RowValueFunction = void (*)(const RowSums&);

template <class Rows>
struct RowTileTable;
template <int... I>
struct RowTileTable<Lanes<I...>> {
  // Indexed by [vectors - 1][rows - 1].
  static constexpr RowScoreFunction score[2][kTileRows] = {{row_score_tile<I + 1, 1>...},
                                                           {row_score_tile<I + 1, 2>...}};
  static constexpr RowScoreFunction narrow[kTileRows] = {row_narrow_tile<I + 1>...};
  static constexpr RowValueFunction value[2][kTileRows] = {{row_value_tile<I + 1, 1>...},
                                                           {row_value_tile<I + 1, 2>...}};
};
using RowTiles = RowTileTable<MakeLanes<kTileRows>::type>;

template <class Rows>
struct TripleTable;
template <int... I>
struct TripleTable<Lanes<I...>> {
  static constexpr RowScoreFunction score[] = {row_score_tile<I + 1, 3>...};
};
template <int Rows>
using TripleTiles = TripleTable<typename MakeLanes<Rows>::type>;

}  // namespace
}  // namespace elsa
