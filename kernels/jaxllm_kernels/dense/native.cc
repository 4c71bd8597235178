// y[r, n] = sum over k of x[r, k] * weight[n, k], in float32, for the rows of decodes and of short
// prompts. Weights are elements, or codes with scales. `products.h` has the products of one thread.
//
// Rows of zeros at the end, with which steps are padded, cost nothing.

#include <algorithm>
#include <cstdint>

#include "native/codes.h"
#include "native/products.h"
#include "native/threads.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using namespace jaxllm;

template <typename Kind>
void Multiply(const Product<Kind>& p, ffi::ThreadPool& pool) {
  constexpr int64_t kOutputs = kBlockOutputs<Kind>;
  const int64_t panel = Cut(p.num_rows, kPanelRows, kBlockRows<Kind>);
  const int64_t num_panels = (p.num_rows + panel - 1) / panel;
  const int64_t num_blocks = (p.num_outputs + kOutputs - 1) / kOutputs;
  const int64_t num_tiles =
      std::max<int64_t>(1, pool.num_threads() * kTilesPerThread / num_panels);
  // Tiles have whole blocks. Each is smaller than the one before, so that threads end together.
  auto begin = [=, &p](int64_t tile) {
    const int64_t left = num_tiles - tile;
    const int64_t blocks_left = num_blocks * left * left / (num_tiles * num_tiles);
    return std::min((num_blocks - blocks_left) * kOutputs, p.num_outputs);
  };
  // Compute all panels of a tile before the next tile, so that its weights are still in a cache.
  Share(pool, num_tiles * num_panels, 0, [&](int64_t unit) {
    const int64_t tile = unit / num_panels, row = unit % num_panels * panel;
    MultiplyPanel(p, {row, std::min(row + panel, p.num_rows)}, {begin(tile), begin(tile + 1)});
  });
}

// The number of rows up to the last one that is not all zeros.
template <typename Element>
int64_t CountRows(const Element* x, int64_t num_rows, int64_t num_inputs) {
  auto is_zero = [](Element value) {
    if constexpr (sizeof(Element) == 2) value &= 0x7fff;  // ignore the sign of minus zero
    return value == 0;
  };
  for (const Element* row = x + num_rows * num_inputs; num_rows > 0; --num_rows) {
    row -= num_inputs;
    if (!std::all_of(row, row + num_inputs, is_zero)) break;
  }
  return num_rows;
}

// Multiply, and fill the rows of zeros.
template <typename Kind>
void MultiplyAll(Product<Kind> product, ffi::ThreadPool& pool) {
  const int64_t num_rows = product.num_rows;
  product.num_rows = CountRows(product.x, num_rows, product.num_inputs);
  if (product.num_rows > 0) Multiply(product, pool);
  std::fill(product.y + product.num_rows * product.num_outputs,
            product.y + num_rows * product.num_outputs, 0.0f);
}

template <ffi::DataType kType, typename Kind>
ffi::Error MultiplyBuffers(ffi::ThreadPool pool, ffi::Buffer<kType, 2> x,
                           ffi::Buffer<kType, 2> weight, ffi::ResultBuffer<ffi::F32, 2> y) {
  using Element = typename Kind::Element;
  const auto rows = x.dimensions(), outputs = weight.dimensions();
  if (rows[1] != outputs[1] || rows[1] % Kind::kStep != 0)
    return ffi::Error::InvalidArgument("the inner sizes do not fit");
  MultiplyAll(Product<Kind>{reinterpret_cast<const Element*>(x.untyped_data()),
                            reinterpret_cast<const Element*>(weight.untyped_data()), y->typed_data(),
                            rows[0], rows[1], outputs[0], PieceSize<Kind>(rows[1])},
              pool);
  return ffi::Error::Success();
}

template <ffi::DataType kType>
auto Signature() {
  using Matrix = ffi::Buffer<kType, 2>;
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .template Arg<Matrix>()
      .template Arg<Matrix>()
      .template Ret<ffi::Buffer<ffi::F32, 2>>();
}

// The codes are [outputs, inputs], the scales [outputs, groups of inputs].
template <ffi::DataType kType, ffi::DataType kCodeType, typename Kind>
ffi::Error MultiplyCodes(ffi::ThreadPool pool, ffi::Buffer<kType, 2> x, ffi::AnyBuffer codes,
                         ffi::Buffer<ffi::F32, 2> scales, ffi::ResultBuffer<ffi::F32, 2> y) {
  // The interface has no typed buffers of float8.
  if (codes.element_type() != kCodeType || codes.dimensions().size() != 2)
    return ffi::Error::InvalidArgument("these are not the codes of this function");
  const auto rows = x.dimensions(), outputs = codes.dimensions(), groups = scales.dimensions();
  if (rows[1] != outputs[1] || groups[0] != outputs[0] || rows[1] % (groups[1] * Kind::kStep) != 0)
    return ffi::Error::InvalidArgument("the inner sizes do not fit");
  const int64_t group = rows[1] / groups[1];
  Product<Kind> product{reinterpret_cast<const typename Kind::Element*>(x.untyped_data()),
                        reinterpret_cast<const typename Kind::Weight*>(codes.untyped_data()),
                        y->typed_data(), rows[0], rows[1], outputs[0]};
  // Pieces do not reach across groups.
  product.piece = groups[1] == 1 ? PieceSize<Kind>(group) : group;
  product.scales = scales.typed_data();
  product.group = group;
  MultiplyAll(product, pool);
  return ffi::Error::Success();
}

template <ffi::DataType kType>
auto CodesSignature() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .template Arg<ffi::Buffer<kType, 2>>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::Buffer<ffi::F32, 2>>()
      .template Ret<ffi::Buffer<ffi::F32, 2>>();
}

}  // namespace

#ifdef JAXLLM_FLOAT32
constexpr auto MultiplyF32 = MultiplyBuffers<ffi::F32, Float32>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_dense_f32, MultiplyF32, Signature<ffi::F32>());
constexpr auto MultiplyInt8F32 = MultiplyCodes<ffi::F32, ffi::S8, Coded<Float32, Int8>>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_dense_int8_f32, MultiplyInt8F32,
                              CodesSignature<ffi::F32>());
constexpr auto MultiplyFloat8F32 = MultiplyCodes<ffi::F32, ffi::F8E4M3FN, Coded<Float32, Float8>>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_dense_float8_f32, MultiplyFloat8F32,
                              CodesSignature<ffi::F32>());
#endif
#ifdef JAXLLM_BFLOAT16
constexpr auto MultiplyBF16 = MultiplyBuffers<ffi::BF16, BFloat16>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_dense_bf16, MultiplyBF16, Signature<ffi::BF16>());
constexpr auto MultiplyInt8BF16 = MultiplyCodes<ffi::BF16, ffi::S8, Coded<BFloat16, Int8>>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_dense_int8_bf16, MultiplyInt8BF16,
                              CodesSignature<ffi::BF16>());
constexpr auto MultiplyFloat8BF16 =
    MultiplyCodes<ffi::BF16, ffi::F8E4M3FN, Coded<BFloat16, Float8>>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_dense_float8_bf16, MultiplyFloat8BF16,
                              CodesSignature<ffi::BF16>());
#endif
