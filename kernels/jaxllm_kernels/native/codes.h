// Weights that are stored as codes of 8 bits with scales. All codes have exact values in every
// element type, so a product is that of a 16-bit weight, and the scale multiplies the float32 sum.

#pragma once

#include <array>
#include <cstdint>

#include "native/vectors.h"

namespace jaxllm {

// A kind of codes: the value of a code, in units of `kUnit`.
struct Int8 {
  using Code = int8_t;
  static constexpr float kUnit = 1;

  static Floats Load(const Code* p) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
    typedef int8_t Codes __attribute__((vector_size(kLanes)));
    return __builtin_convertvector(LoadVector<Codes>(p), Floats);
#endif
  }
};

// Four bits of exponent, three of mantissa, no infinities. The bits of a code, shifted by 7 and with
// the sign in front, are a float16 of a 256th of its value, subnormals included.
struct Float8 {
  using Code = uint8_t;
  static constexpr float kUnit = 256;

#if defined(__AVX512F__)
  static Floats Load(const Code* p) {
    const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
    const __m256i sign = _mm256_and_si256(codes, _mm256_set1_epi16((int16_t)0x8000));
    const __m256i rest = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(0x3f80));
    return (Floats)_mm512_cvtph_ps(_mm256_or_si256(sign, rest));
  }
#else
  static float Value(int code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    // Of a subnormal number the exponent is that of the smallest other one.
    const float whole = exponent ? 8 + mantissa : mantissa;
    const float power = 1 << (exponent ? exponent : 1);
    return (code & 0x80 ? -whole : whole) * power * 0x1p-10f / kUnit;
  }
  static Floats Load(const Code* p) {
    static const auto values = [] {
      std::array<float, 256> table;
      for (int code = 0; code < 256; ++code) table[code] = Value(code);
      return table;
    }();
    Floats v;
    for (int i = 0; i < kLanes; ++i) v[i] = values[p[i]];
    return v;
  }
#endif
};

// A kind of elements whose weights are codes.
template <typename Kind, typename Codes>
struct Coded : Kind {
  using Weight = typename Codes::Code;
  static constexpr bool kHasScales = true;
  static constexpr float kUnit = Codes::kUnit;

  static typename Kind::Loaded LoadWeight(const Weight* p) {
    if constexpr (Kind::kPerWord == 1)
      return Codes::Load(p);
    else
      return Kind::Join(Codes::Load(p), Codes::Load(p + kLanes));
  }
};

}  // namespace jaxllm
