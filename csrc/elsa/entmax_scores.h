// The scores of a block of query rows against a block of keys, and sums over listed keys.
#pragma once

#include "blocks.h"
#include "entmax_rows.h"

namespace elsa {
namespace {

struct ScoreLayout {
  int64_t keys, query, scores, bias, rows, row_max;

  ScoreLayout(Carve& carve, const Attention& a, const Plan& plan) {
    const int64_t blocks = plan.keep_packed ? plan.key_blocks : 1;
    keys = carve.take(blocks * (plan.key_block + kPanel) * a.head_dim);
    query = carve.take(kBlockRows * row_stride(a.head_dim));
    scores = carve.take(kBlockRows * row_stride(plan.key_block + kLanes));
    bias = carve.take(a.mask.data ? kBlockRows * row_stride(plan.key_block) + kPanel : 0);
    rows = carve.take(kLanes * round_up(a.head_dim, kLanes));
    row_max = carve.take(round_up(kBlockRows, kLanes) * kLanes);
  }
};

class Scores {
 public:
  Scores(const Attention& a, const Plan& plan, const ScoreLayout& at, float* memory, int64_t batch)
      : a_(a),
        plan_(plan),
        at_(at),
        memory_(memory),
        batch_(batch),
        query_stride_(row_stride(a.head_dim)),
        score_stride_(row_stride(plan.key_block + kLanes)),
        few_(a.queries <= kFewQueries || wide_keys(a.keys) <= kLanes) {}

  int64_t first_key() const { return first_key_; }
  int64_t key_count() const { return keys_; }
  void of_head(int64_t head) { head_ = head; }

  // Goes to a block of keys; packs them unless they are there from before.
  void go_to(int64_t block, const Matrix& key, bool packed) {
    first_key_ = block * plan_.key_block;
    keys_ = smaller(plan_.key_block, a_.keys - first_key_);
    const int64_t stride = (plan_.key_block + kPanel) * a_.head_dim;
    panels_ = memory_ + at_.keys + (plan_.keep_packed ? block * stride : 0);
    if (packed) return;
    pack_keys(MatrixRows{key}, first_key_, keys_, a_.head_dim, memory_ + at_.rows, panels_);
  }

  // Calls visit(row, rows) for the blocks of rows [first, first + rows), of nearly equal height.
  template <class Visit>
  void each_block(int64_t first, int64_t rows, Visit visit) {
    const int64_t together = block_tiles(smaller(plan_.key_block, a_.keys));
    const int64_t tiles = ceil_div(rows, kTileRows);
    for (int64_t tile = 0; tile < tiles; tile += together) {
      block_.cut(first, rows, tiles, tile, smaller(together, tiles - tile));
      visit(block_.row, block_.rows);
    }
  }

  // Keys of the block that a row sees; may be negative.
  int64_t seen_by(int64_t row) const {
    return a_.causal ? smaller(keys_, row + 1 - first_key_) : keys_;
  }

  // The scores of the block's rows with the panels for whose first key `wanted(key)` holds, and
  // their lane-wise maxima.
  template <class Wanted>
  ELSA_NOINLINE void compute(Wanted wanted) {
    const Matrix query = matrix(a_.query, batch_, head_);
    float* const queries = memory_ + at_.query;
    for (int64_t i = 0; i < block_.rows; ++i) {
      const int64_t padded = round_up(a_.head_dim, 4);
      copy_padded(query, block_.row + i, a_.head_dim, padded, queries + i * query_stride_);
    }
    ScoreTile t = {};
    t.query = queries;
    t.query_stride = query_stride_;
    t.depth = a_.head_dim;
    t.scores = memory_ + at_.scores;
    t.score_stride = score_stride_;
    t.row_max = memory_ + at_.row_max;
    forget_maxima(t.row_max, block_.rows);
    t.few = few_;
    t.scaled = true;
    t.scale = a_.scale;
    const int64_t most = seen_by(block_.row + block_.rows - 1);
    if (a_.mask.data) {
      read_mask(matrix(a_.mask, batch_, head_), block_.row, block_.rows, first_key_, most,
                memory_ + at_.bias, row_stride(plan_.key_block), t);
    }
    const int64_t visible = a_.causal ? block_.row + 1 - first_key_ : kAllVisible;
    const auto seen = [&](const Tile& tile, int64_t panel) {
      return wanted(first_key_ + panel) ? seen_by(block_.row + tile.local + tile.rows - 1) : 0;
    };
    each_score_tile(t, block_, {panels_, keys_, most, visible}, seen, [] {});
  }

  const float* scores(int64_t local) const { return memory_ + at_.scores + local * score_stride_; }
  const float* row_max(int64_t local) const { return memory_ + at_.row_max + local * kLanes; }

 private:
  const Attention& a_;
  const Plan& plan_;
  const ScoreLayout& at_;
  float* const memory_;
  const int64_t batch_, query_stride_, score_stride_;
  const bool few_;
  int64_t head_ = 0;
  int64_t first_key_ = 0, keys_ = 0;  // of the block of keys
  float* panels_ = nullptr;
  RowBlock<kBlockTiles> block_;
};

// Rows of float32, dense and padded to whole registers.
struct Dense {
  const float* data;
  int64_t stride;
};

bool is_padded(const View& view, int64_t columns) {
  return view.dtype == DType::kFloat32 && view.stride[3] == 1 && columns % kLanes == 0;
}

// V registers of out += sum over entries of weights[e] * rows[keys[e] - first].
template <int V>
ELSA_INLINE void gather_columns(const float* weights, const int32_t* keys, int64_t count,
                                int64_t first, const float* rows, int64_t stride, float* out) {
  while (count > 0) {
    const int64_t chain = smaller(count, kSumChunk);
    Floats even[V], odd[V];
    ELSA_UNROLL
    for (int v = 0; v < V; ++v) even[v] = odd[v] = Floats{};
    int64_t e = 0;
    for (; e + 2 <= chain; e += 2) {
      const float* const one = rows + (keys[e] - first) * stride;
      const float* const two = rows + (keys[e + 1] - first) * stride;
      ELSA_UNROLL
      for (int v = 0; v < V; ++v) {
        even[v] = even[v] + splat(weights[e]) * load(one + v * kLanes);
        odd[v] = odd[v] + splat(weights[e + 1]) * load(two + v * kLanes);
      }
    }
    if (e < chain) {
      const float* const one = rows + (keys[e] - first) * stride;
      ELSA_UNROLL
      for (int v = 0; v < V; ++v) even[v] = even[v] + splat(weights[e]) * load(one + v * kLanes);
    }
    ELSA_UNROLL
    for (int v = 0; v < V; ++v) {
      store(out + v * kLanes, load(out + v * kLanes) + (even[v] + odd[v]));
    }
    weights += chain;
    keys += chain;
    count -= chain;
  }
}

// out [width] += sum over entries of weights[e] * rows[keys[e] - first].
ELSA_NOINLINE void gather(const float* weights, const int32_t* keys, int64_t count, int64_t first,
                          Dense rows, int64_t width, float* out) {
  int64_t c = 0;
  for (; c + 4 * kLanes <= width; c += 4 * kLanes) {
    gather_columns<4>(weights, keys, count, first, rows.data + c, rows.stride, out + c);
  }
  for (; c < width; c += kLanes) {
    gather_columns<1>(weights, keys, count, first, rows.data + c, rows.stride, out + c);
  }
}

}  // namespace
}  // namespace elsa
