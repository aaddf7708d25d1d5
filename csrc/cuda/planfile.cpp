#include "planfile.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>

namespace elsa_cuda {
namespace {

constexpr uint64_t kFileMagic = 0x534e414c50414c45;  // "ELAPLANS"
constexpr uint32_t kFileVersion = 4;
constexpr uint32_t kMostItems = 1 << 16;
constexpr uint32_t kMostArchs = 64;      // a message names all of them
constexpr int kMajor = 75, kMinor = 76;  // CUdevice_attribute: compute capability

constexpr char kNoFile[] = "no plan file: ", kTooLarge[] = "a number is too large";

[[noreturn]] void refuse_file(const std::string& why) { throw std::runtime_error(kNoFile + why); }

using Name = std::pair<std::string, std::vector<uint64_t>>;
using Plans = std::map<Name, std::shared_ptr<const Plan>>;
using Archs = std::set<uint32_t>;  // 90 for sm_90

struct Files {
  std::mutex guard;
  std::map<uint32_t, Plans> plans;  // by architecture, of this machine's alone
  Archs archs;                      // of all that was read
  std::string served;               // what the last file says that it serves
};

Files& files() {
  static Files all;
  return all;
}

// A layout whose kernels are named by their numbers in the file.
Plans::value_type read_layout(Reader& reader, const std::vector<Signature>& operators,
                              const std::map<uint32_t, uint32_t>& numbers) {
  Name name;
  name.first = reader.text();
  const uint32_t count = reader.count(kMostItems, kTooLarge);
  for (uint32_t i = 0; i < count; ++i) name.second.push_back(reader.read<uint64_t>());
  const std::vector<uint8_t> bytes = reader.block();
  auto plan = std::make_shared<Plan>(parse(bytes.data(), bytes.size()));
  for (Step& step : plan->steps) {
    if (step.bytes != 0) continue;
    const auto at = numbers.find(step.kernel);
    if (at == numbers.end()) refuse_file("a plan launches a kernel that it does not hold");
    step.kernel = at->second;
  }
  for (const Signature& each : operators) {
    if ("elsa::" + each.name != name.first) continue;
    const auto tensors = std::count_if(each.types.begin(), each.types.end(),
                                       [](char type) { return type == 'T' || type == 'O'; });
    if (plan->inputs == tensors && plan->outputs.size() == each.results) {
      return {std::move(name), std::move(plan)};
    }
  }
  refuse_file("a plan is for an operator that it does not define");
}

// The plans of one architecture; without `kept` its kernels are read and not kept.
Plans read_plans(Reader& reader, const std::vector<Signature>& operators, bool kept) {
  std::map<uint32_t, uint32_t> numbers;
  for (uint32_t left = reader.count(kMostItems, kTooLarge); left > 0; --left) {
    const uint32_t number = reader.read<uint32_t>();
    Kernel kernel;
    kernel.symbol = reader.text();
    kernel.threads = reader.read<uint32_t>();
    kernel.shared_bytes = reader.read<uint32_t>();
    kernel.cluster = reader.read<uint32_t>();
    const uint32_t flags = reader.read<uint32_t>();
    kernel.overlap = (flags & 1) != 0;
    kernel.cooperative = (flags & 2) != 0;
    kernel.code = reader.block();
    numbers[number] = kept ? add_kernel(std::move(kernel)) : 0;
  }
  Plans plans;
  for (uint32_t left = reader.count(kMostItems, kTooLarge); left > 0; --left) {
    plans.insert(read_layout(reader, operators, numbers));
  }
  return plans;
}

[[noreturn]] void refuse_gpu(const std::string& what, const Archs& held, const Archs& here) {
  const auto names_of = [](const Archs& archs) {
    std::string names;
    for (const uint32_t arch : archs) {
      names += (names.empty() ? "sm_" : ", sm_") + std::to_string(arch);
    }
    return names;
  };
  throw std::runtime_error(what + " for " + names_of(held) + ", and the GPU here is " +
                           names_of(here) + ": export the bundle for that (--gpu-archs)");
}

}  // namespace

uint32_t arch_of(Device device) {
  Device handle = 0;
  int major = 0, minor = 0;
  check(driver().device_get(&handle, device), "cuDeviceGet");
  check(driver().device_attribute(&major, kMajor, handle), "cuDeviceGetAttribute");
  check(driver().device_attribute(&minor, kMinor, handle), "cuDeviceGetAttribute");
  return static_cast<uint32_t>(10 * major + minor);
}

uint32_t checksum(const uint8_t* bytes, uint64_t size) {
  static const auto table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t i = 0; i < made.size(); ++i) {
      made[i] = i;
      for (int bit = 0; bit < 8; ++bit) {
        made[i] = (made[i] >> 1) ^ ((made[i] & 1) != 0 ? 0xedb88320U : 0U);
      }
    }
    return made;
  }();
  uint32_t sum = ~0U;
  for (uint64_t i = 0; i < size; ++i) sum = (sum >> 8) ^ table[(sum ^ bytes[i]) & 0xff];
  return ~sum;
}

std::vector<Signature> add_file(const uint8_t* bytes, uint64_t size) {
  uint32_t sum = 0;
  if (size < sizeof(sum)) refuse_file("the bytes end too soon");
  const uint64_t body = size - sizeof(sum);
  Reader reader(bytes, body, kNoFile);
  if (reader.read<uint64_t>() != kFileMagic) refuse_file("the bytes begin otherwise");
  const uint32_t version = reader.read<uint32_t>();
  if (version != kFileVersion) {
    refuse_file("it is of version " + std::to_string(version) +
                ", and this library reads version " + std::to_string(kFileVersion) +
                ": export the bundle again");
  }
  std::memcpy(&sum, bytes + body, sizeof(sum));
  if (sum != checksum(bytes, body)) refuse_file("its CRC-32 is another: it was changed");
  std::string served = reader.text();
  std::vector<Signature> operators;
  for (uint32_t left = reader.count(kMostItems, kTooLarge); left > 0; --left) {
    Signature& each = operators.emplace_back();
    each.name = reader.text();
    each.types = reader.text();
    each.results = reader.read<uint32_t>();
    each.schema = reader.text();
  }
  int devices = 0;
  check(driver().device_count(&devices), "cuDeviceGetCount");
  Archs here;
  for (int i = 0; i < devices; ++i) here.insert(arch_of(i));
  std::map<uint32_t, Plans> plans;
  Archs held;
  for (uint32_t left = reader.count(kMostArchs, kTooLarge); left > 0; --left) {
    const uint32_t arch = reader.read<uint32_t>();
    const bool kept = here.count(arch) != 0;
    Plans found = read_plans(reader, operators, kept);
    if (kept) plans[arch].merge(found);
    held.insert(arch);
  }
  if (!reader.ended()) refuse_file("bytes follow its end");
  if (held.empty()) refuse_file("it is of no architecture");
  if (plans.empty()) refuse_gpu("the kernels are", held, here);
  const std::lock_guard<std::mutex> lock(files().guard);
  for (auto& [arch, found] : plans) files().plans[arch].merge(found);
  files().archs.merge(held);
  files().served = std::move(served);
  return operators;
}

Plan find_plan(const std::string& name, Words words, Device device) {
  const uint32_t here = arch_of(device);
  const std::lock_guard<std::mutex> lock(files().guard);
  const auto plans = files().plans.find(here);
  if (plans == files().plans.end()) {
    refuse_gpu(name + ": the kernels are", files().archs, {here});
  }
  const auto at = plans->second.find({name, {words.begin(), words.end()}});
  if (at == plans->second.end()) {
    throw std::runtime_error(name +
                             ": no kernel is here for tensors of these sizes: " + files().served);
  }
  return *at->second;
}

}  // namespace elsa_cuda
