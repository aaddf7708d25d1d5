// elsa::varlen_attention on the CPU, through PyTorch's stable ABI: no Python, ATen or c10 symbol.
#include "../elsa/varlen.h"

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "problem.h"

namespace elsa_torch {
namespace {

constexpr const char* kName = "elsa::varlen_attention";

// Cumulative lengths, which decide what memory is read: checked.
std::vector<int64_t> bounds(const Tensor& given, const char* name, int64_t tokens) {
  STD_TORCH_CHECK(given.dim() == 1 && given.numel() >= 1, kName, ": ", name,
                  " must be of rank 1 and hold 0 at least");
  const Tensor dense = given.is_contiguous() ? given : torch::stable::contiguous(given);
  const bool wide = given.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(wide || given.scalar_type() == ScalarType::Int, kName, ": ", name,
                  " must be int32 or int64");
  const void* const data = dense.const_data_ptr();
  std::vector<int64_t> found(dense.numel());
  for (size_t i = 0; i < found.size(); ++i) {
    found[i] = wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  bool rises = found.front() == 0 && found.back() == tokens;
  for (size_t i = 1; i < found.size(); ++i) rises = rises && found[i] >= found[i - 1];
  STD_TORCH_CHECK(rises, kName, ": ", name, " must start with 0, not decrease and end with ",
                  tokens);
  return found;
}

struct Packed {
  elsa::Attention problem;
  std::vector<int64_t> query, key;

  elsa::Sequences sequences() const {
    return {query.data(), key.data(), static_cast<int64_t>(query.size()) - 1};
  }
};

Packed packed(const Tensor& query, const Tensor& key, const Tensor& value,
              const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, bool is_causal,
              double scale) {
  Packed p;
  p.problem = problem(query, key, value, std::nullopt, is_causal, scale, true);
  const elsa::Attention& a = p.problem;
  p.query = bounds(cu_seqlens_q, "cu_seqlens_q", a.queries);
  p.key = bounds(cu_seqlens_k, "cu_seqlens_k", a.keys);
  STD_TORCH_CHECK(p.query.size() == p.key.size(), kName,
                  ": cu_seqlens_q and cu_seqlens_k must have one length");
  return p;
}

std::tuple<Tensor, Tensor> varlen_attention(const Tensor& query, const Tensor& key,
                                            const Tensor& value, const Tensor& cu_seqlens_q,
                                            const Tensor& cu_seqlens_k, bool is_causal,
                                            double scale, std::string precision) {
  Packed p = packed(query, key, value, cu_seqlens_q, cu_seqlens_k, is_causal, scale);
  elsa::Attention& a = p.problem;
  Tensor out = empty<3>({a.queries, a.heads, a.value_dim}, dtype_code(query));
  Tensor lse = empty<2>({a.heads, a.queries});
  a.out = out.mutable_data_ptr();
  a.lse = floats(lse);
  run(kName, [&](auto... how) { return elsa::varlen_attention(a, p.sequences(), how...); });
  return {out, lse};
}

// As elsa::varlen_attention_backward of operands in float32.
std::tuple<Tensor, Tensor, Tensor> varlen_attention_backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& query,
    const Tensor& key, const Tensor& value, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
    const Tensor& out, const Tensor& lse, bool is_causal, double scale, bool needs_query,
    bool needs_key, bool needs_value) {
  Packed p = packed(query, key, value, cu_seqlens_q, cu_seqlens_k, is_causal, scale);
  elsa::AttentionGradient g;
  g.forward = p.problem;
  std::array<std::optional<Tensor>, 2> kept;
  read_results(g, grad_out, grad_lse, out, lse, "elsa::varlen_attention_backward", kept, true);
  Tensor grad_query = gradient_of(query, needs_query, g.query);
  Tensor grad_key = gradient_of(key, needs_key, g.key);
  Tensor grad_value = gradient_of(value, needs_value, g.value);
  run(kName, [&](auto... how) { return elsa::varlen_gradient(g, p.sequences(), how...); });
  return {grad_query, grad_key, grad_value};
}

}  // namespace
}  // namespace elsa_torch

// The schemas belong to elsa_core/ops alone: no bundle holds these operators yet, and a
// library that is loaded without Python registers kernels of operators that are not defined.
STABLE_TORCH_LIBRARY_IMPL(elsa, CPU, m) {
  m.impl("varlen_attention", TORCH_BOX(&elsa_torch::varlen_attention));
  m.impl("varlen_attention_backward_native", TORCH_BOX(&elsa_torch::varlen_attention_backward));
}
