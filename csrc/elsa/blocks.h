// Blocks of query rows, cut into register tiles, and the walk of these tiles over packed keys.
#pragma once

#include "pack.h"
#include "tiles.h"

namespace elsa {
namespace {

// Register tiles whose scores exist together: at most these, and no more than kCachedScores unless
// that were fewer than two.
constexpr int64_t kBlockTiles = 48 / kTileRows;
constexpr int64_t kBlockRows = kBlockTiles * kTileRows;
constexpr int64_t kCachedScores = 6144;  // 24 KiB: weights are read once for each panel of values

inline int64_t block_tiles(int64_t keys) {
  const int64_t cached = kCachedScores / (kTileRows * round_up(keys, kLanes));
  return cached < 2 ? 2 : smaller(cached, kBlockTiles);
}

constexpr int64_t kSpan = 64;  // keys of which sparse problems know the maxima of rows
static_assert(kSpan % kPanel == 0 && kSpan <= kSumChunk, "a span is whole panels and one chain");

// Rows of a register tile; `local` counts from the block's first row.
struct Tile {
  int64_t local, rows;
};

template <int64_t Most>
struct RowBlock {
  int64_t row = 0, rows = 0, count = 0;  // its first row, and how many rows and tiles
  Tile tiles[Most];

  // Tiles [first, first + some) of `all` of nearly equal height that `total` rows from `start` on
  // make: 197 rows are 10 x 12 + 7 x 11, not 16 x 12 + 5.
  void cut(int64_t start, int64_t total, int64_t all, int64_t first, int64_t some) {
    row = start + first * total / all;
    count = some;
    for (int64_t i = 0; i < some; ++i) {
      tiles[i].local = start + (first + i) * total / all - row;
      tiles[i].rows = start + (first + i + 1) * total / all - row - tiles[i].local;
    }
    rows = tiles[some - 1].local + tiles[some - 1].rows;
  }
  const Tile* begin() const { return tiles; }
  const Tile* end() const { return tiles + count; }
};

// What pack_keys() has packed, as a block of rows sees it.
struct Panels {
  const float* packed;
  int64_t keys, most;       // packed ones, and those that some row sees
  int64_t visible;          // those that the first row sees, or kAllVisible
  int64_t maxima_step = 0;  // floats from the maxima of one span to the next's; 0: one for all
};

// Computes scores panel by panel. `t` holds what tiles share, and where the block's first row, its
// scores, maxima and bias lie. A tile meets the first seen(tile, panel) keys; after() is called
// between tiles.
template <int64_t Most, class Seen, class After>
ELSA_INLINE void each_score_tile(ScoreTile t, const RowBlock<Most>& block, const Panels& panels,
                                 Seen seen, After after) {
  const float *const query = t.query, *const bias = t.bias;
  float *const scores = t.scores, *const row_max = t.row_max;
  const int64_t wide = wide_keys(panels.keys);
  for (int64_t panel = 0; panel < panels.most;) {
    const bool narrow = panel == wide;
    t.panel = panels.packed + round_up(panel, kPanel) * t.depth;
    for (const Tile& tile : block) {
      const int64_t count = seen(tile, panel);
      t.valid = (narrow ? count : smaller(count, wide)) - panel;
      if (t.valid <= 0) continue;
      t.visible = panels.visible + tile.local - panel;
      t.query = query + tile.local * t.query_stride;
      t.scores = scores + tile.local * t.score_stride + panel;
      t.row_max = row_max + panel / kSpan * panels.maxima_step + tile.local * kLanes;
      if (bias) t.bias = bias + tile.local * t.bias_stride + panel;
      const ScoreFunction* const functions =
          narrow ? Tiles::narrow : Tiles::score<false>[t.valid > kLanes];
      functions[tile.rows - 1](t);
      after();
    }
    panel = panel < wide ? smaller(panel + kPanel, wide) : panels.keys;
  }
}

// Points a tile's bias at the mask of these rows and keys: at a copy, but for dense floats.
inline void read_mask(const Matrix& mask, int64_t row, int64_t rows, int64_t key, int64_t keys,
                      float* copy, int64_t copy_stride, ScoreTile& t) {
  t.hides = mask.dtype == DType::kBool;
  if (mask.dense_floats()) {
    t.bias = reinterpret_cast<const float*>(mask.at(row, key));
    t.bias_stride = mask.row_stride;
    return;
  }
  t.bias = copy;
  t.bias_stride = mask.row_stride == 0 ? 0 : copy_stride;
  for (int64_t i = 0; i < (mask.row_stride == 0 ? 1 : rows); ++i) {
    copy_row(mask, row + i, key, keys, copy + i * copy_stride);
  }
}

// -inf in the lanes of the maxima of `rows` rows.
ELSA_INLINE void forget_maxima(float* row_max, int64_t rows) {
  for (int64_t i = 0; i < round_up(rows, kLanes); ++i) store(row_max + i * kLanes, splat(-kInf));
}

}  // namespace
}  // namespace elsa
