// The short causal convolution of all rows of a step.
//
// A unit of work is a block of channels. It reads the taps once, and then takes one row after the
// other: what the row's state has, the row's tokens, and what the state becomes. Sums have the order
// of the taps, whatever other rows there are and wherever the row is cut.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "native/ffi.h"
#include "native/threads.h"
#include "native/vectors.h"

namespace {

using namespace jaxllm;

constexpr int kBlock = 256;  // channels
// Threads share no less than that.
constexpr int64_t kUnitElements = 1 << 13;

inline Floats Widen(const float* p) { return LoadVector<Floats>(p); }
inline Floats Widen(const uint16_t* p) {
  return (Floats)(__builtin_convertvector(LoadVector<Halves>(p), Words) << 16);
}
inline void Narrow(const Floats& v, float* p) { std::memcpy(p, &v, sizeof(v)); }
inline void Narrow(const Floats& v, uint16_t* p) {
  const Words bits = (Words)v;
  const Words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  // NaN must not be rounded to a number.
  const Halves halves = __builtin_convertvector(v == v ? nearest : (bits >> 16) | 0x40, Halves);
  std::memcpy(p, &halves, sizeof(halves));
}

inline Floats Silu(const Floats& x) {
  const Floats power = Exp(x < 0 ? x : -x);
  return x * (x < 0 ? power : Floats{} + 1) / (power + 1);
}

template <typename Element>
class Block {
 public:
  // Channels from `first` on.
  Block(const Element* weight, const Element* bias, int64_t width, int64_t first, int64_t count)
      : width_(width),
        count_(count),
        taps_(new float[(width + 1) * kBlock]()),
        inputs_(new Element[width * kBlock]()),
        places_(width) {
    for (int64_t c = 0; c < count; ++c) {
      for (int64_t i = 0; i < width; ++i)
        taps_[i * kBlock + c] = Wide(weight[(first + c) * width + i]);
      if (bias) taps_[width * kBlock + c] = Wide(bias[first + c]);
    }
  }

  // Begin a row after these inputs, or after zeros if there are none.
  void Begin(const Element* state, int64_t stride) {
    next_ = 0;
    for (int64_t i = 0; i < width_ - 1; ++i) {
      Element* to = Place(i);
      if (state) std::copy_n(state + i * stride, count_, to);
      else std::fill_n(to, count_, Element{});
    }
  }

  void Add(const Element* x, Element* y, bool is_silu) {
    std::copy_n(x, count_, Place(width_ - 1));
    switch (width_) {  // loops that are unrolled
      case 3: Filter<3>(y, is_silu); break;
      case 4: Filter<4>(y, is_silu); break;
      default: Filter<0>(y, is_silu);
    }
    next_ = (next_ + 1) % width_;
  }

  // Write the last inputs.
  void End(Element* state, int64_t stride) {
    for (int64_t i = 0; i < width_ - 1; ++i) std::copy_n(Place(i), count_, state + i * stride);
  }

 private:
  template <int kWidth>
  void Filter(Element* y, bool is_silu) {
    const int64_t width = kWidth ? kWidth : width_;
    for (int64_t i = 0; i < width; ++i) places_[i] = Place(i);
    for (int64_t c = 0; c < count_; c += kLanes) {
      Floats sum = LoadVector<Floats>(&taps_[width * kBlock + c]);
      for (int64_t i = 0; i < width; ++i)
        AddProduct(sum, LoadVector<Floats>(&taps_[i * kBlock + c]), Widen(places_[i] + c));
      if (is_silu) sum = Silu(sum);
      if (count_ - c >= kLanes) {
        Narrow(sum, y + c);
      } else {
        Element part[kLanes];
        Narrow(sum, part);
        std::copy_n(part, count_ - c, y + c);
      }
    }
  }
  static float Wide(float x) { return x; }
  static float Wide(uint16_t x) {
    const uint32_t bits = uint32_t{x} << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof(wide));
    return wide;
  }
  // The inputs that a token sees, the oldest first. They are a ring.
  Element* Place(int64_t i) { return &inputs_[(next_ + i) % width_ * kBlock]; }

  int64_t width_, count_, next_ = 0;
  std::unique_ptr<float[]> taps_;
  std::unique_ptr<Element[]> inputs_;
  std::vector<const Element*> places_;
};

template <ffi::DataType kType, ffi::DataType kStored, typename Element>
ffi::Error Convolve(ffi::ThreadPool pool, ffi::Buffer<kType, 2> x, ffi::Buffer<kType, 2> weight,
                    ffi::Buffer<kType, 1> bias, ffi::Buffer<kStored, 3> state,
                    ffi::Buffer<ffi::S32, 1> slots, ffi::Buffer<ffi::PRED, 1> begins,
                    ffi::Buffer<ffi::S32, 1> query_starts, ffi::Buffer<ffi::S32, 1> lengths,
                    ffi::Buffer<ffi::S32, 1> num_kept, ffi::ResultBuffer<kType, 2> y,
                    ffi::ResultBuffer<kStored, 3> next, bool is_silu) {
  const int64_t num_tokens = x.dimensions()[0], channels = x.dimensions()[1];
  const int64_t num_rows = slots.dimensions()[0], num_slots = state.dimensions()[0];
  const int64_t width = weight.dimensions()[1];
  const auto* inputs = reinterpret_cast<const Element*>(x.untyped_data());
  const auto* taps = reinterpret_cast<const Element*>(weight.untyped_data());
  const auto* added = reinterpret_cast<const Element*>(bias.untyped_data());
  auto* outputs = reinterpret_cast<Element*>(y->untyped_data());
  auto* states = reinterpret_cast<Element*>(next->untyped_data());
  if (next->untyped_data() != state.untyped_data())
    return ffi::Error::InvalidArgument("states must be updated in place");
  const int64_t num_blocks = (channels + kBlock - 1) / kBlock;
  const int64_t blocks = std::clamp<int64_t>(kUnitElements / (num_tokens * kBlock), 1, num_blocks);
  Share(pool, {(num_blocks + blocks - 1) / blocks}, [&](int64_t, int64_t unit) {
    for (int64_t b = unit * blocks; b < std::min(num_blocks, (unit + 1) * blocks); ++b) {
      const int64_t first = b * kBlock, count = std::min<int64_t>(kBlock, channels - first);
      Block<Element> block(taps, bias.dimensions()[0] ? added : nullptr, width, first, count);
      for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t slot = slots.typed_data()[row], length = lengths.typed_data()[row];
        if (!length || slot < 0 || slot >= num_slots) continue;
        Element* its = states + slot * (width - 1) * channels + first;
        block.Begin(begins.typed_data()[row] ? nullptr : its, channels);
        for (int64_t j = 0; j < length; ++j) {
          const int64_t at = (query_starts.typed_data()[row] + j) * channels + first;
          block.Add(inputs + at, outputs + at, is_silu);
          if (j + 1 == num_kept.typed_data()[row]) block.End(its, channels);
        }
      }
      for (int64_t t = query_starts.typed_data()[num_rows]; t < num_tokens; ++t)
        std::fill_n(outputs + t * channels + first, count, Element{});
    }
  });
  return ffi::Error::Success();
}

}  // namespace

#ifdef JAXLLM_FLOAT32
JAXLLM_FUNCTION(jaxllm_conv_f32, (Convolve<ffi::F32, ffi::F32, float>), "is_silu")
#endif
#ifdef JAXLLM_BFLOAT16
JAXLLM_FUNCTION(jaxllm_conv_bf16, (Convolve<ffi::BF16, ffi::U16, uint16_t>), "is_silu")
#endif
