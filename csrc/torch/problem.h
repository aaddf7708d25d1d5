// What the operators on query, key and value [batch, heads, tokens, dim] share: operands, checked.
#pragma once

#include <array>
#include <optional>

#include "../elsa/attention.h"
#include "../elsa/gradient.h"
#include "../elsa/sizes.h"
#include "common.h"

namespace elsa_torch {
namespace {

struct Operand {
  elsa::View view;
  std::array<int64_t, 4> size;
};

// A tensor [batch, heads, tokens, dim], or of packed sequences [tokens, heads, dim] as a batch of
// one.
Operand operand(const Tensor& tensor, const char* name, bool packed = false) {
  const int64_t rank = packed ? 3 : 4;
  STD_TORCH_CHECK(tensor.dim() == rank, "elsa::attention: ", name, " must have ", rank,
                  " dimensions, has ", tensor.dim());
  constexpr int kDense[] = {0, 1, 2, 3}, kPacked[] = {-1, 1, 0, 2};
  Operand o;
  for (int i = 0; i < 4; ++i) {
    const int from = packed ? kPacked[i] : kDense[i];
    o.size[i] = from < 0 ? 1 : tensor.size(from);
    o.view.stride[i] = o.size[i] == 1 ? 0 : tensor.stride(from);
  }
  o.view.data = tensor.const_data_ptr();
  o.view.dtype = dtype_of(tensor.scalar_type(), "elsa::attention");
  return o;
}

void check_shapes(const Operand& q, const Operand& k, const Operand& v) {
  STD_TORCH_CHECK(k.size[0] == q.size[0] && v.size[0] == q.size[0],
                  "elsa::attention: batch sizes differ: query ", q.size[0], ", key ", k.size[0],
                  ", value ", v.size[0]);
  STD_TORCH_CHECK(k.size[1] == v.size[1], "elsa::attention: key has ", k.size[1],
                  " heads and value ", v.size[1]);
  STD_TORCH_CHECK(k.size[1] > 0 ? q.size[1] % k.size[1] == 0 : q.size[1] == 0,
                  "elsa::attention: ", q.size[1], " query heads are no multiple of ", k.size[1],
                  " key heads");
  STD_TORCH_CHECK(k.size[2] == v.size[2], "elsa::attention: ", k.size[2], " keys and ", v.size[2],
                  " values");
  STD_TORCH_CHECK(k.size[3] == q.size[3], "elsa::attention: head_dim of query is ", q.size[3],
                  " and of key ", k.size[3]);
  STD_TORCH_CHECK(q.size[3] >= 1 && q.size[3] <= elsa::kLargestHeadDim && v.size[3] >= 1 &&
                      v.size[3] <= elsa::kLargestHeadDim,
                  "elsa::attention: head_dim must be 1 to ", elsa::kLargestHeadDim, ", got ",
                  q.size[3], " (query) and ", v.size[3], " (value)");
  STD_TORCH_CHECK(q.view.dtype == k.view.dtype && q.view.dtype == v.view.dtype,
                  "elsa::attention: query, key and value must have one dtype");
  STD_TORCH_CHECK(q.view.dtype != elsa::DType::kBool,
                  "elsa::attention: query must be float32, float16 or bfloat16");
}

elsa::View mask_view(const Tensor& tensor, const elsa::Attention& a) {
  const Operand m = operand(tensor, "attn_mask");
  const std::array<int64_t, 4> full = {a.batch, a.heads, a.queries, a.keys};
  for (int i = 0; i < 4; ++i) {
    STD_TORCH_CHECK(m.size[i] == full[i] || m.size[i] == 1, "elsa::attention: attn_mask has size ",
                    m.size[i], " in dimension ", i, ", must be 1 or ", full[i]);
  }
  STD_TORCH_CHECK(m.view.dtype == elsa::DType::kBool || m.view.dtype == elsa::DType::kFloat32 ||
                      m.view.dtype == a.query.dtype,
                  "elsa::attention: attn_mask must be bool, float32 or the query's dtype");
  return m.view;
}

elsa::Attention problem(const Tensor& query, const Tensor& key, const Tensor& value,
                        const std::optional<Tensor>& attn_mask, bool is_causal, double scale,
                        bool packed = false) {
  const Operand q = operand(query, "query", packed);
  const Operand k = operand(key, "key", packed);
  const Operand v = operand(value, "value", packed);
  check_shapes(q, k, v);

  elsa::Attention a;
  a.query = q.view;
  a.key = k.view;
  a.value = v.view;
  a.batch = q.size[0];
  a.heads = q.size[1];
  a.kv_heads = k.size[1];
  a.queries = q.size[2];
  a.keys = k.size[2];
  a.head_dim = q.size[3];
  a.value_dim = v.size[3];
  STD_TORCH_CHECK(elsa::fits(a), "elsa::attention: the tensors have too many elements");
  a.scale = static_cast<float>(scale);
  a.causal = is_causal;
  if (attn_mask.has_value()) a.mask = mask_view(*attn_mask, a);
  return a;
}

// [batch, heads, queries, value_dim] in the memory of [batch, queries, heads, value_dim].
Tensor output(const Tensor& query, elsa::Attention& a) {
  const int64_t row = a.heads * a.value_dim;
  Tensor out = empty<4>({a.batch, a.heads, a.queries, a.value_dim},
                        {a.queries * row, a.value_dim, row, 1}, dtype_code(query));
  a.out = out.mutable_data_ptr();
  return out;
}

// A gradient laid out as its operand, [batch, heads, tokens, dim] or packed [tokens, heads, dim],
// or nothing.
Tensor gradient_of(const Tensor& operand, bool needed, elsa::Target& target) {
  if (!needed) return nothing();
  Tensor gradient = torch::stable::empty_like(operand);
  target.data = floats(gradient);
  const auto strides = gradient.strides();
  if (gradient.dim() == 4) {
    for (int i = 0; i < 4; ++i) target.stride[i] = strides[i];
  } else {
    target.stride[1] = strides[1];
    target.stride[2] = strides[0];
    target.stride[3] = strides[2];
  }
  return gradient;
}

// The output of a forward or its gradient, which must be float32.
elsa::View output_view(const Tensor& tensor, const elsa::Attention& a, const char* name,
                       bool packed = false) {
  const Operand o = operand(tensor, name, packed);
  const std::array<int64_t, 4> size = {a.batch, a.heads, a.queries, a.value_dim};
  STD_TORCH_CHECK(o.size == size && o.view.dtype == elsa::DType::kFloat32,
                  "elsa::attention_backward: ", name, " must be float32 and of the output's shape");
  return o.view;
}

// Reads what the forward gave, and its slopes, into a gradient in float32; `kept` holds dense rows.
void read_results(elsa::AttentionGradient& g, const Tensor& grad_out,
                  const std::optional<Tensor>& grad_lse, const Tensor& out, const Tensor& lse,
                  const char* name, std::array<std::optional<Tensor>, 2>& kept,
                  bool packed = false) {
  const elsa::Attention& a = g.forward;
  STD_TORCH_CHECK(a.query.dtype == elsa::DType::kFloat32, name, ": the CPU kernel takes float32");
  g.out = output_view(out, a, "out", packed);
  g.grad_out = output_view(grad_out, a, "grad_out", packed);
  const auto rows = [&](const Tensor& t, const char* term) {
    STD_TORCH_CHECK(
        t.numel() == a.batch * a.heads * a.queries && t.scalar_type() == ScalarType::Float, name,
        ": ", term, " must be float32, one for each query and head");
    return t.is_contiguous() ? t : torch::stable::contiguous(t);
  };
  kept[0] = rows(lse, "lse");
  g.forward.lse = floats(*kept[0]);
  if (!grad_lse.has_value()) return;
  kept[1] = rows(*grad_lse, "grad_lse");
  g.grad_lse = floats(*kept[1]);
}

}  // namespace
}  // namespace elsa_torch
