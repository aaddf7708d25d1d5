// Plans and kernels that were written to a file, for processes without Python's planners.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache.h"
#include "plan.h"

namespace elsa_cuda {

// An operator as elsa_core/ops defines it: its schema, and what operators.cpp knows of it.
struct Signature {
  std::string name, types, schema;
  uint32_t results = 0;
};

// Reads a file as elsa_core/backends/cuda/planfile.py writes it, adds the kernels and the plans for
// this machine's GPUs to those that are there, and returns its operators. Throws
// std::runtime_error: the bytes are no such file or were damaged, or no GPU here is of an
// architecture that it holds.
std::vector<Signature> add_file(const uint8_t* bytes, uint64_t size);

// What the last four bytes of a file are: the CRC-32 of those before, as zlib has it. It shows
// damage, and is no signature.
uint32_t checksum(const uint8_t* bytes, uint64_t size);

// The plan of a call: an operator's name and the words of its layout, without its device. Throws
// std::runtime_error: no file holds it for the architecture of `device`.
Plan find_plan(const std::string& name, Words words, Device device);

// The architecture of a device, 90 for sm_90.
uint32_t arch_of(Device device);

}  // namespace elsa_cuda
