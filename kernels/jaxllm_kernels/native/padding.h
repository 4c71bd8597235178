// Steps are padded with rows at the end of their operands. They are zeros, or what the biases of a
// model make of zeros, and then they are all alike.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace jaxllm {

template <typename Element>
bool IsZero(const Element* row, int64_t size) {
  return std::all_of(row, row + size, [](Element value) {
    if constexpr (sizeof(Element) == 2) value &= 0x7fff;  // ignore the sign of minus zero
    return value == 0;
  });
}

// The number of rows up to the last one that is not all zeros.
template <typename Element>
int64_t CountNonzero(const Element* x, int64_t num_rows, int64_t size) {
  while (num_rows > 0 && IsZero(x + (num_rows - 1) * size, size)) --num_rows;
  return num_rows;
}

// The number of rows up to the first one that all later ones repeat.
template <typename Element>
int64_t CountDistinct(const Element* x, int64_t num_rows, int64_t size) {
  const auto repeats_last = [=](int64_t row) {
    return std::memcmp(x + (row - 1) * size, x + row * size, size * sizeof(Element)) == 0;
  };
  while (num_rows > 1 && repeats_last(num_rows - 1)) --num_rows;
  return num_rows;
}

}  // namespace jaxllm
