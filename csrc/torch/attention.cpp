// elsa::attention on the CPU, through PyTorch's stable ABI: no Python, ATen or c10 symbol.
#include "../elsa/attention.h"

#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>

#include "problem.h"

namespace elsa_torch {
namespace {

constexpr const char* kName = "elsa::attention";
constexpr const char* kBackwardName = "elsa::attention_backward";

// As `threshold` and `factors` in elsa_core/backends/philox.py.
elsa::Dropout dropout_of(double p, const Tensor& seed) {
  STD_TORCH_CHECK(
      seed.numel() == 2 && seed.scalar_type() == ScalarType::Long && seed.is_contiguous(),
      "elsa::attention_dropout: seed must be int64 [2]");
  STD_TORCH_CHECK(p >= 0.0 && p <= 1.0, "elsa::attention_dropout: dropout_p must be in [0, 1]");
  const int64_t* const words = static_cast<const int64_t*>(seed.const_data_ptr());
  elsa::Dropout d;
  d.seed = static_cast<uint64_t>(words[0]);
  d.offset = static_cast<uint32_t>(words[1]);
  const double threshold = std::nearbyint(p * 2147483648.0);
  d.threshold = threshold < 2147483647.0 ? static_cast<int32_t>(threshold) : 2147483647;
  d.kept = p < 1.0 ? static_cast<float>(1.0 / (1.0 - p)) : 0.0f;
  return d;
}

std::tuple<Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const std::optional<Tensor>& attn_mask, bool is_causal,
                                   double scale, const elsa::Dropout* dropout,
                                   const elsa::Sparse* sparse = nullptr,
                                   Tensor* lse_low = nullptr) {
  elsa::Attention a = problem(query, key, value, attn_mask, is_causal, scale);
  a.dropout = dropout;
  a.sparse = sparse;
  Tensor out = output(query, a);
  Tensor lse = empty<3>({a.batch, a.heads, a.queries});
  a.lse = floats(lse);
  if (lse_low) {
    *lse_low = torch::stable::empty_like(lse);
    a.lse_low = floats(*lse_low);
  }
  run(kName, [&](auto... how) { return elsa::attention(a, how...); });
  return {out, lse};
}

std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const std::optional<Tensor>& attn_mask, bool is_causal,
                                     double scale, std::string precision) {
  return forward(query, key, value, attn_mask, is_causal, scale, nullptr);
}

// As elsa::attention, and what rounding to float32 took from lse.
std::tuple<Tensor, Tensor, Tensor> attention_state(const Tensor& query, const Tensor& key,
                                                   const Tensor& value,
                                                   const std::optional<Tensor>& attn_mask,
                                                   bool is_causal, double scale) {
  Tensor low = nothing();
  auto [out, lse] = forward(query, key, value, attn_mask, is_causal, scale, nullptr, nullptr, &low);
  return {out, lse, low};
}

std::tuple<Tensor, Tensor> attention_dropout(const Tensor& query, const Tensor& key,
                                             const Tensor& value,
                                             const std::optional<Tensor>& attn_mask, bool is_causal,
                                             double scale, std::string precision, double dropout_p,
                                             const Tensor& seed) {
  const elsa::Dropout dropout = dropout_of(dropout_p, seed);
  return forward(query, key, value, attn_mask, is_causal, scale, &dropout);
}

// As `exact_threshold` in elsa_core/base/skipping.py: log2 of u / 8 and of 1 / keys.
double exact_threshold(const Tensor& query, int64_t keys) {
  const elsa::DType dtype = dtype_of(query.scalar_type(), kName);
  const double of_dtype = dtype == elsa::DType::kFloat32   ? -27.0
                          : dtype == elsa::DType::kFloat16 ? -14.0
                                                           : -11.0;
  double bits = 0.0;
  for (; (int64_t{1} << static_cast<int>(bits)) < keys; bits += 1.0) {
  }
  return of_dtype - bits;
}

// As elsa::sparse_attention in elsa_core/ops/sparse/record.py.
std::tuple<Tensor, Tensor, Tensor> sparse_attention(const Tensor& query, const Tensor& key,
                                                    const Tensor& value,
                                                    const std::optional<Tensor>& attn_mask,
                                                    bool is_causal, double scale,
                                                    std::string precision, double threshold,
                                                    int64_t relief) {
  STD_TORCH_CHECK(threshold <= 0.0 && relief >= 0 && relief < 8,
                  "elsa::sparse_attention: threshold must not be positive, relief 0 to 7");
  const elsa::Attention a = problem(query, key, value, attn_mask, is_causal, scale);
  const int64_t batch = a.batch, heads = a.heads;
  Tensor counts = empty<3>({batch, heads, elsa::kCounts}, aoti_torch_dtype_int64());
  elsa::Sparse sparse;
  sparse.counts = static_cast<int64_t*>(counts.mutable_data_ptr());
  for (int64_t i = 0; i < batch * heads * elsa::kCounts; ++i) sparse.counts[i] = 0;
  sparse.threshold =
      static_cast<float>(threshold == 0.0 ? exact_threshold(query, a.keys) : threshold);
  auto [out, lse] = forward(query, key, value, attn_mask, is_causal, scale, nullptr, &sparse);
  return {out, lse, counts};
}

// As elsa::attention_backward of operands in float32, without a gradient of the mask; with a seed
// as elsa::attention_dropout_backward. is_shard: `out` and `lse` are of rows that see further keys.
std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& query,
    const Tensor& key, const Tensor& value, const std::optional<Tensor>& attn_mask,
    const Tensor& out, const Tensor& lse, bool is_causal, double scale, double dropout_p,
    const std::optional<Tensor>& seed, bool needs_query, bool needs_key, bool needs_value,
    bool is_shard) {
  elsa::AttentionGradient g;
  g.shard = is_shard;
  g.forward = problem(query, key, value, attn_mask, is_causal, scale);
  elsa::Dropout dropout;
  if (seed.has_value()) {
    dropout = dropout_of(dropout_p, *seed);
    g.forward.dropout = &dropout;
  }
  std::array<std::optional<Tensor>, 2> kept;
  read_results(g, grad_out, grad_lse, out, lse, kBackwardName, kept);
  Tensor grad_query = gradient_of(query, needs_query, g.query);
  Tensor grad_key = gradient_of(key, needs_key, g.key);
  Tensor grad_value = gradient_of(value, needs_value, g.value);
  run(kBackwardName, [&](auto... how) { return elsa::attention_gradient(g, how...); });
  return {grad_query, grad_key, grad_value};
}

}  // namespace
}  // namespace elsa_torch

STABLE_TORCH_LIBRARY_FRAGMENT(elsa, m) {
  // In Python the schema belongs to elsa_core/ops; alone (C++, TorchScript) the library
  // brings its own. The operators of gradients are for Python alone, which defines them.
  if (getenv("ELSA_SCHEMA_DEFINED_BY_PYTHON") == nullptr) {
    m.def(
        "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, "
        "float scale, str precision) -> (Tensor, Tensor)");
  }
}

STABLE_TORCH_LIBRARY_IMPL(elsa, CPU, m) {
  m.impl("attention", TORCH_BOX(&elsa_torch::attention));
  m.impl("attention_dropout", TORCH_BOX(&elsa_torch::attention_dropout));
  m.impl("sparse_attention", TORCH_BOX(&elsa_torch::sparse_attention));
  m.impl("attention_backward_native", TORCH_BOX(&elsa_torch::attention_backward));
  m.impl("attention_state_native", TORCH_BOX(&elsa_torch::attention_state));
}

// For `elsa doctor`: the kernels that run here, or null where ELSA_CPU_ISA names what this CPU
// lacks.
extern "C" __attribute__((visibility("default"))) const char* elsa_cpu_isa() {
  return elsa::isa_name();
}

// For `elsa bench --trace`: how a call would be cut. shape: batch, heads, kv_heads, queries, keys,
// head_dim, value_dim. answer: the fields of elsa::Cut. Not 0 where no kernels run here.
extern "C" __attribute__((visibility("default"))) int elsa_cpu_cut(const int64_t* shape, int causal,
                                                                   int threads, int64_t* answer) {
  elsa::Attention problem = {};
  int64_t* const sizes[] = {&problem.batch, &problem.heads,    &problem.kv_heads, &problem.queries,
                            &problem.keys,  &problem.head_dim, &problem.value_dim};
  for (int i = 0; i < 7; ++i) *sizes[i] = shape[i];
  problem.causal = causal != 0;
  elsa::Cut cut = {};
  const elsa::Status status = elsa::cut(problem, threads, &cut);
  const int64_t fields[] = {cut.key_block, cut.key_blocks, cut.query_ranges, cut.workers,
                            cut.block_rows};
  for (int i = 0; i < 5; ++i) answer[i] = fields[i];
  return static_cast<int>(status);
}
