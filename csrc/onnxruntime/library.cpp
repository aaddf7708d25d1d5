// The custom-op library of elsa for ONNX Runtime 1.17 and later, and its CUDA provider from 1.18
// on.
#include <map>
#include <mutex>
#include <string>

#include "attention.h"
#include "window.h"

namespace elsa::ort {
namespace {

// Under four names: a model whose nodes need different function bodies holds them under numbered
// ones, because functions of one name are new in ONNX Runtime 1.27. To the library they are one.
template <class Kernel>
void add(const OrtApi* api, OrtCustomOpDomain* domain, const std::string& name,
         const char* provider) {
  for (const char* number : {"", "_2", "_3", "_4"}) {
    // Never destroyed: sessions may outlive every static object of this library.
    const auto& numbered = *new std::string(name + number);
    for (const ElementType type : {kFloat, kFloat16, kBFloat16}) {
      check(
          CustomOpDomain_Add(api, domain, new Operator<Kernel>(numbered.c_str(), type, provider)));
    }
  }
}

// The domain `elsa` of one runtime: a process may hold several copies of ONNX Runtime. on_gpu:
// there are plans for the CUDA provider, and the runtime is new enough.
OrtCustomOpDomain* domain_of(const OrtApi* api, bool on_gpu) {
  static std::mutex mutex;
  static auto& domains = *new std::map<const OrtApi*, OrtCustomOpDomain*>();
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = domains.find(api); found != domains.end()) return found->second;
  OrtCustomOpDomain* domain = nullptr;
  check(CreateCustomOpDomain(api, "elsa", &domain));
  for (const char* provider : {static_cast<const char*>(nullptr), kCudaProvider}) {
    if (provider != nullptr && !on_gpu) continue;
    add<AttentionKernel>(api, domain, "Attention", provider);
    add<PackedAttentionKernel>(api, domain, "PackedAttention", provider);
    add<WindowAttentionKernel>(api, domain, "WindowAttention", provider);
  }
  return domains[api] = domain;
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
    check(AddCustomOpDomain(api, options, domain_of(api, on_gpu)));
  });
}
