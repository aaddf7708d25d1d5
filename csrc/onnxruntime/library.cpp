// The custom-op library of elsa for ONNX Runtime 1.17 and later, and its CUDA provider from 1.18
// on.
#include <memory>
#include <mutex>
#include <vector>

#include "attention.h"
#include "window.h"

namespace elsa::ort {
namespace {

// A model whose nodes need different function bodies holds them under numbered names, because
// functions of one name are new in ONNX Runtime 1.27. To the library they are one operator.
constexpr const char* kAttentionNames[] = {"Attention", "Attention_2", "Attention_3",
                                           "Attention_4"};
constexpr const char* kPackedNames[] = {"PackedAttention", "PackedAttention_2", "PackedAttention_3",
                                        "PackedAttention_4"};
constexpr const char* kWindowNames[] = {"WindowAttention", "WindowAttention_2", "WindowAttention_3",
                                        "WindowAttention_4"};

// The domain `elsa` of one runtime: a process may hold several copies of ONNX Runtime.
class Domain {
 public:
  // on_gpu: there are plans for the CUDA provider, and the runtime is new enough.
  Domain(const OrtApi* api, bool on_gpu) : api(api) {
    check(CreateCustomOpDomain(api, "elsa", &domain_));
    add_all(nullptr);
    if (on_gpu) add_all(kCudaProvider);
  }
  void add_to(OrtSessionOptions* options) const { check(AddCustomOpDomain(api, options, domain_)); }

  const OrtApi* const api;

 private:
  void add_all(const char* provider) {
    add<AttentionKernel>(kAttentionNames, provider);
    add<PackedAttentionKernel>(kPackedNames, provider);
    add<WindowAttentionKernel>(kWindowNames, provider);
  }

  template <class Kernel, size_t kCount>
  void add(const char* const (&names)[kCount], const char* provider) {
    for (const char* name : names) {
      for (const ElementType type : {kFloat, kFloat16, kBFloat16}) {
        // Never destroyed: sessions may outlive every static object of this library.
        check(CustomOpDomain_Add(api, domain_, new Operator<Kernel>(name, type, provider)));
      }
    }
  }

  OrtCustomOpDomain* domain_ = nullptr;
};

const Domain& domain_of(const OrtApi* api, bool on_gpu) {
  static std::mutex mutex;
  static auto& domains = *new std::vector<std::unique_ptr<Domain>>();
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& domain : domains) {
    if (domain->api == api) return *domain;
  }
  domains.push_back(std::make_unique<Domain>(api, on_gpu));
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
  return guarded(api, [&] {
    const bool on_gpu = has_plans() && base->GetApi(kGpuApiVersion) != nullptr;
    domain_of(api, on_gpu).add_to(options);
  });
}
