// Arguments from Python: numpy's arrays. A structure of arrays is a NamedTuple there, field by field.
#pragma once
#include <cstdint>

namespace outrider {

// An array in C order of up to three dimensions. Its memory belongs to Python.
template <class T>
struct Array {
  T* data;
  int64_t shape[3];
  int64_t width;  // bytes of an item

  int64_t size() const { return shape[0]; }
  T& operator[](int64_t i) const { return data[i]; }
  T& operator()(int64_t i, int64_t j) const { return data[i * shape[1] + j]; }
  T& operator()(int64_t i, int64_t j, int64_t k) const { return data[(i * shape[1] + j) * shape[2] + k]; }
  Array row(int64_t i) const { return {data + i * shape[1], {shape[1], 1, 1}, width}; }
  Array row(int64_t i, int64_t j) const { return {data + (i * shape[1] + j) * shape[2], {shape[2], 1, 1}, width}; }
  Array from(int64_t start) const { return {data + start, {shape[0] - start, 1, 1}, width}; }
};

// A Python tuple of structures.
template <class T>
struct List {
  T* data;
  int64_t size;

  T& operator[](int64_t i) const { return data[i]; }
};

// An array whose items have one of several types.
template <>
struct Array<void> {
  void* data;
  int64_t shape[3];
  int64_t width;
};

// Two results of a function.
struct Pair {
  int64_t first, second;
};

// The sources of nodes, as `outrider.drafters.interface.Source`.
enum Source : uint8_t { TRIGRAM = 1, RETRIEVAL = 2, LOOKUP = 3, PREDICTION = 5, NOISE = 9 };

}  // namespace outrider
