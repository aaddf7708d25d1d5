// Runs a bundle that `elsa export` wrote on an image, without Python:
//   elsa_run [--device cpu|cuda] BUNDLE IMAGE.ppm [BATCH]
// Prints the five largest outputs of the first image (index, value), or the output's shape.
// A bundle runs where it was exported for, which is what --device is without it.
// IMAGE is a binary PPM (P6, 8 bits), of any size: `convert cat.jpg cat.ppm`, or
// `python -c "from PIL import Image; Image.open('cat.jpg').convert('RGB').save('cat.ppm')"`.
#include <dlfcn.h>
#include <torch/script.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// What model.ts says of its input (extra/elsa.txt): size in pixels, mean and std on a 0..1 scale.
struct Facts {
  std::vector<int64_t> input_size;
  std::vector<float> mean, std;
};

Facts parse_facts(const std::string& text) {
  Facts facts;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    if (name == "input_size") {
      for (int64_t n; words >> n;) facts.input_size.push_back(n);
    } else {
      std::vector<float>& row = name == "mean" ? facts.mean : facts.std;
      for (float x; words >> x;) row.push_back(x);
    }
  }
  if (facts.input_size.size() != 3 || facts.input_size[0] != 3 || facts.mean.size() != 3 ||
      facts.std.size() != 3) {
    throw std::runtime_error("model.ts does not say how an RGB image becomes its input");
  }
  return facts;
}

// [1, 3, height, width], float32, 0..1.
torch::Tensor read_ppm(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string magic;
  int64_t width = 0, height = 0, largest = 0;
  file >> magic >> width >> height >> largest;
  file.get();
  if (!file || magic != "P6" || largest != 255 || width < 1 || height < 1 || width > 65535 ||
      height > 65535) {
    throw std::runtime_error(path + " is not a binary PPM (P6) with 8 bits");
  }
  torch::Tensor pixels = torch::empty({height, width, 3}, torch::kUInt8);
  file.read(reinterpret_cast<char*>(pixels.data_ptr<uint8_t>()), pixels.numel());
  if (file.gcount() != pixels.numel()) throw std::runtime_error(path + " is cut short");
  return pixels.permute({2, 0, 1}).unsqueeze(0).to(torch::kFloat32).div(255.0);
}

torch::Tensor preprocess(const torch::Tensor& image, const Facts& facts) {
  torch::Tensor sized = image;
  if (image.size(2) != facts.input_size[1] || image.size(3) != facts.input_size[2]) {
    const std::vector<int64_t> size{facts.input_size[1], facts.input_size[2]};
    sized = at::_upsample_bicubic2d_aa(image, size, /*align_corners=*/false, std::nullopt,
                                       std::nullopt);
  }
  const torch::Tensor mean = torch::tensor(facts.mean).view({1, 3, 1, 1});
  const torch::Tensor std = torch::tensor(facts.std).view({1, 3, 1, 1});
  return sized.clamp(0, 1).sub(mean).div(std);
}

void print_outputs(const torch::Tensor& out) {
  if (out.dim() != 2) {
    std::cout << "output " << out.sizes() << '\n';
    return;
  }
  const auto [values, order] =
      out[0].to(torch::kCPU, torch::kFloat32).topk(std::min<int64_t>(5, out.size(1)));
  for (int64_t i = 0; i < order.numel(); ++i) {
    std::cout << order[i].item<int64_t>() << '\t' << values[i].item<float>() << '\n';
  }
}

void* opened(const std::string& library) {
  void* found = dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (found == nullptr) throw std::runtime_error(dlerror());
  return found;
}

// What the command line asks for.
struct Asked {
  std::string device;  // "cpu", "cuda" or empty: what the bundle is for
  std::vector<std::string> words;
};

// Gives torch the operators that model.ts names; where the bundle runs. One for a GPU brings a
// library and the plans of its calls, at the batch sizes that it was exported with.
torch::Device load_operators(const std::string& bundle, const std::string& asked) {
  const std::string on_gpu = bundle + "/lib/libelsa_cuda.so";
  const bool has_gpu = std::filesystem::exists(on_gpu);
  const std::string device = !asked.empty() ? asked : has_gpu ? "cuda" : "cpu";
  const std::string name = device == "cuda" ? "lib/libelsa_cuda.so" : "lib/libelsa_torch.so";
  if (!std::filesystem::exists(bundle + "/" + name)) {
    throw std::runtime_error(bundle + " has no " + name + ": it was not exported with --device " +
                             device);
  }
  if (device == "cpu") {
    opened(bundle + "/" + name);
    return torch::kCPU;
  }
  opened("libtorch_cuda.so");
  using Serve = const char* (*)(const uint8_t*, uint64_t, const char*);
  const auto serve = reinterpret_cast<Serve>(dlsym(opened(on_gpu), "elsa_cuda_serve_file"));
  if (serve == nullptr) throw std::runtime_error(on_gpu + " is none of elsa's libraries");
  std::ifstream file(bundle + "/lib/plans.elsa", std::ios::binary);
  const std::vector<char> plans((std::istreambuf_iterator<char>(file)), {});
  const auto* bytes = reinterpret_cast<const uint8_t*>(plans.data());
  if (const char* error = serve(bytes, plans.size(), "CUDA")) throw std::runtime_error(error);
  return torch::kCUDA;
}

void run(const Asked& asked) {
  const std::string& bundle = asked.words[0];
  const std::string& image = asked.words[1];
  const int64_t batch = asked.words.size() == 3 ? std::stoll(asked.words[2]) : 1;
  const torch::Device device = load_operators(bundle, asked.device);
  torch::jit::ExtraFilesMap extra{{"elsa.txt", ""}};
  torch::jit::Module model = torch::jit::load(bundle + "/model.ts", device, extra);
  model.eval();
  torch::Tensor input = preprocess(read_ppm(image), parse_facts(extra.at("elsa.txt")));
  for (const torch::Tensor& weight : model.parameters()) {
    input = input.to(device, weight.scalar_type());  // a float16 or bfloat16 bundle
    break;
  }
  torch::NoGradGuard no_grad;
  print_outputs(model.forward({input.expand({batch, -1, -1, -1})}).toTensor());
}

// Throws std::invalid_argument: these are no arguments of this program.
Asked parse_arguments(int count, char** given) {
  Asked asked;
  for (int i = 1; i < count; ++i) {
    const std::string word = given[i];
    if (word.rfind("--", 0) != 0) {
      asked.words.push_back(word);
      continue;
    }
    if (word != "--device" || i + 1 == count) throw std::invalid_argument(word);
    asked.device = given[++i];
    if (asked.device != "cpu" && asked.device != "cuda") throw std::invalid_argument(word);
  }
  if (asked.words.size() < 2 || asked.words.size() > 3) throw std::invalid_argument("words");
  return asked;
}

}  // namespace

int main(int count, char** given) {
  Asked asked;
  try {
    asked = parse_arguments(count, given);
  } catch (const std::invalid_argument&) {
    std::cerr << "usage: elsa_run [--device cpu|cuda] BUNDLE IMAGE.ppm [BATCH]\n";
    return 2;
  }
  try {
    run(asked);
  } catch (const std::exception& error) {
    std::cerr << "error: " << std::string(error.what()).substr(0, 300) << '\n';
    return 1;
  }
  return 0;
}
