// Memory for vectors.

#pragma once

#include <cstddef>
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

}  // namespace
