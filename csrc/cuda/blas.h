// Products by the cuBLASLt that PyTorch has loaded. PyTorch asks that library for an algorithm in
// each call; here a kind of product asks once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "driver.h"

namespace elsa_cuda {

// What of cublasLt.h is used, with its layouts and values (tests compare them with a real one).
namespace blas {
using Library = struct OpaqueLibrary*;
using Description = struct OpaqueDescription*;
using Layout = struct OpaqueLayout*;
using Preference = struct OpaquePreference*;

constexpr int kSumsOfFloats = 68;                             // cublasComputeType_t
constexpr int kFloat = 0, kHalf = 2, kBfloat = 14;            // cudaDataType
constexpr int kTransposeFirst = 3, kEpilogue = 7, kBias = 8;  // cublasLtMatmulDescAttributes_t
constexpr int32_t kTransposed = 1;                            // cublasOperation_t
constexpr uint32_t kAddBias = 4;                              // cublasLtEpilogue_t
// cublasLtMatmulPreferenceAttributes_t; the alignments of four operands have numbers in a row.
constexpr int kMostWorkspace = 1, kReductions = 3, kAlignments = 5;
constexpr uint32_t kReduceFloats = 2;  // cublasLtReductionScheme_t

struct Algorithm {  // cublasLtMatmulAlgo_t
  uint64_t data[8];
};

struct Advice {  // cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  size_t workspace;  // bytes
  int status;
  float waves;
  int reserved[4];
};

#define ELSA_BLAS_FUNCTIONS(F)                                                                     \
  F(create, "cublasLtCreate", Library*)                                                            \
  F(describe, "cublasLtMatmulDescCreate", Description*, int, int)                                  \
  F(set, "cublasLtMatmulDescSetAttribute", Description, int, const void*, size_t)                  \
  F(forget, "cublasLtMatmulDescDestroy", Description)                                              \
  F(lay_out, "cublasLtMatrixLayoutCreate", Layout*, int, uint64_t, uint64_t, int64_t)              \
  F(forget_layout, "cublasLtMatrixLayoutDestroy", Layout)                                          \
  F(prefer, "cublasLtMatmulPreferenceCreate", Preference*)                                         \
  F(set_preference, "cublasLtMatmulPreferenceSetAttribute", Preference, int, const void*, size_t)  \
  F(forget_preference, "cublasLtMatmulPreferenceDestroy", Preference)                              \
  F(advise, "cublasLtMatmulAlgoGetHeuristic", Library, Description, Layout, Layout, Layout,        \
    Layout, Preference, int, Advice*, int*)                                                        \
  F(multiply, "cublasLtMatmul", Library, Description, const void*, const void*, Layout,            \
    const void*, Layout, const void*, const void*, Layout, void*, Layout, const Algorithm*, void*, \
    size_t, Stream)

struct Functions {
#define ELSA_FIELD(field, symbol, ...) int (*field)(__VA_ARGS__);
  ELSA_BLAS_FUNCTIONS(ELSA_FIELD)
#undef ELSA_FIELD
};
}  // namespace blas

// Whether this process has cuBLASLt.
bool can_multiply();

// x weight^T + bias + residual of rows that lie one behind the other, in sums of float32, rounded
// once: x [rows, depth], weight [columns, depth], bias [columns], the others [rows, columns]. All
// begin at multiples of `kProductAlignment` bytes.
constexpr uint32_t kProductAlignment = 16;
struct ProductKind {
  int32_t dtype = 0;  // PyTorch's number: 5 float16, 15 bfloat16
  uint64_t rows = 0, columns = 0, depth = 0;
  bool bias = false, residual = false;
};

struct ProductOperands {
  Address x = 0, weight = 0, bias = 0, residual = 0;  // 0 where the kind has none
  Address out = 0, workspace = 0;
};

// A kind of product on the device whose primary context is current. Throws std::runtime_error:
// this process has no cuBLASLt, or that no algorithm.
class Product {
 public:
  Product(const ProductKind& kind, Device device, Address bias);
  ~Product();
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  uint64_t workspace() const { return advice_.workspace; }  // bytes

  // With that context current. Throws std::runtime_error.
  void run(const ProductOperands& operands, Stream stream) const;

 private:
  void choose();
  void release();

  blas::Library library_ = nullptr;
  blas::Description description_ = nullptr;
  blas::Layout x_ = nullptr, weight_ = nullptr, out_ = nullptr;
  blas::Advice advice_{};
  bool has_bias_, has_residual_;
  mutable std::mutex guard_;  // of the description, which names the bias
};

}  // namespace elsa_cuda
