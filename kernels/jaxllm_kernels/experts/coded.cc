// Experts whose weights are codes of the kind JAXLLM_CODES.

#include <cstdint>

#include "experts/layer.h"
#include "native/ffi.h"

namespace {

using namespace jaxllm;

// Scales and offsets are those of groups of inputs; without offsets their buffers are empty.
template <ffi::DataType kType, typename Kind>
ffi::Error RunExperts(ffi::ThreadPool pool, ffi::Buffer<kType, 2> x,
                      ffi::Buffer<ffi::S32, 2> chosen, ffi::Buffer<ffi::F32, 2> factors,
                      ffi::Bytes gate_up, ffi::Buffer<ffi::F32, 4> gate_up_scales,
                      ffi::Buffer<ffi::F32, 4> gate_up_offsets, ffi::Bytes down,
                      ffi::Buffer<ffi::F32, 3> down_scales, ffi::Buffer<ffi::F32, 3> down_offsets,
                      ffi::Buffer<kType, 3> gate_up_bias, ffi::Buffer<kType, 2> down_bias,
                      ffi::ResultBuffer<ffi::F32, 2> y, ffi::ResultBuffer<kType, 2> inner,
                      float slope, float cubic, float offset, float limit) {
  using Matrices = CodedMatrices<typename Kind::Element, JAXLLM_CODES>;
  const auto groups = gate_up_scales.dimensions(), down_groups = down_scales.dimensions();
  const int64_t num_experts = groups[0], size = groups[2], hidden_size = down_groups[1];
  auto make = [](const auto& codes, const auto& scales, const auto& offsets, int64_t num_outputs,
                 int64_t num_inputs, int64_t num_groups) {
    return Matrices{static_cast<const uint8_t*>(codes.untyped_data()),
                    scales.typed_data(),
                    offsets.element_count() ? offsets.typed_data() : nullptr,
                    num_outputs,
                    num_inputs,
                    num_groups};
  };
  const Matrices first =
      make(gate_up, gate_up_scales, gate_up_offsets, size, hidden_size, groups[3]);
  const Matrices second = make(down, down_scales, down_offsets, hidden_size, size, down_groups[2]);
  if (x.dimensions()[1] != hidden_size || groups[1] < 1 || groups[1] > 2 ||
      down_groups[0] != num_experts || !first.IsSupported() || !second.IsSupported() ||
      size % kLanes || hidden_size % kLanes ||
      int64_t(gate_up.element_count()) != groups[1] * num_experts * first.num_bytes() ||
      int64_t(down.element_count()) != num_experts * second.num_bytes())
    return ffi::Error::InvalidArgument("the sizes do not fit");
  RunLayer<Kind>(pool, Operands<kType>{x, chosen, factors, gate_up_bias, down_bias, y, inner},
                 num_experts, groups[1], first, second, {slope, cubic, offset, limit});
  return ffi::Error::Success();
}

}  // namespace

#ifdef JAXLLM_FLOAT32
JAXLLM_FUNCTION(JAXLLM_NAME(experts, f32), (RunExperts<ffi::F32, Float32>),
                "slope", "cubic", "offset", "limit")
#endif
#ifdef JAXLLM_BFLOAT16
JAXLLM_FUNCTION(JAXLLM_NAME(experts, bf16), (RunExperts<ffi::BF16, BFloat16>),
                "slope", "cubic", "offset", "limit")
#endif
