// Plans by the layout of a call.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "driver.h"

namespace elsa_cuda {

using Words = std::span<const uint64_t>;

// All that a plan depends on, as words; a call that takes more words than fit has no key.
class Key {
 public:
  void add(uint64_t word) {
    if (count_ < kMost) {
      words_[count_++] = word;
    } else {
      fits_ = false;
    }
  }
  void add(const int64_t* words, int64_t count) {
    for (int64_t i = 0; i < count; ++i) add(static_cast<uint64_t>(words[i]));
  }
  void add_text(const char* text, size_t length) {
    add(length);
    for (size_t i = 0; i < length; i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, text + i, length - i < 8 ? length - i : 8);
      add(word);
    }
  }
  bool fits() const { return fits_; }
  Words words() const { return {words_, count_}; }

 private:
  static constexpr size_t kMost = 256;
  uint64_t words_[kMost];
  size_t count_ = 0;
  bool fits_ = true;
};

constexpr uint32_t kAlignment = 16;  // what kernels tell apart

// A device by PyTorch's numbers: its type, and its index, which is -1 on the CPU.
struct Where {
  int32_t type = 0;
  int32_t index = 0;
};

// A tensor's part of the key of a call; `dtype` by PyTorch's number.
inline void add_tensor(Key& key, Address address, int32_t dtype, Where where, int64_t dims,
                       const int64_t* sizes, const int64_t* strides) {
  // 4 bits of alignment, 8 of each other: none is larger, and no tensor has the word of none.
  key.add((address % kAlignment) | static_cast<uint64_t>(dtype & 0xff) << 8 |
          static_cast<uint64_t>(dims & 0xff) << 16 |
          static_cast<uint64_t>(where.type & 0xff) << 24 |
          static_cast<uint64_t>(where.index & 0xffff) << 32);
  key.add(sizes, dims);
  key.add(strides, dims);
}
inline void add_no_tensor(Key& key) { key.add(~uint64_t{0}); }

// At most `most` entries: where the bound is reached all of them go, since an entry is cheap to
// make again and kernels stay loaded. An entry that was made before `clear` is not kept after it.
template <typename Entry>
class Cache {
 public:
  explicit Cache(size_t most) : most_(most) {}

  struct Found {
    std::shared_ptr<const Entry> entry;  // or null
    uint64_t generation;
  };

  Found find(Words key) const {
    const std::shared_lock<std::shared_mutex> lock(guard_);
    const auto at = entries_.find(key);
    return {at == entries_.end() ? nullptr : at->second, generation_};
  }

  void put(Words key, uint64_t generation, std::shared_ptr<const Entry> entry) {
    const std::unique_lock<std::shared_mutex> lock(guard_);
    if (generation != generation_) return;
    if (entries_.size() >= most_) entries_.clear();
    entries_.insert_or_assign(std::vector<uint64_t>(key.begin(), key.end()), std::move(entry));
  }

  void clear() {
    const std::unique_lock<std::shared_mutex> lock(guard_);
    ++generation_;
    entries_.clear();
  }

  size_t size() const {
    const std::shared_lock<std::shared_mutex> lock(guard_);
    return entries_.size();
  }

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(Words words) const {
      uint64_t hash = words.size();
      for (const uint64_t word : words) {
        hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
        hash ^= hash >> 29;
      }
      return hash;
    }
    size_t operator()(const std::vector<uint64_t>& words) const { return (*this)(Words(words)); }
  };
  struct Equal {
    using is_transparent = void;
    bool operator()(Words a, Words b) const {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
    }
  };

  const size_t most_;
  uint64_t generation_ = 0;
  mutable std::shared_mutex guard_;
  std::unordered_map<std::vector<uint64_t>, std::shared_ptr<const Entry>, Hash, Equal> entries_;
};

}  // namespace elsa_cuda
