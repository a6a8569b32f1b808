// Memory that is kept from one step to the next.
#pragma once
#include <cstddef>
#include <cstdlib>

namespace outrider {

template <class T>
class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  T* of(size_t count) {
    if (count > size_) {
      std::free(data_);
      size_ = count + count / 2;
      data_ = (T*)std::aligned_alloc(64, (size_ * sizeof(T) + 63) / 64 * 64);
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace outrider
