// The tokens of a window: where they lie in the image, which of them mix, and their rows.
#pragma once

#include "pack.h"
#include "simd.h"
#include "window_kernel.h"

namespace elsa {
namespace {

constexpr int64_t kRegions = 8;     // two on each shifted axis
constexpr float kNormEps = 1e-12f;  // of torch.nn.functional.normalize

// The tokens of one window.
struct Tokens {
  int64_t window = -1;  // batch index * windows + window, or -1
  bool masked = false;  // some of its tokens do not mix
  const char** source;  // [tokens], channels of each
  char** target;        // [tokens], where the output goes; null for padding
  uint8_t* region;      // [tokens], where masked: those of equal region mix
  float* mask;          // [regions][tokens]: what is added to the scores of a region's queries
};

int64_t mask_stride(const WindowPlan& plan) { return round_up(plan.tokens, kLanes); }
bool shifted(const WindowAttention& a) { return a.shift[0] || a.shift[1] || a.shift[2]; }

// Floats that `place` carves out.
int64_t token_floats(const WindowAttention& a, const WindowPlan& plan) {
  constexpr int64_t kPointer = sizeof(void*) / sizeof(float);
  const int64_t regions = shifted(a) ? round_up(plan.tokens, 4) / 4 : 0;
  const int64_t masks = shifted(a) ? kRegions * mask_stride(plan) : 0;
  return 2 * kPointer * plan.tokens + masks + regions;
}

// Carves the arrays of `t` out of `memory`.
void place(const WindowAttention& a, const WindowPlan& plan, float* memory, Tokens& t) {
  t.source = reinterpret_cast<const char**>(memory);
  t.target = const_cast<char**>(t.source) + plan.tokens;
  t.mask = reinterpret_cast<float*>(t.target + plan.tokens);
  t.region = reinterpret_cast<uint8_t*>(t.mask + (shifted(a) ? kRegions * mask_stride(plan) : 0));
}

// Where the tokens of window `index` lie, and which of them mix.
ELSA_NOINLINE void find_tokens(const WindowAttention& a, const WindowPlan& plan, int64_t index,
                               Tokens& t) {
  t.window = index;
  const int64_t size = element_size(a.dtype);
  int64_t at[3];  // the window's place on each axis
  int64_t rest = index;
  for (int i = 2; i >= 0; --i) {
    at[i] = rest % plan.windows[i];
    rest /= plan.windows[i];
  }
  const int64_t batch = rest;
  bool last[3];
  t.masked = false;
  for (int i = 0; i < 3; ++i) {
    last[i] = a.shift[i] > 0 && at[i] + 1 == plan.windows[i];
    t.masked |= last[i];
  }
  // Place of a window's c-th token on an axis, or -1 where it is padding.
  const auto find = [&](int axis, int64_t c) -> int64_t {
    if (a.grid) return c * plan.windows[axis] + at[axis];
    const int64_t rolled = at[axis] * a.window[axis] + c;
    if (rolled >= plan.extent[axis]) return -1;
    const int64_t place = rolled + plan.roll[axis];
    return place < plan.extent[axis] ? place : place - plan.extent[axis];
  };
  const char* const image = static_cast<const char*>(a.qkv) + batch * a.stride[0] * size;
  char* const out = static_cast<char*>(a.out);
  const int64_t channels = a.heads * a.head_dim * size;
  int64_t n = 0;
  for (int64_t z = 0; z < a.window[0]; ++z) {
    const int64_t depth = find(0, z);
    const int front = last[0] && z >= a.window[0] - a.shift[0] ? 4 : 0;
    for (int64_t y = 0; y < a.window[1]; ++y) {
      const int64_t height = find(1, y);
      const int top = last[1] && y >= a.window[1] - a.shift[1] ? 2 : 0;
      const char* row = image + (depth * a.stride[1] + height * a.stride[2]) * size;
      const int64_t first = ((batch * a.depth + depth) * a.height + height) * a.width;
      for (int64_t x = 0; x < a.window[2]; ++x, ++n) {
        const int64_t width = find(2, x);
        const bool padding = depth < 0 || height < 0 || width < 0;
        t.source[n] = padding ? plan.pad : row + width * a.stride[3] * size;
        t.target[n] = padding ? nullptr : out + (first + width) * channels;
        if (t.masked) {
          const int left = last[2] && x >= a.window[2] - a.shift[2] ? 1 : 0;
          t.region[n] = static_cast<uint8_t>(front + top + left);
        }
      }
    }
  }
  if (!t.masked) return;
  for (int64_t g = 0; g < kRegions; ++g) {
    float* mask = t.mask + g * mask_stride(plan);
    for (int64_t i = 0; i < plan.tokens; ++i) mask[i] = t.region[i] == g ? 0.0f : a.mask_value;
  }
}

// Divides a row by its length, as torch.nn.functional.normalize does.
ELSA_NOINLINE void normalise(float* row, int64_t dim) {
  Floats squares = {};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    const Floats x = load(row + d);
    squares += x * x;
  }
  float sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) sum += squares[i];
  for (int64_t i = d; i < dim; ++i) sum += row[i] * row[i];
  const float length = __builtin_sqrtf(sum);
  const float divisor = length < kNormEps ? kNormEps : length;
  for (d = 0; d + kLanes <= dim; d += kLanes) store(row + d, load(row + d) / divisor);
  for (; d < dim; ++d) row[d] /= divisor;
}

// One of query, key and value of a window and head, as pack.h reads rows.
struct TokenRows {
  const char* const* source;
  int64_t offset;  // bytes from a token's channels to the head's
  DType dtype;
  bool normalised;

  bool dense_floats() const { return dtype == DType::kFloat32 && !normalised; }
  const float* floats(int64_t row, int64_t column) const {
    return reinterpret_cast<const float*>(source[row] + offset) + column;
  }
  ELSA_INLINE void copy(int64_t row, int64_t column, int64_t count, float* out) const {
    copy_row(Matrix{source[row] + offset, 0, 1, dtype}, 0, column, count, out);
    if (normalised) normalise(out, count);
  }
};

}  // namespace
}  // namespace elsa
