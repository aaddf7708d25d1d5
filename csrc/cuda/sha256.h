// SHA-256 (FIPS 180-4), for files whose code a GPU runs.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

namespace elsa_cuda {

using Digest = std::array<uint8_t, 32>;

namespace sha256_detail {

using State = std::array<uint32_t, 8>;

constexpr uint64_t kBlock = 64;
// Of the cube roots of the first 64 primes the first 32 bits behind the point.
constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};
// The same of the square roots of the first 8.
constexpr State kStart = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

inline void write(uint8_t* to, uint32_t word) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<uint8_t>(word >> (24 - 8 * i));
}

inline void fold(State& state, const uint8_t* block) {
  using std::rotr;
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    const uint8_t* at = block + 4 * i;
    w[i] = uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | at[3];
  }
  for (int i = 16; i < 64; ++i) {
    const uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + w[i - 7] + (rotr(a, 7) ^ rotr(a, 18) ^ (a >> 3)) +
           (rotr(b, 17) ^ rotr(b, 19) ^ (b >> 10));
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (int i = 0; i < 64; ++i) {
    const uint32_t first =
        h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
    const uint32_t second =
        (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + second;
  }
  const State now = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state[i] += now[i];
}

}  // namespace sha256_detail

// The digest of bytes that lie one behind the other.
inline Digest sha256(const uint8_t* bytes, uint64_t size) {
  using namespace sha256_detail;
  State state = kStart;
  uint64_t at = 0;
  for (; size - at >= kBlock; at += kBlock) fold(state, bytes + at);
  // The rest, one bit, zeros, and the number of bits in the last 8 bytes of a block.
  uint8_t last[2 * kBlock] = {};
  const uint64_t rest = size - at;
  if (rest != 0) std::memcpy(last, bytes + at, rest);
  last[rest] = 0x80;
  const uint64_t end = rest < kBlock - 8 ? kBlock : 2 * kBlock;
  write(last + end - 8, static_cast<uint32_t>(size >> 29));
  write(last + end - 4, static_cast<uint32_t>(size << 3));
  for (uint64_t i = 0; i < end; i += kBlock) fold(state, last + i);
  Digest digest;
  for (int i = 0; i < 8; ++i) write(digest.data() + 4 * i, state[i]);
  return digest;
}

}  // namespace elsa_cuda
