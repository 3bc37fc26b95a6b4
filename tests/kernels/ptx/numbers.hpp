// Number formats of tensor cores, and bits as numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

inline float f32_of(u64 bits) {
    const u32 low = u32(bits);
    float value;
    std::memcpy(&value, &low, 4);
    return value;
}

inline u64 bits_of(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float bf16_of(u16 bits) { return f32_of(u32(bits) << 16); }

inline u16 to_bf16(float value) {
    if (std::isnan(value)) return 0x7fff;
    const u32 bits = u32(bits_of(value));
    return u16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float f16_of(u16 bits) {
    const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    float value;
    if (exponent == 31)
        value = mantissa ? NAN : INFINITY;
    else if (exponent == 0)
        value = std::ldexp(float(mantissa), -24);
    else
        value = std::ldexp(float(1024 + mantissa), exponent - 25);
    return bits & 0x8000 ? -value : value;
}

inline u16 to_f16(float value) {
    if (std::isnan(value)) return 0x7fff;
    const u16 sign = std::signbit(value) ? 0x8000 : 0;
    const float size = std::fabs(value);
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < std::ldexp(1.0f, -14)) return sign | u16(std::nearbyint(std::ldexp(size, 24)));
    int exponent;
    std::frexp(size, &exponent);
    // The rounded mantissa may reach 2048, which carries into the exponent.
    const int mantissa = int(std::nearbyint(std::ldexp(size, 11 - exponent)));
    return sign | u16(((exponent + 13) << 10) + mantissa);
}

inline float e4m3_of(u8 bits) {
    const int exponent = (bits >> 3) & 15, mantissa = bits & 7;
    float value = exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
    if ((bits & 0x7f) == 0x7f) value = NAN;
    return bits & 0x80 ? -value : value;
}

// As cvt.rn.satfinite: what is too large becomes 448.
inline u8 to_e4m3(float value) {
    if (std::isnan(value)) return 0x7f;
    const u8 sign = std::signbit(value) ? 0x80 : 0;
    const float size = std::fabs(value);
    if (size >= 448.0f) return sign | 0x7e;
    if (size < std::ldexp(1.0f, -6)) return sign | u8(std::nearbyint(std::ldexp(size, 9)));
    int exponent;
    std::frexp(size, &exponent);
    const int mantissa = int(std::nearbyint(std::ldexp(size, 4 - exponent)));
    return sign | u8(std::min(((exponent + 5) << 3) + mantissa, 0x7e));
}
