// Products with weights of codes of the kind JAXLLM_CODES.

#include <cstdint>

#include "dense/multiply.h"
#include "native/ffi.h"

namespace {

using namespace jaxllm;

// The codes are bytes [outputs, of a row], scales and offsets [outputs, groups of inputs]. Without
// offsets their buffer is empty.
template <ffi::DataType kType, typename Element>
ffi::Error MultiplyCodes(ffi::ThreadPool pool, ffi::Buffer<kType, 2> x, ffi::Bytes codes,
                         ffi::Buffer<ffi::F32, 2> scales, ffi::Buffer<ffi::F32, 2> offsets,
                         ffi::ResultBuffer<ffi::F32, 2> y) {
  const auto rows = x.dimensions(), groups = scales.dimensions();
  const bool has_offsets = offsets.element_count() > 0;
  const CodedMatrices<Element, JAXLLM_CODES> matrix{static_cast<const uint8_t*>(codes.untyped_data()),
                                             scales.typed_data(),
                                             has_offsets ? offsets.typed_data() : nullptr,
                                             groups[0],
                                             rows[1],
                                             groups[1]};
  if (!matrix.IsSupported() || int64_t(codes.element_count()) != matrix.num_bytes() ||
      (has_offsets && offsets.element_count() != scales.element_count()))
    return ffi::Error::InvalidArgument("the sizes do not fit");
  MultiplyAll(matrix, reinterpret_cast<const Element*>(x.untyped_data()), rows[0], y->typed_data(),
              pool);
  return ffi::Error::Success();
}

}  // namespace

#ifdef JAXLLM_FLOAT32
JAXLLM_FUNCTION(JAXLLM_NAME(dense, f32), (MultiplyCodes<ffi::F32, float>))
#endif
#ifdef JAXLLM_BFLOAT16
JAXLLM_FUNCTION(JAXLLM_NAME(dense, bf16), (MultiplyCodes<ffi::BF16, uint16_t>))
#endif
