// A model of the AVX-512 instructions that the native kernels use, for processors without them: each
// does what Intel's guide says, lane by lane. Compiled in front of a source, it makes the source
// take the branches for such processors.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VNNI__ 1
#define __AVX512BF16__ 1

namespace model {

template <typename To, typename From>
inline To Bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
template <typename T, int kNum>
struct Array {
  T values[kNum];
  T& operator[](int i) { return values[i]; }
};
using F32 = Array<float, 16>;
using U16 = Array<uint16_t, 32>;
using S16 = Array<int16_t, 32>;
using S32 = Array<int32_t, 16>;
typedef uint16_t Rounded512 __attribute__((vector_size(64)));
typedef uint16_t Rounded256 __attribute__((vector_size(32)));

inline float Widened(uint16_t half) { return Bits<float>(uint32_t{half} << 16); }
// To the nearest, ties to even, as numbers that are no NaN are.
inline uint16_t Rounded(float value) {
  const uint32_t bits = Bits<uint32_t>(value);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

inline __m512i Load(const void* p) {
  __m512i v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline __m512i Set1(int32_t value) {
  S32 v;
  for (int i = 0; i < 16; ++i) v[i] = value;
  return Bits<__m512i>(v);
}
inline __m512i Twice(__m256i half) {
  __m256i both[2] = {half, half};
  return Load(both);
}
inline __m512i ShiftRight(__m512i a, int count) {
  U16 v = Bits<U16>(a);
  for (int i = 0; i < 32; ++i) v[i] = v[i] >> count;
  return Bits<__m512i>(v);
}
inline __m512i Permute(__m512i index, __m512i table) {
  U16 i = Bits<U16>(index), t = Bits<U16>(table), v;
  for (int lane = 0; lane < 32; ++lane) v[lane] = t[i[lane] & 31];
  return Bits<__m512i>(v);
}
inline __m512i AddPairs(__m512i sum, __m512i a, __m512i b) {
  S16 x = Bits<S16>(a), y = Bits<S16>(b);
  S32 v = Bits<S32>(sum);
  for (int i = 0; i < 16; ++i) v[i] += x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
  return Bits<__m512i>(v);
}
// Numbers below the least normal one are zero.
inline float Flushed(float v) { return v < 0x1p-126f && v > -0x1p-126f ? 0 : v; }
template <typename Halves>
inline __m512 AddBFloat16(__m512 sum, Halves a, Halves b) {
  U16 x = Bits<U16>(a), y = Bits<U16>(b);
  F32 v = Bits<F32>(sum);
  for (int i = 0; i < 16; ++i) {
    for (int j = 1; j >= 0; --j)
      v[i] += Flushed(Widened(x[2 * i + j])) * Flushed(Widened(y[2 * i + j]));
  }
  return Bits<__m512>(v);
}
inline __m512 MultiplyAdd(__m512 a, __m512 b, __m512 sum) {
  F32 x = Bits<F32>(a), y = Bits<F32>(b), v = Bits<F32>(sum);
  for (int i = 0; i < 16; ++i) v[i] = __builtin_fmaf(x[i], y[i], v[i]);
  return Bits<__m512>(v);
}
inline Rounded256 Round(__m512 a) {
  F32 x = Bits<F32>(a);
  Array<uint16_t, 16> v;
  for (int i = 0; i < 16; ++i) v[i] = Rounded(x[i]);
  return Bits<Rounded256>(v);
}
inline Rounded512 RoundTwo(__m512 second, __m512 first) {
  F32 a = Bits<F32>(first), b = Bits<F32>(second);
  U16 v;
  for (int i = 0; i < 16; ++i) v[i] = Rounded(a[i]), v[16 + i] = Rounded(b[i]);
  return Bits<Rounded512>(v);
}
inline __m512 FromFloat16(__m256i a) {
  __m256 halves[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(a)),
                      _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
  return Bits<__m512>(Load(halves));
}
inline __m512 Shuffle4(__m512 a, __m512 b, int control) {
  F32 x = Bits<F32>(a), y = Bits<F32>(b), v;
  for (int i = 0; i < 16; ++i) {
    const int from = control >> 2 * (i / 4) & 3;
    v[i] = (i < 8 ? x : y)[4 * from + i % 4];
  }
  return Bits<__m512>(v);
}
inline __m512 Shuffle1(__m512 a, __m512 b, int control) {
  F32 x = Bits<F32>(a), y = Bits<F32>(b), v;
  for (int i = 0; i < 16; ++i)
    v[i] = (i % 4 < 2 ? x : y)[i / 4 * 4 + (control >> 2 * (i % 4) & 3)];
  return Bits<__m512>(v);
}

}  // namespace model

#define __m512bh model::Rounded512
#define __m256bh model::Rounded256
#define _mm512_loadu_si512 model::Load
#define _mm512_set1_epi32 model::Set1
#define _mm512_broadcast_i64x4 model::Twice
#define _mm512_srli_epi16 model::ShiftRight
#define _mm512_permutexvar_epi16 model::Permute
#define _mm512_dpwssd_epi32 model::AddPairs
#define _mm512_dpbf16_ps model::AddBFloat16
#define _mm512_fmadd_ps model::MultiplyAdd
#define _mm512_cvtneps_pbh model::Round
#define _mm512_cvtne2ps_pbh model::RoundTwo
#define _mm512_cvtph_ps model::FromFloat16
#define _mm512_shuffle_f32x4 model::Shuffle4
#define _mm512_shuffle_ps model::Shuffle1
