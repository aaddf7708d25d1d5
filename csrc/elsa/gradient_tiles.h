// The register tile that the gradients of keys and values add.
#pragma once

#include "simd.h"
#include "tiles.h"

namespace elsa {
namespace {

// value_tile with the weights transposed: output rows are keys, and sums run over query rows.
template <int R, int V>
void key_tile(const ValueTile& t) {
  Floats acc[R][V];
  clear(acc);
  const float* values = t.values;
  const float* weights = t.weights;
  const int64_t count = t.count, weight_stride = t.weight_stride, value_stride = t.value_stride;
  ELSA_UNROLL_BY_4
  for (int64_t j = 0; j < count; ++j) {
    add_product(acc, values, [=](int r) { return weights[r]; });
    values += value_stride;
    weights += weight_stride;
  }
  float* out = t.out;
  const int64_t out_stride = t.out_stride;
  ELSA_UNROLL
  for (int r = 0; r < R; ++r) {
    ELSA_UNROLL
    for (int v = 0; v < V; ++v) {
      store(out + v * kLanes, load(out + v * kLanes) + acc[r][v]);
    }
    out += out_stride;
  }
}

template <class Rows>
struct KeyTileTable;
template <int... I>
struct KeyTileTable<Lanes<I...>> {
  // Indexed by [vectors - 1][rows - 1].
  static constexpr ValueFunction value[2][kTileRows] = {{key_tile<I + 1, 1>...},
                                                        {key_tile<I + 1, 2>...}};
};
using KeyTiles = KeyTileTable<MakeLanes<kTileRows>::type>;

}  // namespace
}  // namespace elsa
