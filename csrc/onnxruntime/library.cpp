// The custom-op library of elsa for ONNX Runtime 1.17 and later.
#include <memory>
#include <mutex>
#include <vector>

#include "attention.h"
#include "window.h"

namespace elsa::ort {
namespace {

// The domain `elsa` of one runtime: a process may hold several copies of ONNX Runtime.
class Domain {
 public:
  explicit Domain(const OrtApi* api) : api(api) {
    check(CreateCustomOpDomain(api, "elsa", &domain_));
    for (const ElementType type : {kFloat, kFloat16, kBFloat16}) {
      add(std::make_unique<Operator<AttentionKernel>>(api, type), attention_);
      add(std::make_unique<Operator<PackedAttentionKernel>>(api, type), packed_);
      add(std::make_unique<Operator<WindowAttentionKernel>>(api, type), window_);
    }
  }
  void add_to(OrtSessionOptions* options) const { check(AddCustomOpDomain(api, options, domain_)); }

  const OrtApi* const api;

 private:
  template <class Op>
  void add(std::unique_ptr<Op> op, std::vector<std::unique_ptr<Op>>& owner) {
    check(CustomOpDomain_Add(api, domain_, op.get()));
    owner.push_back(std::move(op));
  }

  OrtCustomOpDomain* domain_ = nullptr;
  std::vector<std::unique_ptr<Operator<AttentionKernel>>> attention_;
  std::vector<std::unique_ptr<Operator<PackedAttentionKernel>>> packed_;
  std::vector<std::unique_ptr<Operator<WindowAttentionKernel>>> window_;
};

const Domain& domain_of(const OrtApi* api) {
  static std::mutex mutex;
  // Sessions may outlive every static object of this library, so this one is never destroyed.
  static auto& domains = *new std::vector<std::unique_ptr<Domain>>();
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& domain : domains) {
    if (domain->api == api) return *domain;
  }
  domains.push_back(std::make_unique<Domain>(api));
  return *domains.back();
}

}  // namespace
}  // namespace elsa::ort

// The entry point that ONNX Runtime looks up by name.
extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(
    OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace elsa::ort;
  const OrtApi* api = base->GetApi(kApiVersion);
  if (api == nullptr) {
    return CreateStatus(base->GetApi(1), kNotImplemented,
                        "elsa needs ONNX Runtime 1.17 or later; this one is older");
  }
  return guarded(api, [&] { domain_of(api).add_to(options); });
}
