// Vectors of GCC and Clang, which make of them what the processor has, and the types of elements
// that kernels multiply.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace jaxllm {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

// Whether one is a register of the processor. Else it takes several of them, and fewer are at hand.
#if defined(__AVX512F__)
constexpr bool kIsOneRegister = true;
#else
constexpr bool kIsOneRegister = false;
#endif

template <typename Vector>
inline Vector LoadVector(const void* p) {
  Vector v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// By halves: four operations one after another, and not fifteen.
template <typename Combine>
inline float Reduce(const Floats& v, Combine combine) {
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  Eight halves[2];
  std::memcpy(halves, &v, sizeof(v));
  const Eight eight = combine(halves[0], halves[1]);
  Four quarters[2];
  std::memcpy(quarters, &eight, sizeof(eight));
  const Four four = combine(quarters[0], quarters[1]);
  return combine(combine(four[0], four[2]), combine(four[1], four[3]));
}

inline float Sum(const Floats& v) {
  return Reduce(v, [](auto a, auto b) { return a + b; });
}

inline float Largest(const Floats& v) {
  return Reduce(v, [](auto a, auto b) { return a > b ? a : b; });
}

// A type of elements. Kernels take them as words of 32 bits, of one float or of a pair of halves:
// a lane adds up the products of words.
struct Float32 {
  using Element = float;
  using Loaded = Floats;
  static constexpr int kPerWord = 1;
  static constexpr int kStep = kPerWord * kLanes;  // elements that are loaded at a time

  static Loaded Load(const Element* p) { return LoadVector<Floats>(p); }
  static Loaded Broadcast(const Element* word) { return *word - Floats{}; }
  static void Add(Floats& sum, const Loaded& x, const Loaded& y) { sum += x * y; }
  static void Store(const Floats& v, Element* p) { std::memcpy(p, &v, sizeof(v)); }
};

#if defined(__AVX512BF16__)

struct BFloat16 {
  using Element = uint16_t;
  using Loaded = __m512i;
  static constexpr int kPerWord = 2;
  static constexpr int kStep = kPerWord * kLanes;

  static Loaded Load(const Element* p) { return _mm512_loadu_si512(p); }
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
  struct Loaded {
    Floats first, second;  // of each pair
  };
  static constexpr int kPerWord = 2;
  static constexpr int kStep = kPerWord * kLanes;

  // Its bits are the upper half of a float32.
  static Loaded Split(const Words& pairs) {
    return {(Floats)(pairs << 16), (Floats)(pairs & 0xffff0000u)};
  }
  static Loaded Load(const Element* p) { return Split(LoadVector<Words>(p)); }
  static Loaded Broadcast(const Element* word) {
    uint32_t pair;
    std::memcpy(&pair, word, sizeof(pair));
    return Split(pair - Words{});
  }
  static void Add(Floats& sum, const Loaded& x, const Loaded& y) {
    sum += x.first * y.first;
    sum += x.second * y.second;
  }
  static void Store(const Floats& v, Element* p) {
    const Words bits = (Words)v;
    const Words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    // What is not a number must not be rounded to one.
    const Halves halves = __builtin_convertvector(v == v ? nearest : (bits >> 16) | 0x40, Halves);
    std::memcpy(p, &halves, sizeof(halves));
  }
};

#endif

}  // namespace jaxllm
