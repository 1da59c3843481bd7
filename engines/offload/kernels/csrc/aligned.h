// Memory for vectors.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

// Memory for vectors, of which a thread or a task has as much as it ever needed.
class Aligned {
 public:
  Aligned() = default;
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  ~Aligned() { std::free(data_); }

  void* at_least(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
      if (!data_) throw std::bad_alloc();
      size_ = (bytes + 4095) / 4096 * 4096;
    }
    return data_;
  }

  void* data() { return data_; }
  const void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// Cuts memory into arrays that begin at lines of the caches; without memory (null) it only counts their bytes.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}

  // Room for `count` values, which are not initialized.
  template <typename T>
  T* take(int64_t count) {
    char* const from = memory_ ? memory_ + bytes_ : nullptr;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(from);
  }

  int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

}  // namespace
