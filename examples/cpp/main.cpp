// Runs a bundle that `elsa export` wrote on an image, without Python:
//   elsa_run [--device cpu|cuda] [--format torchscript|aoti] BUNDLE IMAGE.ppm [BATCH]
// Prints the five largest outputs of the first image (index, value), or the output's shape.
// A bundle runs where it was exported for, which is what --device is without it; --format is
// torchscript (model.ts) where the bundle has that, else aoti (model.aoti.pt2, `--aoti`).
// IMAGE is a binary PPM (P6, 8 bits), of any size: `convert cat.jpg cat.ppm`, or
// `python -c "from PIL import Image; Image.open('cat.jpg').convert('RGB').save('cat.ppm')"`.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// What a model says of its input (elsa.txt, in model.ts or in the package's metadata): size in
// pixels, mean and std on a 0..1 scale, dtype.
struct Facts {
  std::vector<int64_t> input_size;
  std::vector<float> mean, std;
  torch::ScalarType dtype = torch::kFloat32;
};

torch::ScalarType dtype_of(const std::string& name) {
  return name == "float16"    ? torch::kFloat16
         : name == "bfloat16" ? torch::kBFloat16
                              : torch::kFloat32;
}

Facts parse_facts(const std::string& text) {
  Facts facts;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    if (name == "input_size") {
      for (int64_t n; words >> n;) facts.input_size.push_back(n);
    } else if (name == "dtype") {
      words >> name;
      facts.dtype = dtype_of(name);
    } else {
      std::vector<float>& row = name == "mean" ? facts.mean : facts.std;
      for (float x; words >> x;) row.push_back(x);
    }
  }
  if (facts.input_size.size() != 3 || facts.input_size[0] != 3 || facts.mean.size() != 3 ||
      facts.std.size() != 3) {
    throw std::runtime_error("the model does not say how an RGB image becomes its input");
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
  std::string format;  // "torchscript", "aoti" or empty: the first that the bundle has
  std::vector<std::string> words;
};

// Gives torch the operators that model.ts names; where the bundle runs. One for a GPU brings a
// library and the plans of its calls, at the batch sizes that it was exported with.
torch::Device load_operators(const std::string& bundle, const std::string& asked) {
  const auto has = [&bundle](const char* name) {
    return std::filesystem::exists(bundle + "/" + name);
  };
  if (!std::filesystem::is_directory(bundle)) {
    throw std::runtime_error("there is no folder " + bundle);
  }
  if (!has("manifest.json") && !has("lib")) {
    throw std::runtime_error(bundle + " is no bundle of elsa export");
  }
  if (!has("model.ts") && !has("model.aoti.pt2") && (has("model.onnx") || has("model.pt2"))) {
    throw std::runtime_error(bundle + " has neither model.ts nor model.aoti.pt2: run its load.py");
  }
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

// A model of a bundle, and what it says of its input.
struct Model {
  Facts facts;
  std::function<torch::Tensor(const torch::Tensor&)> forward;
};

Model load_torchscript(const std::string& path, torch::Device device) {
  torch::jit::ExtraFilesMap extra{{"elsa.txt", ""}};
  torch::jit::Module model = torch::jit::load(path, device, extra);
  model.eval();
  Facts facts = parse_facts(extra.at("elsa.txt"));
  for (const torch::Tensor& weight : model.parameters()) {  // which older bundles do not name
    facts.dtype = weight.scalar_type();
    break;
  }
  const auto forward = [model](const torch::Tensor& input) mutable {
    return model.forward({input}).toTensor();
  };
  return {facts, forward};
}

Model load_package(const std::string& path) {
  auto package = std::make_shared<torch::inductor::AOTIModelPackageLoader>(path);
  const auto forward = [package](const torch::Tensor& input) { return package->run({input})[0]; };
  return {parse_facts(package->get_metadata()["elsa.txt"]), forward};
}

void run(const Asked& asked) {
  const std::string& bundle = asked.words[0];
  const std::string& image = asked.words[1];
  const int64_t batch = asked.words.size() == 3 ? std::stoll(asked.words[2]) : 1;
  const torch::Device device = load_operators(bundle, asked.device);
  const std::string script = bundle + "/model.ts", package = bundle + "/model.aoti.pt2";
  const bool compiled =
      asked.format.empty() ? !std::filesystem::exists(script) : asked.format == "aoti";
  if (!std::filesystem::exists(compiled ? package : script)) {
    throw std::runtime_error(bundle + " has no " + (compiled ? "model.aoti.pt2" : "model.ts"));
  }
  const Model model = compiled ? load_package(package) : load_torchscript(script, device);
  const torch::Tensor input = preprocess(read_ppm(image), model.facts);
  torch::NoGradGuard no_grad;
  const torch::Tensor images = input.to(device, model.facts.dtype).expand({batch, -1, -1, -1});
  print_outputs(model.forward(images.contiguous()));
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
    if (i + 1 == count) throw std::invalid_argument(word);
    const std::string value = given[++i];
    if (word == "--device" && (value == "cpu" || value == "cuda")) {
      asked.device = value;
    } else if (word == "--format" && (value == "torchscript" || value == "aoti")) {
      asked.format = value;
    } else {
      throw std::invalid_argument(word);
    }
  }
  if (asked.words.size() < 2 || asked.words.size() > 3) throw std::invalid_argument("words");
  return asked;
}

// One line: TorchScript puts the reason behind a trace of the model.
std::string reason(const std::string& said) {
  const std::string mark = "RuntimeError: ";
  const auto at = said.rfind(mark);
  const auto begin = at == std::string::npos ? 0 : at + mark.size();
  return said.substr(begin, std::min<std::size_t>(said.find('\n', begin) - begin, 300));
}

}  // namespace

int main(int count, char** given) {
  Asked asked;
  try {
    asked = parse_arguments(count, given);
  } catch (const std::invalid_argument&) {
    std::cerr << "usage: elsa_run [--device cpu|cuda] [--format torchscript|aoti] BUNDLE IMAGE.ppm "
                 "[BATCH]\n";
    return 2;
  }
  try {
    run(asked);
  } catch (const std::exception& error) {
    std::cerr << "error: " << reason(error.what()) << '\n';
    return 1;
  }
  return 0;
}
