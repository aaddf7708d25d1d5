#include "planfile.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "sha256.h"

namespace elsa_cuda {
namespace {

constexpr uint64_t kMagic = 0x534e414c50414c45;  // "ELAPLANS"
constexpr uint32_t kVersion = 2;
constexpr uint32_t kMostText = 4096;
constexpr uint32_t kMostItems = 1 << 16;
constexpr uint64_t kMostCode = uint64_t{1} << 28;
constexpr int kMajor = 75, kMinor = 76;  // CUdevice_attribute: compute capability

[[noreturn]] void refuse(const char* why) {
  throw std::runtime_error(std::string("no plan file: ") + why);
}

class Reader {
 public:
  Reader(const uint8_t* bytes, uint64_t size) : at_(bytes), left_(size) {}

  const uint8_t* take(uint64_t size) {
    if (size > left_) refuse("the bytes end too soon");
    const uint8_t* found = at_;
    at_ += size;
    left_ -= size;
    return found;
  }
  template <typename T>
  T read() {
    T value;
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
    return value;
  }
  uint32_t count(uint32_t most) {
    const uint32_t value = read<uint32_t>();
    if (value > most) refuse("a number is too large");
    return value;
  }
  std::string text() {
    const uint32_t size = count(kMostText);
    return std::string(reinterpret_cast<const char*>(take(size)), size);
  }
  std::vector<uint8_t> block(uint64_t most) {
    const uint64_t size = read<uint64_t>();
    if (size > most) refuse("a block is too large");
    const uint8_t* from = take(size);
    return std::vector<uint8_t>(from, from + size);
  }
  bool ended() const { return left_ == 0; }

 private:
  const uint8_t* at_;
  uint64_t left_;
};

using Name = std::pair<std::string, std::vector<uint64_t>>;

struct Held {
  std::shared_ptr<const Plan> plan;
  uint32_t arch = 0;
};

struct Files {
  std::mutex guard;
  std::map<Name, Held> plans;
  std::string served;  // what the last file says that it serves
};

Files& files() {
  static Files all;
  return all;
}

Kernel read_kernel(Reader& reader) {
  Kernel kernel;
  kernel.symbol = reader.text();
  kernel.threads = reader.read<uint32_t>();
  kernel.shared_bytes = reader.read<uint32_t>();
  kernel.cluster = reader.read<uint32_t>();
  const uint32_t flags = reader.read<uint32_t>();
  kernel.overlap = (flags & 1) != 0;
  kernel.cooperative = (flags & 2) != 0;
  kernel.code = reader.block(kMostCode);
  return kernel;
}

Signature read_signature(Reader& reader) {
  Signature found;
  found.name = reader.text();
  found.types = reader.text();
  found.results = reader.read<uint32_t>();
  found.schema = reader.text();
  return found;
}

// A layout whose kernels are named by their numbers in the file.
std::pair<Name, Held> read_layout(Reader& reader, uint32_t arch,
                                  const std::vector<Signature>& operators,
                                  std::map<uint32_t, uint32_t>& numbers) {
  Name name;
  name.first = reader.text();
  const uint32_t count = reader.count(kMostItems);
  for (uint32_t i = 0; i < count; ++i) name.second.push_back(reader.read<uint64_t>());
  const std::vector<uint8_t> bytes = reader.block(kMostCode);
  auto plan = std::make_shared<Plan>(parse(bytes.data(), bytes.size()));
  for (Step& step : plan->steps) {
    if (step.bytes != 0) continue;
    const auto at = numbers.find(step.kernel);
    if (at == numbers.end()) refuse("a plan launches a kernel that it does not hold");
    step.kernel = at->second;
  }
  for (const Signature& each : operators) {
    if ("elsa::" + each.name != name.first) continue;
    const auto tensors = std::count_if(each.types.begin(), each.types.end(),
                                       [](char type) { return type == 'T' || type == 'O'; });
    if (plan->inputs == tensors && plan->outputs.size() == each.results) {
      return {std::move(name), Held{std::move(plan), arch}};
    }
  }
  refuse("a plan is for an operator that it does not define");
}

std::string arch_name(uint32_t arch) { return "sm_" + std::to_string(arch); }

uint32_t arch_of(Device device) {
  Device handle = 0;
  int major = 0, minor = 0;
  check(driver().device_get(&handle, device), "cuDeviceGet");
  check(driver().device_attribute(&major, kMajor, handle), "cuDeviceGetAttribute");
  check(driver().device_attribute(&minor, kMinor, handle), "cuDeviceGetAttribute");
  return static_cast<uint32_t>(10 * major + minor);
}

// What is being recorded.
std::atomic<bool> recording{false};
std::mutex noting;
std::vector<uint8_t> noted;
std::vector<uint32_t> launched;

template <typename T>
void append(const T& value) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
  noted.insert(noted.end(), bytes, bytes + sizeof(T));
}

}  // namespace

std::vector<Signature> add_file(const uint8_t* bytes, uint64_t size) {
  Digest digest;
  if (size < digest.size()) refuse("the bytes end too soon");
  const uint64_t body = size - digest.size();
  Reader reader(bytes, body);
  if (reader.read<uint64_t>() != kMagic) refuse("the bytes begin otherwise");
  // Of an older version the last bytes are no SHA-256.
  const uint32_t version = reader.read<uint32_t>();
  if (version != kVersion) {
    const std::string why = "it is of version " + std::to_string(version) +
                            ", and this library reads version " + std::to_string(kVersion) +
                            ": export the bundle again";
    refuse(why.c_str());
  }
  std::memcpy(digest.data(), bytes + body, digest.size());
  if (digest != sha256(bytes, body)) refuse("its SHA-256 is another: it was changed");
  const uint32_t arch = reader.read<uint32_t>();
  std::string served = reader.text();
  std::vector<Signature> operators;
  for (uint32_t left = reader.count(kMostItems); left > 0; --left) {
    operators.push_back(read_signature(reader));
  }
  std::map<uint32_t, uint32_t> numbers;
  for (uint32_t left = reader.count(kMostItems); left > 0; --left) {
    const uint32_t number = reader.read<uint32_t>();
    numbers[number] = add_kernel(read_kernel(reader));
  }
  std::map<Name, Held> plans;
  for (uint32_t left = reader.count(kMostItems); left > 0; --left) {
    plans.insert(read_layout(reader, arch, operators, numbers));
  }
  if (!reader.ended()) refuse("bytes follow its end");
  const std::lock_guard<std::mutex> lock(files().guard);
  files().plans.merge(plans);
  files().served = std::move(served);
  return operators;
}

Plan find_plan(const std::string& name, Words words, Device device) {
  Held held;
  {
    const std::lock_guard<std::mutex> lock(files().guard);
    const auto at = files().plans.find({name, {words.begin(), words.end()}});
    if (at == files().plans.end()) {
      throw std::runtime_error(name +
                               ": no kernel is here for tensors of these sizes: " + files().served);
    }
    held = at->second;
  }
  const uint32_t here = arch_of(device);
  if (held.arch != here) {
    throw std::runtime_error(name + ": the kernels are for " + arch_name(held.arch) +
                             ", and this GPU is " + arch_name(here) + ": export on one like it");
  }
  return *held.plan;
}

void Record::start() {
  const std::lock_guard<std::mutex> lock(noting);
  noted.clear();
  launched.clear();
  recording.store(true);
}

bool Record::active() { return recording.load(std::memory_order_relaxed); }

void Record::note(const std::string& name, Words words, const uint8_t* plan, uint64_t size,
                  const std::vector<Step>& steps) {
  const std::lock_guard<std::mutex> lock(noting);
  append(static_cast<uint32_t>(name.size()));
  noted.insert(noted.end(), name.begin(), name.end());
  append(static_cast<uint32_t>(words.size()));
  for (const uint64_t word : words) append(word);
  append(size);
  noted.insert(noted.end(), plan, plan + size);
  for (const Step& step : steps) {
    if (step.bytes == 0) launched.push_back(step.kernel);
  }
}

void Record::stop(std::vector<uint8_t>& layouts, std::vector<uint32_t>& kernels) {
  const std::lock_guard<std::mutex> lock(noting);
  recording.store(false);
  layouts = std::move(noted);
  kernels = std::move(launched);
  noted.clear();
  launched.clear();
}

}  // namespace elsa_cuda
