// Weights that are stored as codes of 8 or 4 bits: what vectors of them are, widened.
//
// A row of codes is a sequence of chunks of 128 inputs. Codes of 8 bits are in the order of the
// inputs. A chunk of codes of 4 bits is 32 words of 16 bits: bits 4 j to 4 j + 3 of word l are the
// code of input 32 j + l. So a shift leaves the codes of neighbouring inputs in neighbouring words,
// and rows need no other order.

#pragma once

#include <array>
#include <cstdint>

#include "native/vectors.h"

// The name of a function for the codes that a file is compiled for.
#define JAXLLM_JOIN(op, codes, dtype) jaxllm_##op##_##codes##_##dtype
#define JAXLLM_NAMED(op, codes, dtype) JAXLLM_JOIN(op, codes, dtype)
#define JAXLLM_NAME(op, dtype) JAXLLM_NAMED(op, JAXLLM_CODES, dtype)

namespace jaxllm {

constexpr int kChunk = 128;
constexpr int kWordsOfChunk = 32;

// Two whole numbers for each lane, and one.
typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));
typedef int16_t HalfShorts __attribute__((vector_size(2 * kLanes)));

template <int kNum>
struct CodeVector {
  typedef int8_t Type __attribute__((vector_size(kNum)));
};
template <int kNum>
using CodesOf = typename CodeVector<kNum>::Type;

inline Floats ToFloats(const HalfShorts& v) {
  return __builtin_convertvector(__builtin_convertvector(v, Ints), Floats);
}

// A kind of codes has the bytes of a chunk and the value of a code, in units of `kUnit`. Its
// functions load the codes of the vector of inputs number `step` of a chunk.

struct Int8 {
  using Code = int8_t;
  static constexpr int kBytes = kChunk;
  static constexpr float kUnit = 1;
  static constexpr bool kIsWhole = true;

  template <typename Vector>
  static Vector Load(const uint8_t* chunk, int step) {
    constexpr int kNum = sizeof(Vector) / 2;
    return __builtin_convertvector(LoadVector<CodesOf<kNum>>(chunk + step * kNum), Vector);
  }
  static Floats LoadFloats(const uint8_t* chunk, int step) {
    return ToFloats(Load<HalfShorts>(chunk, step));
  }
};

// Codes of 4 bits, whose values a kind says.
template <typename Values>
struct FourBits {
  static constexpr int kBytes = kChunk / 2;
  static constexpr float kUnit = Values::kUnit;
  static constexpr bool kIsWhole = true;

  template <typename Vector>
  static Vector Load(const uint8_t* chunk, int step) {
    constexpr int kNum = sizeof(Vector) / 2;
    const int first = step * kNum % kWordsOfChunk, nibble = step * kNum / kWordsOfChunk;
    return Values::Widen(LoadVector<Vector>(chunk + 2 * first), 4 * nibble);
  }
  static Floats LoadFloats(const uint8_t* chunk, int step) {
    return ToFloats(Load<HalfShorts>(chunk, step));
  }
};

#if defined(__AVX512BW__)
// A table of the 16 values, twice, needs no bits masked away.
inline __m512i LookUp(const int16_t (&values)[16], const Shorts& words, int shift) {
  const __m512i table =
      _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)values));
  return _mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)words, shift), table);
}
#endif

// Whole numbers from -8 to 7, each with 8 added.
struct ValuesOfInt4 {
  static constexpr float kUnit = 1;

  template <typename Vector>
  static Vector Widen(const Vector& words, int shift) {
#if defined(__AVX512BW__)
    if constexpr (sizeof(Vector) == 64) {
      alignas(32) static constexpr int16_t kValues[16] = {-8, -7, -6, -5, -4, -3, -2, -1,
                                                          0,  1,  2,  3,  4,  5,  6,  7};
      return (Vector)LookUp(kValues, words, shift);
    }
#endif
    // With the highest bit turned, a code is a number of 4 bits with its sign.
    return (words ^ (int16_t)0x8888) << (12 - shift) >> 12;
  }
};

// Floating point with two bits of exponent and one of mantissa, in halves.
struct ValuesOfFloat4 {
  static constexpr float kUnit = 0.5;
  static constexpr int8_t kMagnitudes[8] = {0, 1, 2, 3, 4, 6, 8, 12};

  template <typename Vector>
  static Vector Widen(const Vector& words, int shift) {
#if defined(__AVX512BW__)
    if constexpr (sizeof(Vector) == 64) {
      alignas(32) static constexpr int16_t kValues[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                          0, -1, -2, -3, -4, -6, -8, -12};
      return (Vector)LookUp(kValues, words, shift);
    }
#endif
#if defined(__AVX2__)
    if constexpr (sizeof(Vector) == 32) {
      // The low byte of a word looks up the number, and the high one nothing.
      const __m256i table = _mm256_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,
                                             0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
      const Vector codes = (words >> shift & 15) << 8;
      return (Vector)_mm256_shuffle_epi8(table, (__m256i)codes) >> 8;
    }
#endif
    const Vector codes = words >> shift, exponent = codes >> 1 & 3;
    const Vector mantissa = codes & 1;
    // In halves: the mantissa alone below 1, else (2 + mantissa) times a power of two.
    const Vector large = (mantissa + 2) << (exponent - (exponent > 0 ? Vector{} + 1 : Vector{}));
    const Vector magnitude = exponent > 0 ? large : mantissa;
    return (codes & 8) > 0 ? -magnitude : magnitude;
  }
};

using Int4 = FourBits<ValuesOfInt4>;
using Float4 = FourBits<ValuesOfFloat4>;

// Four bits of exponent, three of mantissa, no infinities. The bits of a code, shifted by 7 and with
// the sign in front, are a float16 of a 256th of its value, subnormals included.
struct Float8 {
  using Code = uint8_t;
  static constexpr int kBytes = kChunk;
  static constexpr float kUnit = 256;
  static constexpr bool kIsWhole = false;

#if defined(__AVX512F__)
  static Floats LoadFloats(const uint8_t* chunk, int step) {
    const auto* p = (const __m128i*)(chunk + step * kLanes);
    const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(p));
    const __m256i sign = _mm256_and_si256(codes, _mm256_set1_epi16((int16_t)0x8000));
    const __m256i rest = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(0x3f80));
    return (Floats)_mm512_cvtph_ps(_mm256_or_si256(sign, rest));
  }
#elif defined(__AVX2__) && defined(__F16C__)
  static Floats LoadFloats(const uint8_t* chunk, int step) {
    const auto* p = (const __m128i*)(chunk + step * kLanes);
    const __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64(p));
    const __m128i sign = _mm_and_si128(codes, _mm_set1_epi16((int16_t)0x8000));
    const __m128i rest = _mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16(0x3f80));
    return (Floats)_mm256_cvtph_ps(_mm_or_si128(sign, rest));
  }
#else
  static float Value(int code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    // Of a subnormal number the exponent is that of the smallest other one.
    const float whole = exponent ? 8 + mantissa : mantissa;
    const float power = 1 << (exponent ? exponent : 1);
    return (code & 0x80 ? -whole : whole) * power * 0x1p-10f / kUnit;
  }
  static Floats LoadFloats(const uint8_t* chunk, int step) {
    static const auto values = [] {
      std::array<float, 256> table;
      for (int code = 0; code < 256; ++code) table[code] = Value(code);
      return table;
    }();
    Floats v;
    for (int i = 0; i < kLanes; ++i) v[i] = values[chunk[step * kLanes + i]];
    return v;
  }
#endif
};

// A kind of elements that are kept as codes of 8 bits: they become elements behind the load.
template <typename Kind, typename Codes>
struct Coded : Kind {
  using Weight = typename Codes::Code;
  static constexpr bool kHasScales = true;
  static constexpr float kUnit = Codes::kUnit;

  static typename Kind::Loaded LoadWeight(const Weight* p) {
    const auto* codes = reinterpret_cast<const uint8_t*>(p);
    if constexpr (Kind::kPerWord == 1)
      return Codes::LoadFloats(codes, 0);
    else
      return Kind::Join(Codes::LoadFloats(codes, 0), Codes::LoadFloats(codes, 1));
  }
};

}  // namespace jaxllm
