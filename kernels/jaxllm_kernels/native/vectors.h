// Vectors of GCC and Clang, as wide as the processor's registers, and the element types of the
// kernels.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxllm {

// As wide as the processor's registers: compilers keep every value of a wider vector in memory.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kNumRegisters = 32;
#else
constexpr int kNumRegisters = 16;
#endif

template <int kNum>
struct VectorsOf {
  typedef float Floats __attribute__((vector_size(4 * kNum)));
};
using Floats = VectorsOf<kLanes>::Floats;
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint64_t Longs __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

template <typename Vector>
inline Vector LoadVector(const void* p) {
  Vector v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// sum += x * y, rounded once where the processor can. Compilers for some processors would round twice
// in short loops only, and a row alone would differ from the same row among others.
inline void AddProduct(Floats& sum, const Floats& x, const Floats& y) {
#if defined(__AVX512F__)
  sum = (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#elif defined(__FMA__)
  if constexpr (kLanes == 8) sum = (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
  else sum += x * y;
#else
  sum += x * y;
#endif
}

// Reduce by halves, so that few operations depend on each other.
template <int kNum = kLanes, typename Combine>
inline float Reduce(const typename VectorsOf<kNum>::Floats& v, Combine combine) {
  if constexpr (kNum == 4) {
    return combine(combine(v[0], v[2]), combine(v[1], v[3]));
  } else {
    typename VectorsOf<kNum / 2>::Floats halves[2];
    std::memcpy(halves, &v, sizeof(v));
    return Reduce<kNum / 2>(combine(halves[0], halves[1]), combine);
  }
}

inline float Sum(const Floats& v) {
  return Reduce(v, [](auto a, auto b) { return a + b; });
}

// totals[r][n] = Sum(vectors[n][r]), equal to the last bit.
template <int kColumns, int kRows>
inline void SumAll(const Floats (&vectors)[kColumns][kRows], float (&totals)[kRows][kColumns]) {
#if defined(__AVX512F__)
  if constexpr (kRows == 4) {
    // Sixteen sums at a time, by the same halves: the remainders of two sums share a vector.
    auto halves = [](Floats a, Floats b) -> Floats {
      return _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
    };
    auto quarters = [](Floats a, Floats b) -> Floats {
      return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    };
    auto eighths = [](Floats a, Floats b) -> Floats {
      return _mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xee);
    };
    auto sixteenths = [](Floats a, Floats b) -> Floats {
      return _mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xdd);
    };
    auto column = [&](int c) -> Floats {
      if (c >= kColumns) return Floats{};
      const Floats* rows = vectors[c];
      return quarters(halves(rows[0], rows[1]), halves(rows[2], rows[3]));
    };
    for (int c = 0; c < kColumns; c += 4) {
      const Floats four = sixteenths(eighths(column(c), column(c + 1)),
                                     eighths(column(c + 2), column(c + 3)));
      float rows[kRows][4];
      std::memcpy(rows, &four, sizeof(four));
      for (int r = 0; r < kRows; ++r)
        for (int i = c; i < kColumns && i < c + 4; ++i) totals[r][i] = rows[r][i - c];
    }
    return;
  }
#elif defined(__AVX2__)
  if constexpr (kColumns % 4 == 0) {
    // Likewise eight sums at a time: of two rows, whose halves are beside each other.
    auto halves = [](Floats a, Floats b) -> Floats {
      return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
    };
    auto quarters = [](Floats a, Floats b) -> Floats {
      return _mm256_shuffle_ps(a, b, 0x44) + _mm256_shuffle_ps(a, b, 0xee);
    };
    auto eighths = [](Floats a, Floats b) -> Floats {
      return _mm256_shuffle_ps(a, b, 0x88) + _mm256_shuffle_ps(a, b, 0xdd);
    };
    for (int r = 0; r < kRows; r += 2)
      for (int c = 0; c < kColumns; c += 4) {
        const int other = r + 1 < kRows ? r + 1 : r;
        auto column = [&](int c) { return halves(vectors[c][r], vectors[c][other]); };
        const Floats rows = eighths(quarters(column(c), column(c + 1)),
                                    quarters(column(c + 2), column(c + 3)));
        const __m128 low = _mm256_castps256_ps128(rows), high = _mm256_extractf128_ps(rows, 1);
        std::memcpy(&totals[r][c], &low, sizeof(low));
        if (other > r) std::memcpy(&totals[other][c], &high, sizeof(high));
      }
    return;
  }
#endif
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c) totals[r][c] = Sum(vectors[c][r]);
}

inline float Largest(const Floats& v) {
  return Reduce(v, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x for x <= 0, within 1e-7; exactly 1 for x = 0, and 0 up to `lowest`.
inline Floats Exp(const Floats& x, float lowest = -87.0f) {
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, in the lowest bits
  const Floats shifted = x * 0x1.715476p+0f + kRound;
  const Floats whole = shifted - kRound;
  const Floats r = (x - whole * 0x1.62e4p-1f) - whole * 0x1.7f7d1cp-20f;  // ln 2 in two parts
  Floats y = 0.0013843652559444308f * r + 0.00837415549904108f;
  y = y * r + 0.04166800156235695f;
  y = y * r + 0.16666431725025177f;
  y = y * r + 0.4999999403953552f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  const Floats power = (Floats)(((Words)shifted + 127) << 23);
  return x > lowest ? y * power : Floats{};
}

// An element type. Kernels process elements as 32-bit words: one float, or a pair of 16-bit
// elements. A lane adds up the products of words.
struct Float32 {
  using Element = float;
  using Weight = Element;
  using Loaded = Floats;
  static constexpr bool kHasScales = false;  // of weights
  static constexpr int kPerWord = 1;
  static constexpr int kStep = kPerWord * kLanes;  // elements that are loaded at a time

  static Loaded Load(const Element* p) {
    Floats v = LoadVector<Floats>(p);
    // Without this, compilers read the vector again for each product.
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__x86_64__)
    asm("" : "+x"(v));
#endif
    return v;
  }
  static Loaded LoadWeight(const Weight* p) { return Load(p); }
  static Loaded Broadcast(const Element* word) { return *word - Floats{}; }
  static void Add(Floats& sum, const Loaded& x, const Loaded& y) { AddProduct(sum, x, y); }
  static void Store(const Floats& v, Element* p) { std::memcpy(p, &v, sizeof(v)); }
};

#if defined(__AVX512BF16__)

struct BFloat16 {
  using Element = uint16_t;
  using Weight = Element;
  using Loaded = __m512i;
  static constexpr bool kHasScales = false;
  static constexpr int kPerWord = 2;
  static constexpr int kStep = kPerWord * kLanes;

  static Loaded Load(const Element* p) { return _mm512_loadu_si512(p); }
  static Loaded LoadWeight(const Weight* p) { return Load(p); }
  // Of 2 * kLanes floats, which bfloat16 has.
  static Loaded Join(const Floats& first, const Floats& second) {
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  }
  static Loaded Broadcast(const Element* word) {
    int32_t pair;
    std::memcpy(&pair, word, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  static void Add(Floats& sum, const Loaded& x, const Loaded& y) {
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
  }
  static void Store(const Floats& v, Element* p) {
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &rounded, sizeof(rounded));
  }
};

#else

struct BFloat16 {
  using Element = uint16_t;
  using Weight = Element;
  struct Loaded {
    Floats first, second;  // of each pair
  };
  static constexpr bool kHasScales = false;
  static constexpr int kPerWord = 2;
  static constexpr int kStep = kPerWord * kLanes;

  // The bits of a bfloat16 are the upper half of a float32.
  static Loaded Split(const Words& pairs) {
    return {(Floats)(pairs << 16), (Floats)(pairs & 0xffff0000u)};
  }
  static Loaded Load(const Element* p) { return Split(LoadVector<Words>(p)); }
  static Loaded LoadWeight(const Weight* p) { return Load(p); }
  static Loaded Join(const Floats& first, const Floats& second) {
    Loaded pairs;
    for (int i = 0; i < kLanes / 2; ++i) {
      pairs.first[i] = first[2 * i], pairs.second[i] = first[2 * i + 1];
      pairs.first[i + kLanes / 2] = second[2 * i], pairs.second[i + kLanes / 2] = second[2 * i + 1];
    }
    return pairs;
  }
  static Loaded Broadcast(const Element* word) {
    uint32_t pair;
    std::memcpy(&pair, word, sizeof(pair));
    return Split(pair - Words{});
  }
  static void Add(Floats& sum, const Loaded& x, const Loaded& y) {
    AddProduct(sum, x.first, y.first);
    AddProduct(sum, x.second, y.second);
  }
  static void Store(const Floats& v, Element* p) {
    const Words bits = (Words)v;
    const Words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    // NaN must not be rounded to a number.
    const Halves halves = __builtin_convertvector(v == v ? nearest : (bits >> 16) | 0x40, Halves);
    std::memcpy(p, &halves, sizeof(halves));
  }
};

#endif

}  // namespace jaxllm
