// Rows as they are multiplied with codes, and their products with vectors of widened codes.
//
// Rows of bfloat16 become whole numbers of 16 bits, some inputs at a time with a power of two that
// they share. Then a processor multiplies twice as many numbers at a time as in float32, and codes
// are widened by one or two instructions. Numbers down to a 128th of the largest one keep all of
// their bits, and smaller ones are rounded to 2^-15 of it at most: see the README for what that
// means. Rows of float32 stay what they are.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>

#include "native/codes.h"

namespace jaxllm {

// Whole numbers times whole numbers, summed exactly for up to a chunk.
struct WholeProducts {
  using Element = int16_t;
  using Sum = Ints;
  static constexpr int kStep = 2 * kLanes;
  static constexpr bool kHasRowScales = true;

  template <typename Codes>
  static Shorts Load(const uint8_t* chunk, int step) {
    return Codes::template Load<Shorts>(chunk, step);
  }
  static void Add(Sum& sum, const Element* x, const Shorts& w) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    sum = (Sum)_mm512_dpwssd_epi32((__m512i)sum, _mm512_loadu_si512(x), (__m512i)w);
#elif defined(__AVX512BW__)
    sum += (Sum)_mm512_madd_epi16(_mm512_loadu_si512(x), (__m512i)w);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    sum += (Sum)_mm256_madd_epi16(_mm256_loadu_si256((const __m256i*)x), (__m256i)w);
#else
    // The lower and the upper half of a lane.
    const Sum xs = LoadVector<Sum>(x), ws = (Sum)w;
    sum += (xs << 16 >> 16) * (ws << 16 >> 16) + (xs >> 16) * (ws >> 16);
#endif
  }
  static Floats ToFloats(const Sum& sum) { return __builtin_convertvector(sum, Floats); }
};

struct FloatProducts {
  using Element = float;
  using Sum = Floats;
  static constexpr int kStep = kLanes;
  static constexpr bool kHasRowScales = false;

  template <typename Codes>
  static Floats Load(const uint8_t* chunk, int step) {
    return Codes::LoadFloats(chunk, step);
  }
  static void Add(Sum& sum, const Element* x, const Floats& w) {
    AddProduct(sum, LoadVector<Floats>(x), w);
  }
  static Floats ToFloats(const Sum& sum) { return sum; }
};

#if defined(__AVX512BF16__)
// For codes that bfloat16 has exactly, and that are no whole numbers.
struct BFloat16Products {
  using Element = uint16_t;
  using Sum = Floats;
  static constexpr int kStep = 2 * kLanes;
  static constexpr bool kHasRowScales = false;

  template <typename Codes>
  static __m512i Load(const uint8_t* chunk, int step) {
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)Codes::LoadFloats(chunk, 2 * step + 1),
                                        (__m512)Codes::LoadFloats(chunk, 2 * step));
  }
  static void Add(Sum& sum, const Element* x, const __m512i& w) {
    sum = (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(x), (__m512bh)w);
  }
  static Floats ToFloats(const Sum& sum) { return sum; }
};
#endif

// How rows of elements are multiplied with codes.
template <typename Element, typename Codes>
struct ProductsOf {
  using Type = FloatProducts;
};
template <typename Codes>
struct ProductsOf<uint16_t, Codes> {
#if defined(__AVX512BF16__)
  using Type = std::conditional_t<Codes::kIsWhole, WholeProducts, BFloat16Products>;
#else
  using Type = std::conditional_t<Codes::kIsWhole, WholeProducts, FloatProducts>;
#endif
};

inline float Widen(float value) { return value; }
inline float Widen(uint16_t value) {
  const uint32_t bits = uint32_t{value} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

template <typename Element>
inline Floats WidenVector(const Element* p) {
  if constexpr (sizeof(Element) == 4) {
    return LoadVector<Floats>(p);
  } else {
    const Words bits = __builtin_convertvector(LoadVector<Halves>(p), Words);
    return (Floats)(bits << 16);
  }
}

// Write `num` elements as whole numbers, and return the size of one. What is not finite makes the
// size, and so all products with these inputs, not a number.
template <typename Element>
inline float ToWhole(const Element* x, int64_t num, int16_t* whole) {
  Words largest{};
  for (int64_t i = 0; i < num; i += kLanes) {
    const Words bits = (Words)WidenVector(x + i) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits = std::max<uint32_t>(bits, largest[i]);
  if (bits >= 0x7f800000) {
    std::fill(whole, whole + num, 0);
    return std::numeric_limits<float>::quiet_NaN();
  }
  // The largest gets 15 bits. Below 2^-100 there is nothing to tell apart.
  const int exponent = std::max(int(bits >> 23) - 127, -100);
  const Floats factor = std::ldexp(1.0f, 14 - exponent) - Floats{};
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, in the lowest bits
  for (int64_t i = 0; i < num; i += kLanes) {
    const Ints numbers = (Ints)(WidenVector(x + i) * factor + kRound) - 0x4b400000;
    const HalfShorts shorts = __builtin_convertvector(numbers, HalfShorts);
    std::memcpy(whole + i, &shorts, sizeof(shorts));
  }
  return std::ldexp(1.0f, exponent - 14);
}

// Rows of a product: elements of the model, and what they become.
template <typename Model, typename Products>
class Rows {
 public:
  using Element = typename Products::Element;

  // Rows are cut into parts, which share a size, and groups, which are summed if `has_sums`.
  Rows(const Model* x, int64_t num_rows, int64_t num_inputs, int64_t part, int64_t group,
       bool has_sums)
      : x_(x), num_inputs_(num_inputs), part_(part), group_(has_sums ? group : 0) {
    if constexpr (!kAreElements) elements_.reset(new Element[num_rows * num_inputs]);
    if constexpr (Products::kHasRowScales) scales_.reset(new float[num_rows * num_parts()]);
    if (has_sums) sums_.reset(new float[num_rows * num_groups()]);
  }

  // Whether there is anything to do for a row before it is multiplied.
  bool has_work() const { return !kAreElements || sums_; }

  void Prepare(int64_t row) const {
    const Model* x = x_ + row * num_inputs_;
    if constexpr (Products::kHasRowScales) {
      for (int64_t i = 0; i < num_parts(); ++i) {
        const int64_t begin = i * part_, num = std::min(part_, num_inputs_ - begin);
        scales_[row * num_parts() + i] =
            ToWhole(x + begin, num, &elements_[row * num_inputs_ + begin]);
      }
    } else if constexpr (!kAreElements) {
      for (int64_t k = 0; k < num_inputs_; k += kLanes) {
        const Floats v = WidenVector(x + k);
        std::memcpy(&elements_[row * num_inputs_ + k], &v, sizeof(v));
      }
    }
    if (!sums_) return;
    for (int64_t g = 0; g < num_groups(); ++g) {
      float sum = 0;
      for (int64_t k = g * group_; k < (g + 1) * group_; ++k) sum += Widen(x[k]);
      sums_[row * num_groups() + g] = sum;
    }
  }

  const Element* elements(int64_t row) const {
    if constexpr (kAreElements) return x_ + row * num_inputs_;
    else return &elements_[row * num_inputs_];
  }
  const float* scales(int64_t row) const { return &scales_[row * num_parts()]; }
  const float* sums(int64_t row) const { return &sums_[row * num_groups()]; }

 private:
  static constexpr bool kAreElements = std::is_same_v<Model, Element>;

  int64_t num_parts() const { return (num_inputs_ + part_ - 1) / part_; }
  int64_t num_groups() const { return num_inputs_ / group_; }

  const Model* x_;
  int64_t num_inputs_, part_, group_;
  std::unique_ptr<Element[]> elements_;
  std::unique_ptr<float[]> scales_, sums_;
};

}  // namespace jaxllm
