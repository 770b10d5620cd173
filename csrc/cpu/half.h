// Scalar conversions between float32 and the two half types, by their bits (IEEE 754 binary16 and bfloat16).
// Used where the instruction set has none; round to nearest even, as the hardware does.
#pragma once

#include <cstdint>
#include <cstring>

namespace attn_ext {

inline float float_from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t bits_from_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float float_from_bfloat16(uint16_t half) { return float_from_bits(uint32_t(half) << 16); }

inline uint16_t bfloat16_from_float(float x) {
  const uint32_t bits = bits_from_float(x);
  if (x != x) return uint16_t(bits >> 16 | 0x40);  // keep it a NaN when the low bits are cut off
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float float_from_float16(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
  if (exponent == 31) return float_from_bits(sign | 0x7f800000 | mantissa << 13);
  if (exponent != 0) return float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
  const float tiny = float(mantissa) * 5.9604644775390625e-8f;  // subnormal: mantissa * 2^-24
  return sign ? -tiny : tiny;
}

inline uint16_t float16_from_float(float x) {
  const uint32_t bits = bits_from_float(x), magnitude = bits & 0x7fffffff;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);   // NaN
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and more round to infinity
  if (magnitude < 0x38800000) {                                 // below 2^-14: a subnormal result
    // Adding 0.5 puts the last bit of the result (2^-24) at the last bit of the sum, which rounds it.
    const float shifted = float_from_bits(magnitude) + 0.5f;
    return uint16_t(sign | (bits_from_float(shifted) - 0x3f000000));
  }
  return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

}  // namespace attn_ext
