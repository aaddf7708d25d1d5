// The gradients of one head: five products over register tiles, one block of rows and keys at a
// time. Attention and windows share it; they bring rows in and carry gradients out.
#pragma once

#include "blocks.h"
#include "philox.h"

namespace elsa {
namespace {

constexpr int64_t kGradientTiles = 72 / kTileRows;  // of a block of rows, at most
// Floats of the weights of one block: they and their gradients stay in a second-level cache.
constexpr int64_t kGradientScores = 12288;
// Above this |lse| its rounding shows in the weights: maximum and sum are then computed again.
constexpr float kLargestLse = 2048.0f;

// What one head needs, and the offsets of its arrays in a workspace, in floats.
struct GradientLayout {
  int64_t rows, keys, key_block, depth, value_dim;
  int64_t key_blocks, width, value_width, score_stride, block_rows;
  int64_t query, grad_out, grad_query, grad_key, grad_value;  // [rows or keys][width]
  int64_t key_panels, value_panels, key_columns, copy;        // of one key block
  int64_t weights, slopes, keep, lanes, dots;                 // of one block of rows and keys
  int64_t reference, factor, delta, row_sums;                 // [rows], and a register's surplus
  int64_t total;
  bool whole;  // one block holds all keys that the rows see

  GradientLayout(int64_t rows, int64_t keys, int64_t key_block, int64_t depth, int64_t value_dim,
                 bool dropping = false, bool shard = false)
      : rows(rows), keys(keys), key_block(key_block), depth(depth), value_dim(value_dim) {
    key_blocks = ceil_div(keys, key_block);
    whole = key_blocks == 1 && !shard;
    width = round_up(depth, kLanes);
    value_width = round_up(value_dim, kLanes);
    score_stride = row_stride(key_block + kLanes);
    const int64_t cached = kGradientScores / (kTileRows * score_stride);
    // Blocks of nearly equal height: 49 rows are one, not 48 and 1.
    const int64_t most = kTileRows * (cached < 2 ? 2 : smaller(cached, kGradientTiles));
    const int64_t blocks = ceil_div(rows, most);
    block_rows = ceil_div(rows, blocks);
    Carve carve;
    query = carve.take(rows * width);
    grad_out = carve.take(rows * value_width);
    grad_query = carve.take(rows * width);
    grad_key = carve.take(keys * width);
    grad_value = carve.take(keys * value_width);
    key_panels = carve.take((key_block + kPanel) * depth);
    value_panels = carve.take((key_block + kPanel) * value_dim);
    key_columns = carve.take(key_block * width);
    copy = carve.take(kLanes * (width > value_width ? width : value_width));
    weights = carve.take(block_rows * score_stride);
    slopes = carve.take(block_rows * score_stride);
    keep = carve.take(dropping ? block_rows * score_stride : 0);
    lanes = carve.take(round_up(block_rows, kLanes) * kLanes);
    dots = carve.take(round_up(block_rows, kLanes) * kLanes);
    reference = carve.take(rows + kLanes);
    factor = carve.take(rows + kLanes);
    delta = carve.take(rows + kLanes);
    row_sums = carve.take(2 * (block_rows + kLanes));
    total = carve.total();
  }
};

struct Wanted {
  bool query, key, value;
};

// For callers whose next operands are near.
struct NoFetch {
  ELSA_INLINE void step() {}
};

// The gradients of one head. The caller fills query and grad_out (rows padded with zeros), clears
// the sums, then calls pack() for each block of keys with row_block() for each block of rows
// within. grad_query and grad_key come out without the factor `scale`. `Fetch::step()` is called
// between register tiles, at least once for each row: it may fetch a part of what comes next.
template <class Fetch>
class HeadGradient {
 public:
  HeadGradient(const GradientLayout& at, float* memory, float scale, bool causal)
      : at_(at), memory_(memory), scale_(scale), causal_(causal) {}

  // Drops weights of this head from here on; null for none. The layout must have been made for it.
  void drop(const Dropout* dropout, int64_t head) {
    dropout_ = dropout;
    head_index_ = head;
  }

  float* query(int64_t row) const { return memory_ + at_.query + row * at_.width; }
  float* grad_out(int64_t row) const { return memory_ + at_.grad_out + row * at_.value_width; }
  float* grad_query(int64_t row) const { return memory_ + at_.grad_query + row * at_.width; }
  float* grad_key(int64_t key) const { return memory_ + at_.grad_key + key * at_.width; }
  float* grad_value(int64_t key) const { return memory_ + at_.grad_value + key * at_.value_width; }
  // P = factor * exp(score - reference), and what is subtracted from dP, where there are several
  // key blocks, or further keys: the caller's. Else they are computed from the scores.
  float* reference() const { return memory_ + at_.reference; }
  float* factor() const { return memory_ + at_.factor; }
  float* delta() const { return memory_ + at_.delta; }
  bool whole() const { return at_.whole; }
  Fetch& fetch() { return fetch_; }

  void clear_query() { clear(at_.grad_query, at_.rows * at_.width); }
  void clear_keys() {
    clear(at_.grad_key, at_.keys * at_.width);
    clear(at_.grad_value, at_.keys * at_.value_width);
  }

  // Packs the keys and values [block * key_block, ...).
  template <class Rows>
  ELSA_NOINLINE void pack(int64_t block, const Rows& keys, const Rows& values) {
    first_key_ = block * at_.key_block;
    keys_ = smaller(at_.key_block, at_.keys - first_key_);
    float* const copy = memory_ + at_.copy;
    pack_keys(keys, first_key_, keys_, at_.depth, copy, memory_ + at_.key_panels);
    pack_keys(values, first_key_, keys_, at_.value_dim, copy, memory_ + at_.value_panels);
    pack_columns(keys);
  }

  // Folds the packed keys into rows [row, row + block_rows) and adds to the gradients. The caller's
  // `bias(t, row, rows, key, keys)` sets a tile's bias for these rows and keys, `take(row, keys,
  // slope)` is shown the gradient of each row's scores. lse_slope: [rows] or null.
  template <class Bias, class Take>
  void row_block(int64_t row, const float* lse_slope, Wanted wanted, Bias bias, Take take) {
    if (!place(row)) return;
    scores(false, bias);
    scores(true, bias);
    if (dropout_) drop_slopes();
    if (whole()) {
      softmax(lse_slope);
    } else {
      weigh();
    }
    for (int64_t i = 0; i < rows_; ++i) {
      take(row + i, visible_, memory_ + at_.slopes + i * at_.score_stride);
    }
    const float* const weights = memory_ + at_.weights;
    const float* const slopes = memory_ + at_.slopes;
    if (dropout_ && wanted.value) drop_weights();
    if (wanted.value) {
      add_to_keys(weights, grad_out(row), at_.value_width, grad_value(first_key_));
    }
    if (wanted.key) add_to_keys(slopes, query(row), at_.width, grad_key(first_key_));
    if (wanted.query) add_to_rows(row);
  }

  // Folds the packed keys' scores of these rows into reference (the maximum) and factor (the sum).
  template <class Bias>
  void normalise(int64_t row, Bias bias) {
    if (!place(row)) return;
    scores(true, bias);
    float* const lanes = memory_ + at_.lanes;
    for (int64_t i = 0; i < rows_; ++i) {
      float& running = reference()[row + i];
      float most = running;
      for (int l = 0; l < kLanes; ++l) {
        const float maximum = lanes[i * kLanes + l];
        most = maximum > most ? maximum : most;
      }
      const float base = most == -kInf ? 0.0f : most;
      float* const weights = memory_ + at_.weights + i * at_.score_stride;
      const Floats parts = exponentiate(weights, round_up(visible_, kLanes), base, kLog2E);
      float sum = 0.0f;
      for (int l = 0; l < kLanes; ++l) sum += parts[l];
      const Floats rescale = exp2_nonpositive(splat((running - base) * kLog2E));
      factor()[row + i] = factor()[row + i] * rescale[0] + sum;
      running = most;
    }
  }

  int64_t block_rows() const { return at_.block_rows; }

 private:
  void clear(int64_t start, int64_t floats) {
    for (int64_t i = 0; i < floats; i += kLanes) store(memory_ + start + i, Floats{});
  }

  // As pack_values, but a row is copied as a whole: it may be normalised on the way.
  template <class Rows>
  void pack_columns(const Rows& keys) {
    float* const row = memory_ + at_.copy;
    float* const columns = memory_ + at_.key_columns;
    for (int64_t j = 0; j < keys_; ++j) {
      keys.copy(first_key_ + j, 0, at_.depth, row);
      for (int64_t d = at_.depth; d < at_.width; ++d) row[d] = 0.0f;
      for (int64_t c = 0; c < at_.width; c += kPanel) {
        const int64_t width = smaller(kPanel, at_.width - c);
        float* const out = columns + keys_ * c + j * width;
        for (int64_t d = 0; d < width; d += kLanes) {
          // Rows that see a NaN have it in their slopes; those from which it is hidden have zeros,
          // and zero times what is not finite is no number.
          const Floats x = load(row + c + d), zero = x - x;
          store(out + d, zero == zero ? x : Floats{});
        }
      }
    }
  }

  // Cuts the rows into register tiles; false where they see none of the packed keys.
  bool place(int64_t row) {
    row_ = row;
    rows_ = smaller(at_.block_rows, at_.rows - row);
    visible_ = causal_ ? smaller(keys_, row + rows_ - first_key_) : keys_;
    if (visible_ <= 0) return false;
    const int64_t tiles = ceil_div(rows_, kTileRows);
    block_.cut(row, rows_, tiles, 0, tiles);
    return true;
  }

  // query * key^T with scale, bias and what is hidden, or grad_out * value^T plain.
  template <class Bias>
  ELSA_NOINLINE void scores(bool of_keys, Bias bias) {
    ScoreTile t = {};
    t.query = of_keys ? query(row_) : grad_out(row_);
    t.query_stride = of_keys ? at_.width : at_.value_width;
    t.depth = of_keys ? at_.depth : at_.value_dim;
    t.scores = memory_ + (of_keys ? at_.weights : at_.slopes);
    t.score_stride = at_.score_stride;
    t.row_max = memory_ + at_.lanes;
    forget_maxima(t.row_max, rows_);
    t.scaled = of_keys;
    t.scale = scale_;
    if (of_keys) bias(t, row_, rows_, first_key_, visible_);
    const float* const packed = memory_ + (of_keys ? at_.key_panels : at_.value_panels);
    const int64_t visible = causal_ ? row_ + 1 - first_key_ : kAllVisible;
    each_score_tile(
        t, block_, {packed, keys_, visible_, visible},
        [this](const Tile&, int64_t) { return visible_; }, [this] { fetch_.step(); });
  }

  // Lanes beyond the last key, and the keys that a row does not see, hold -inf in dP as in the
  // scores: zeros there, for zero times infinity is NaN.
  ELSA_INLINE void clear_hidden(float* slopes, int64_t local) const {
    const int64_t end = round_up(visible_, kLanes);
    int64_t seen = visible_;
    if (causal_) seen = smaller(seen, row_ + local + 1 - first_key_);
    for (int64_t j = seen < 0 ? 0 : seen; j < end; ++j) slopes[j] = 0.0f;
  }

  // dP times what the weights are multiplied by, which is kept for them.
  ELSA_NOINLINE void drop_slopes() {
    for (int64_t i = 0; i < rows_; ++i) {
      float* const slopes = memory_ + at_.slopes + i * at_.score_stride;
      float* const kept = memory_ + at_.keep + i * at_.score_stride;
      each_factor(*dropout_, head_index_, row_ + i, first_key_, round_up(visible_, kLanes),
                  [slopes, kept](int64_t j, Floats keep) {
                    store(kept + j, keep);
                    store(slopes + j, load(slopes + j) * keep);
                  });
    }
  }

  ELSA_NOINLINE void drop_weights() {
    const int64_t count = round_up(visible_, kLanes);
    for (int64_t i = 0; i < rows_; ++i) {
      float* const weights = memory_ + at_.weights + i * at_.score_stride;
      const float* const kept = memory_ + at_.keep + i * at_.score_stride;
      for (int64_t j = 0; j < count; j += kLanes) {
        store(weights + j, load(weights + j) * load(kept + j));
      }
    }
  }

  // Scores and dP of whole rows -> P and dS. A row that sees no key has zeros in both.
  ELSA_NOINLINE void softmax(const float* lse_slope) {
    const int64_t count = round_up(visible_, kLanes);
    float* const lanes = memory_ + at_.lanes;
    float* const dots = memory_ + at_.dots;
    float* const sums = memory_ + at_.row_sums;
    float* const deltas = sums + at_.block_rows + kLanes;
    for (int64_t i = 0; i < rows_; i += kLanes) {
      const Floats m = row_maxima(lanes + i * kLanes);
      store(reference() + i, m == splat(-kInf) ? Floats{} : m);
    }
    for (int64_t i = 0; i < rows_; ++i) {
      float* const weights = memory_ + at_.weights + i * at_.score_stride;
      float* const slopes = memory_ + at_.slopes + i * at_.score_stride;
      clear_hidden(slopes, i);
      const float maximum = reference()[i];
      Floats sum = {}, dot = {};
      for (int64_t j = 0; j < count; j += kLanes) {
        const Floats e = exp2_nonpositive((load(weights + j) - maximum) * kLog2E);
        store(weights + j, e);
        sum += e;
        dot += e * load(slopes + j);
      }
      store(lanes + i * kLanes, sum);
      store(dots + i * kLanes, dot);
      fetch_.step();
    }
    for (int64_t i = 0; i < rows_; i += kLanes) {
      const Floats sum = ::elsa::row_sums(lanes + i * kLanes);
      const Floats inverse = sum == 0.0f ? Floats{} : 1.0f / sum;
      store(sums + i, inverse);
      store(deltas + i, ::elsa::row_sums(dots + i * kLanes) * inverse);
    }
    for (int64_t i = 0; i < rows_; ++i) {
      float* const weights = memory_ + at_.weights + i * at_.score_stride;
      float* const slopes = memory_ + at_.slopes + i * at_.score_stride;
      const bool dead = sums[i] == 0.0f;
      const float delta = deltas[i] - (lse_slope ? lse_slope[row_ + i] : 0.0f);
      for (int64_t j = 0; j < count; j += kLanes) {
        const Floats p = load(weights + j) * sums[i];
        store(weights + j, p);
        store(slopes + j, dead ? Floats{} : p * (load(slopes + j) - delta));
      }
    }
  }

  // The same for a part of the keys, from what the caller knows of the whole rows.
  ELSA_NOINLINE void weigh() {
    const int64_t count = round_up(visible_, kLanes);
    for (int64_t i = 0; i < rows_; ++i) {
      float* const weights = memory_ + at_.weights + i * at_.score_stride;
      float* const slopes = memory_ + at_.slopes + i * at_.score_stride;
      clear_hidden(slopes, i);
      const float base = reference()[row_ + i], factor = this->factor()[row_ + i];
      const float delta = this->delta()[row_ + i];
      const bool dead = factor == 0.0f;
      for (int64_t j = 0; j < count; j += kLanes) {
        const Floats e = exp2_nonpositive((load(weights + j) - base) * kLog2E);
        const Floats p = dead ? Floats{} : e * factor;
        store(weights + j, p);
        store(slopes + j, dead ? Floats{} : p * (load(slopes + j) - delta));
      }
    }
  }

  // out[key] += sum over rows of weights[row][key] * values[row].
  ELSA_NOINLINE void add_to_keys(const float* weights, const float* values, int64_t width,
                                 float* out) {
    ValueTile t = {};
    t.weight_stride = at_.score_stride;
    t.value_stride = t.out_stride = width;
    t.count = rows_;
    t.accumulate = true;
    const int64_t tiles = ceil_div(visible_, kTileRows);
    for (int64_t c = 0; c < width; c += kPanel) {
      t.values = values + c;
      const ValueFunction* const functions = Tiles::value<false, true>[width - c > kLanes];
      for (int64_t i = 0; i < tiles; ++i) {
        const int64_t key = i * visible_ / tiles, end = (i + 1) * visible_ / tiles;
        t.weights = weights + key;
        t.out = out + key * width + c;
        functions[end - key - 1](t);
        fetch_.step();
      }
    }
  }

  // grad_query[row] += sum over keys of slopes[row][key] * key.
  ELSA_NOINLINE void add_to_rows(int64_t row) {
    ValueTile t = {};
    t.weight_stride = at_.score_stride;
    t.out_stride = at_.width;
    t.accumulate = true;
    const int64_t chunks = ceil_div(visible_, kSumChunk);
    const float* columns = memory_ + at_.key_columns;
    for (int64_t c = 0; c < at_.width; c += kPanel) {
      t.value_stride = smaller(kPanel, at_.width - c);
      for (int64_t chunk = 0, key = 0; chunk < chunks; ++chunk) {
        const int64_t end = (chunk + 1) * visible_ / chunks;
        t.values = columns + key * t.value_stride;
        t.count = end - key;
        for (const Tile& tile : block_) {
          t.weights = memory_ + at_.slopes + tile.local * at_.score_stride + key;
          t.out = grad_query(row + tile.local) + c;
          Tiles::value<false>[t.value_stride > kLanes][tile.rows - 1](t);
          fetch_.step();
        }
        key = end;
      }
      columns += keys_ * t.value_stride;
    }
  }

  const GradientLayout& at_;
  float* const memory_;
  const float scale_;
  const bool causal_;
  const Dropout* dropout_ = nullptr;
  int64_t head_index_ = 0;
  Fetch fetch_;
  int64_t first_key_ = 0, keys_ = 0;  // of the packed block
  int64_t row_ = 0, rows_ = 0, visible_ = 0;
  RowBlock<kGradientTiles> block_;
};

}  // namespace
}  // namespace elsa
