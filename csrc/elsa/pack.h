// Operands as the micro-kernels want them: float32, dense, padded to whole vectors, keys
// transposed.
#pragma once

#include "gradient.h"
#include "simd.h"
#include "tiles.h"

namespace elsa {
namespace {

constexpr int64_t round_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }

// Takes parts of a workspace one after another, in floats.
class Carve {
 public:
  int64_t take(int64_t floats) {
    const int64_t start = top_;
    top_ += round_up(floats, 16);
    return start;
  }
  int64_t total() const { return top_; }

 private:
  int64_t top_ = 0;
};

// One matrix of a view: [rows, columns] at (batch, head).
struct Matrix {
  const char* data;
  int64_t row_stride;
  int64_t column_stride;
  DType dtype;

  const char* at(int64_t row, int64_t column) const {
    return data + (row * row_stride + column * column_stride) * element_size(dtype);
  }
  bool dense_floats() const { return dtype == DType::kFloat32 && column_stride == 1; }
};

ELSA_INLINE Matrix matrix(const View& v, int64_t batch, int64_t head) {
  const int64_t offset = batch * v.stride[0] + head * v.stride[1];
  return {static_cast<const char*>(v.data) + offset * element_size(v.dtype), v.stride[2],
          v.stride[3], v.dtype};
}

ELSA_INLINE float read_element(const char* p, DType dtype) {
  if (dtype == DType::kFloat32) {
    float x;
    __builtin_memcpy(&x, p, 4);
    return x;
  }
  if (dtype == DType::kBool) return *p ? 0.0f : -kInf;
  Halves h = {};
  __builtin_memcpy(&h, p, 2);
  return (dtype == DType::kFloat16 ? from_half(h) : from_bfloat(h))[0];
}

// `count` elements of a row as floats; booleans become 0 (true) and -inf.
__attribute__((noinline)) void convert_row(const Matrix& m, int64_t row, int64_t column,
                                           int64_t count, float* out) {
  const char* p = m.at(row, column);
  int64_t j = 0;
  if (m.column_stride == 1 && m.dtype == DType::kBool) {
    for (; j < count; ++j) out[j] = p[j] ? 0.0f : -kInf;
  } else if (m.column_stride == 1 && m.dtype != DType::kFloat32) {
    for (; j + kLanes <= count; j += kLanes) {
      const Halves h = *reinterpret_cast<const HalvesUnaligned*>(p + 2 * j);
      store(out + j, m.dtype == DType::kFloat16 ? from_half(h) : from_bfloat(h));
    }
  }
  const int64_t step = m.column_stride * element_size(m.dtype);
  for (; j < count; ++j) out[j] = read_element(p + j * step, m.dtype);
}
ELSA_INLINE void copy_row(const Matrix& m, int64_t row, int64_t column, int64_t count, float* out) {
  if (!m.dense_floats()) return convert_row(m, row, column, count, out);
  const float* p = reinterpret_cast<const float*>(m.at(row, column));
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) store(out + j, load(p + j));
  for (; j < count; ++j) out[j] = p[j];
}

// The first `columns` of a row, zeros up to `width`.
ELSA_INLINE void copy_padded(const Matrix& m, int64_t row, int64_t columns, int64_t width,
                             float* out) {
  copy_row(m, row, 0, columns, out);
  for (int64_t d = columns; d < width; ++d) out[d] = 0.0f;
}

// Rows of a matrix, as the packing below asks for them.
struct MatrixRows {
  const Matrix& m;

  bool dense_floats() const { return m.dense_floats(); }
  const float* floats(int64_t row, int64_t column) const {
    return reinterpret_cast<const float*>(m.at(row, column));
  }
  void copy(int64_t row, int64_t column, int64_t count, float* out) const {
    copy_row(m, row, column, count, out);
  }
};

// Keys [first, first + count) -> panels [wide_keys / kPanel][dim][kPanel]; a last partial panel
// repeats its last key, and the score tile masks it. Keys from `paired` on make one last panel of
// three vectors. Then the narrow panel, if any: [ceil(dim / 4)][kNarrow][4].
template <class Rows>
void pack_keys(const Rows& keys, int64_t first, int64_t count, int64_t dim, float* rows, float* out,
               int64_t paired = INT64_MAX) {
  const int64_t padded = round_up(dim, kLanes);
  const int64_t wide = wide_keys(count);
  const bool direct = keys.dense_floats() && dim >= kLanes;
  for (int64_t base = 0; base < wide; base += kLanes) {
    const int64_t present = smaller(kLanes, wide - base);
    const float* source[kLanes];
    for (int64_t i = 0; i < present; ++i) {
      source[i] = direct ? keys.floats(first + base + i, 0) : rows + i * padded;
      if (!direct) keys.copy(first + base + i, 0, dim, rows + i * padded);
    }
    for (int64_t i = present; i < kLanes; ++i) source[i] = source[present - 1];
    const int64_t panel_start = base < paired ? base / kPanel * kPanel : paired;
    const int64_t panel_stride = base < paired ? kPanel : 3 * kLanes;
    float* panel = out + panel_start * dim + (base - panel_start);
    for (int64_t d = 0; d < dim; d += kLanes) {
      // The last block overlaps the one before it rather than reading past the row.
      const int64_t start = direct ? smaller(d, dim - kLanes) : d;
      Floats block[kLanes];
      ELSA_UNROLL
      for (int i = 0; i < kLanes; ++i) block[i] = load(source[i] + start);
      transpose(block);
      ELSA_UNROLL
      for (int i = 0; i < kLanes; ++i) {
        if (start + i < dim) store(panel + (start + i) * panel_stride, block[i]);
      }
    }
  }
  if (wide == count) return;
  float* narrow = out + round_up(wide, kPanel) * dim;
  for (int64_t d = 0; d < dim; d += 4) store(narrow + d / 4 * kLanes, Floats{});
  for (int64_t j = 0; j < count - wide; ++j) {
    keys.copy(first + wide + j, 0, dim, rows);
    for (int64_t d = 0; d < dim; ++d) narrow[d / 4 * kLanes + j * 4 + d % 4] = rows[d];
  }
}

// Values [first, first + count) -> column panels [ceil(dim / kPanel)][count][kPanel or the rest],
// zero padded.
template <class Rows>
void pack_values(const Rows& values, int64_t first, int64_t count, int64_t dim, float* out) {
  for (int64_t c = 0; c < dim; c += kPanel) {
    const int64_t columns = smaller(kPanel, dim - c);
    const int64_t width = round_up(columns, kLanes);
    if (columns == kPanel && values.dense_floats()) {
      for (int64_t j = 0; j < count; ++j, out += kPanel) {
        const float* p = values.floats(first + j, c);
        ELSA_UNROLL
        for (int v = 0; v < kTileVectors; ++v) store(out + v * kLanes, load(p + v * kLanes));
      }
      continue;
    }
    for (int64_t j = 0; j < count; ++j, out += width) {
      if (columns < width) store(out + width - kLanes, Floats{});
      values.copy(first + j, c, columns, out);
    }
  }
}

// out[i] = row[i] * factor in the output's dtype.
ELSA_INLINE void store_row(const float* row, float factor, int64_t count, DType dtype, void* out) {
  if (dtype == DType::kFloat32) {
    float* p = static_cast<float*>(out);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(p + i, load(row + i) * factor);
    for (; i < count; ++i) p[i] = row[i] * factor;
    return;
  }
  uint16_t* p = static_cast<uint16_t*>(out);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats x = load(row + i) * factor;
    *reinterpret_cast<HalvesUnaligned*>(p + i) =
        dtype == DType::kFloat16 ? to_half(x) : to_bfloat(x);
  }
  for (; i < count; ++i) {
    const float x = row[i] * factor;
    p[i] = dtype == DType::kFloat16 ? to_half(x) : to_bfloat(x);
  }
}

// Rows [first, first + count) of a gradient, if it is wanted, from rows that lie `width` apart.
inline void write_rows(const Target& t, int64_t batch, int64_t head, int64_t first, int64_t count,
                       int64_t columns, float factor, const float* from, int64_t width) {
  if (t.data == nullptr) return;
  float* out = t.data + batch * t.stride[0] + head * t.stride[1] + first * t.stride[2];
  for (int64_t i = 0; i < count; ++i, from += width, out += t.stride[2]) {
    if (t.stride[3] == 1) {
      store_row(from, factor, columns, DType::kFloat32, out);
    } else {
      for (int64_t d = 0; d < columns; ++d) out[d * t.stride[3]] = from[d] * factor;
    }
  }
}

// Fetches rows of a matrix into the second-level cache, a few cache lines at a time.
class Prefetch {
 public:
  Prefetch() = default;
  Prefetch(const Matrix& m, int64_t rows, int64_t columns) : row_(m.at(0, 0)), rows_(rows) {
    stride_ = m.row_stride * element_size(m.dtype);
    bytes_ = m.column_stride <= 1 ? columns * element_size(m.dtype) : 0;
    if (bytes_ == 0) rows_ = 0;
  }
  int64_t lines() const { return rows_ * ((bytes_ + 63) / 64); }
  // Fetches up to `lines` lines; what is left of the budget.
  ELSA_INLINE int64_t step(int64_t lines) {
    while (lines > 0 && rows_ > 0) {
      __builtin_prefetch(row_ + offset_, 0, 2);
      --lines;
      offset_ += 64;
      if (offset_ >= bytes_) {
        offset_ = 0;
        row_ += stride_;
        --rows_;
      }
    }
    return lines;
  }

 private:
  const char* row_ = nullptr;
  int64_t rows_ = 0, stride_ = 0, bytes_ = 0, offset_ = 0;
};

}  // namespace
}  // namespace elsa
