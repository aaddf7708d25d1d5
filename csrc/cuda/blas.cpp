#include "blas.h"

#include <array>
#include <stdexcept>
#include <string>

namespace elsa_cuda {

namespace {

using namespace blas;

void ask(int status, const char* what) {
  if (status != 0) {
    throw std::runtime_error(std::string("cuBLASLt refused ") + what + ": status " +
                             std::to_string(status));
  }
}

const Functions& functions() {
  static const Functions found = [] {
    Functions made;
#define ELSA_FIND(field, symbol, ...)                                       \
  made.field = reinterpret_cast<int (*)(__VA_ARGS__)>(find_symbol(symbol)); \
  if (made.field == nullptr) throw std::runtime_error("this process has no " symbol);
    ELSA_BLAS_FUNCTIONS(ELSA_FIND)
#undef ELSA_FIND
    return made;
  }();
  return found;
}

// One for each device, for the life of the process.
Library library_of(Device device) {
  constexpr Device kMostDevices = 64;
  static std::array<Library, kMostDevices> made{};
  static std::mutex guard;
  if (device < 0 || device >= kMostDevices) throw std::runtime_error("too many devices");
  const std::lock_guard<std::mutex> lock(guard);
  Library& library = made[static_cast<size_t>(device)];
  if (library == nullptr) {
    Library fresh = nullptr;
    ask(functions().create(&fresh), "a handle");
    library = fresh;
  }
  return library;
}

// What a kind may take beside its operands; as much as PyTorch gives it on sm_90.
constexpr uint64_t kMostWorkspaceBytes = uint64_t{32} << 20;

}  // namespace

bool can_multiply() {
  try {
    functions();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

Product::Product(const ProductKind& kind, Device device, Address bias)
    : has_bias_(kind.bias), has_residual_(kind.residual) {
  const Functions& call = functions();
  library_ = library_of(device);
  const int type = kind.dtype == 5 ? kHalf : kBfloat;
  const auto depth = static_cast<int64_t>(kind.depth);
  try {
    ask(call.describe(&description_, kSumsOfFloats, kFloat), "a product");
    // of columns: out^T = weight x^T
    ask(call.set(description_, kTransposeFirst, &kTransposed, sizeof(kTransposed)), "a transpose");
    ask(call.lay_out(&weight_, type, kind.depth, kind.columns, depth), "a weight's layout");
    ask(call.lay_out(&x_, type, kind.depth, kind.rows, depth), "an input's layout");
    ask(call.lay_out(&out_, type, kind.columns, kind.rows, static_cast<int64_t>(kind.columns)),
        "a result's layout");
    if (has_bias_) {
      ask(call.set(description_, kEpilogue, &kAddBias, sizeof(kAddBias)), "a bias");
      ask(call.set(description_, kBias, &bias, sizeof(bias)), "a bias");
    }
    choose();
  } catch (...) {
    release();
    throw;
  }
}

void Product::choose() {
  const Functions& call = functions();
  Preference preference = nullptr;
  ask(call.prefer(&preference), "a preference");
  // Parts of a sum are added as float32, always in one order.
  int status = call.set_preference(preference, kMostWorkspace, &kMostWorkspaceBytes,
                                   sizeof(kMostWorkspaceBytes));
  if (status == 0)
    status = call.set_preference(preference, kReductions, &kReduceFloats, sizeof(kReduceFloats));
  for (int operand = 0; operand < 4 && status == 0; ++operand) {
    status = call.set_preference(preference, kAlignments + operand, &kProductAlignment,
                                 sizeof(kProductAlignment));
  }
  int found = 0;
  if (status == 0) {
    status = call.advise(library_, description_, weight_, x_, out_, out_, preference, 1, &advice_,
                         &found);
  }
  call.forget_preference(preference);
  ask(status, "an algorithm");
  if (found == 0) throw std::runtime_error("cuBLASLt has no algorithm");
  ask(advice_.status, "its algorithm");
}

Product::~Product() { release(); }

void Product::release() {
  const Functions& call = functions();
  if (description_ != nullptr) call.forget(description_);
  for (Layout layout : {x_, weight_, out_}) {
    if (layout != nullptr) call.forget_layout(layout);
  }
}

void Product::run(const ProductOperands& operands, Stream stream) const {
  const auto memory = [](Address address) { return reinterpret_cast<void*>(address); };
  const Functions& call = functions();
  const float one = 1.0f, share = has_residual_ ? 1.0f : 0.0f;
  const Address added = has_residual_ ? operands.residual : operands.out;
  const std::lock_guard<std::mutex> lock(guard_);
  if (has_bias_) ask(call.set(description_, kBias, &operands.bias, sizeof(Address)), "a bias");
  ask(call.multiply(library_, description_, &one, memory(operands.weight), weight_,
                    memory(operands.x), x_, &share, memory(added), out_, memory(operands.out), out_,
                    &advice_.algorithm, memory(operands.workspace), advice_.workspace, stream),
      "to multiply");
}

}  // namespace elsa_cuda
