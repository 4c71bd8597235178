// Sums of rows, or of their squares, in float32 and in an order that is the row's own: lane by lane
// of four vectors, and then by halves. Whatever other rows there are, a row's sum has the same bits.

#include <algorithm>
#include <cstdint>

#include "native/ffi.h"
#include "native/threads.h"
#include "native/vectors.h"

namespace {

using namespace jaxllm;

constexpr int kVectors = 4;  // that do not depend on each other
// Threads share no less than that.
constexpr int64_t kUnitElements = 1 << 16;

inline Floats Widen(const float* p) { return LoadVector<Floats>(p); }

inline Floats Widen(const uint16_t* p) {
  return (Floats)(__builtin_convertvector(LoadVector<Halves>(p), Words) << 16);
}

inline void Add(Floats& sum, const Floats& x, bool of_squares) {
  if (of_squares) AddProduct(sum, x, x);
  else sum += x;
}

template <typename Element>
float SumRow(const Element* x, int64_t size, bool of_squares) {
  Floats sums[kVectors] = {};
  int64_t i = 0;
  for (; i + kVectors * kLanes <= size; i += kVectors * kLanes)
    for (int v = 0; v < kVectors; ++v) Add(sums[v], Widen(x + i + v * kLanes), of_squares);
  for (int v = 0; i < size; i += kLanes, ++v) {
    Element rest[kLanes] = {};
    std::copy(x + i, x + std::min<int64_t>(i + kLanes, size), rest);
    Add(sums[v], Widen(rest), of_squares);
  }
  return Sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <ffi::DataType kType, typename Element>
ffi::Error SumRows(ffi::ThreadPool pool, ffi::Buffer<kType, 2> x, ffi::ResultBuffer<ffi::F32, 1> y,
                   bool of_squares) {
  const int64_t num_rows = x.dimensions()[0], size = x.dimensions()[1];
  const auto* from = reinterpret_cast<const Element*>(x.untyped_data());
  const int64_t unit = std::max<int64_t>(1, kUnitElements / std::max<int64_t>(1, size));
  Share(pool, {(num_rows + unit - 1) / unit}, [&](int64_t, int64_t index) {
    const int64_t end = std::min(num_rows, (index + 1) * unit);
    for (int64_t row = index * unit; row < end; ++row)
      y->typed_data()[row] = SumRow(from + row * size, size, of_squares);
  });
  return ffi::Error::Success();
}

}  // namespace

#ifdef JAXLLM_FLOAT32
JAXLLM_FUNCTION(jaxllm_row_sums_f32, (SumRows<ffi::F32, float>), "of_squares")
#endif
#ifdef JAXLLM_BFLOAT16
JAXLLM_FUNCTION(jaxllm_row_sums_bf16, (SumRows<ffi::BF16, uint16_t>), "of_squares")
#endif
