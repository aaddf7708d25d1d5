// Reads, loads and runs mutations of a plan under sanitizers: `fuzz PLAN STUB COUNT`; with a fourth
// argument of a file of plans, whose checksum is made right again.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <vector>

// as one unit: what they include is read once
#include "driver.cpp"
#include "plan.cpp"
#include "planfile.cpp"

namespace {

void resum(std::vector<char>& bytes) {
  uint32_t sum = 0;
  if (bytes.size() < sizeof(sum)) return;
  const size_t body = bytes.size() - sizeof(sum);
  sum = elsa_cuda::checksum(reinterpret_cast<const uint8_t*>(bytes.data()), body);
  std::memcpy(bytes.data() + body, &sum, sizeof(sum));
}

}  // namespace

int main(int count, char** words) {
  std::ifstream file(words[1], std::ios::binary);
  const std::vector<char> good((std::istreambuf_iterator<char>(file)), {});
  elsa_cuda::open_driver(words[2]);
  elsa_cuda::Kernel kernel;
  kernel.symbol = "scale";
  kernel.code = {'s', 'c', 'a', 'l', 'e', ';', '8', 0};
  kernel.threads = 128;
  elsa_cuda::add_kernel(kernel);
  std::mt19937 random(1);
  int ran = 0;
  for (int i = 0; i < std::atoi(words[3]); ++i) {
    std::vector<char> bytes = good;
    for (unsigned n = random() % 4; n > 0; --n) {
      const char kinds[] = {0, -1, static_cast<char>(random())};
      bytes[random() % bytes.size()] = kinds[random() % 3];
    }
    if (random() % 8 == 0) bytes.resize(random() % bytes.size());
    if (count > 4) resum(bytes);
    // Memory of its own, so that a read beyond its end is seen.
    const auto exact = std::make_unique<uint8_t[]>(bytes.size());
    std::copy(bytes.begin(), bytes.end(), exact.get());
    try {
      if (count > 4) {
        elsa_cuda::add_file(exact.get(), bytes.size());
        ++ran;
        continue;
      }
      const auto bound = elsa_cuda::bind(elsa_cuda::parse(exact.get(), bytes.size()), 0);
      const std::vector<elsa_cuda::Address> slots(bound.plan.slots(), 4096);
      bool launches = true;  // memory is set to zero in tests that have some
      for (const auto& step : bound.plan.steps) launches = launches && step.bytes == 0;
      if (launches) elsa_cuda::run(bound, slots.data(), nullptr);
      ++ran;
    } catch (const std::exception&) {
    }
  }
  std::printf("%d\n", ran);
}
