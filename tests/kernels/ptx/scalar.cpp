#include "scalar.hpp"

#include <stdexcept>

namespace ptx {

namespace {

float number_of(u64 bits, Type type) {
    switch (type) {
        case Type::F16: return f16_of(u16(bits));
        case Type::BF16: return bf16_of(u16(bits));
        default: return f32_of(bits);
    }
}

u64 bits_as(float value, Type type) {
    switch (type) {
        case Type::F16: return to_f16(value);
        case Type::BF16: return to_bf16(value);
        default: return bits_of(value);
    }
}

// PTX: of a number and a NaN, min and max give the number.
float larger(float a, float b) { return std::isnan(a) ? b : std::isnan(b) ? a : std::max(a, b); }

float compute_float(const Instruction& in, float a, float b, float c) {
    switch (in.op) {
        case Op::Add: return a + b;
        case Op::Sub: return a - b;
        case Op::Mul: return a * b;
        case Op::Fma: return std::fma(a, b, c);
        case Op::Div: return a / b;
        case Op::Neg: return -a;
        case Op::Abs: return std::fabs(a);
        case Op::Max: return larger(a, b);
        case Op::Min: return -larger(-a, -b);
        case Op::Ex2: return std::exp2(a);
        case Op::Rsqrt: return 1.0f / std::sqrt(a);
        default: throw std::runtime_error("not known for floats: " + in.text);
    }
}

// PTX, bfe: beyond the field or the value comes its sign.
u64 extract_bits(u64 value, u64 position, u64 length, Type type) {
    const u64 bits = 8 * u64(bytes_of(type)), first = position & 255, count = length & 255;
    const bool sign = is_signed(type) && count && (cut(value, type) >> std::min(first + count - 1, bits - 1) & 1);
    u64 field = 0;
    for (u64 i = 0; i < bits; i++) {
        const bool bit = i < count && first + i < bits ? value >> (first + i) & 1 : sign;
        field |= u64(bit) << i;
    }
    return field;
}

template <class Value>
bool ordered(Variant variant, Value a, Value b) {
    switch (variant) {
        case Variant::Eq: return a == b;
        case Variant::Ne: return a != b;
        case Variant::Lt: return a < b;
        case Variant::Le: return a <= b;
        case Variant::Gt: return a > b;
        case Variant::Ge: return a >= b;
        default: throw std::runtime_error("not known: this comparison");
    }
}

// The ordered counterpart of a comparison that holds for NaN.
Variant without_nan(Variant variant) {
    switch (variant) {
        case Variant::Equ: return Variant::Eq;
        case Variant::Neu: return Variant::Ne;
        case Variant::Ltu: return Variant::Lt;
        case Variant::Leu: return Variant::Le;
        case Variant::Gtu: return Variant::Gt;
        case Variant::Geu: return Variant::Ge;
        default: return variant;
    }
}

}  // namespace

u64 cut(u64 value, Type type) {
    if (type == Type::Pred) return value & 1;
    const int bytes = bytes_of(type);
    return bytes == 8 ? value : value & ((u64(1) << 8 * bytes) - 1);
}

i64 signed_of(u64 value, Type type) {
    const int unused = 64 - 8 * bytes_of(type);
    return i64(value << unused) >> unused;
}

u64 compute(const Instruction& in, u64 a, u64 b, u64 c) {
    const Type type = in.type;
    if (is_float(type))
        return bits_as(compute_float(in, number_of(a, type), number_of(b, type), number_of(c, type)), type);
    if (type == Type::S16x2) {
        if (in.op != Op::Add) throw std::runtime_error("not known: " + in.text);
        return u32(u16(a + b)) | u32(u16((a >> 16) + (b >> 16))) << 16;
    }
    const bool with_sign = is_signed(type);
    const u64 bits = 8 * u64(bytes_of(type));
    const i64 sa = signed_of(a, type), sb = signed_of(b, type);
    const u64 ua = cut(a, type), ub = cut(b, type);
    // Of at most 32 bits each.
    const auto wide = [&] { return with_sign ? u64(sa * sb) : ua * ub; };
    const bool divides = in.op == Op::Div || in.op == Op::Rem;
    if (divides && ub == 0) throw std::runtime_error("a division by zero");
    if (bits > 32 && (in.op == Op::MulWide || in.op == Op::MadWide || in.op == Op::MulHi))
        throw std::runtime_error("not known here: " + in.text);
    switch (in.op) {
        case Op::Add: return cut(a + b, type);
        case Op::Sub: return cut(a - b, type);
        case Op::Mul: return cut(a * b, type);
        case Op::Mad: return cut(a * b + c, type);
        case Op::MulWide: return bits == 16 ? u32(wide()) : wide();
        case Op::MadWide: return bits == 16 ? u32(wide() + c) : wide() + c;
        case Op::MulHi: return cut(with_sign ? u64(i64(wide()) >> bits) : wide() >> bits, type);
        case Op::Min: return with_sign ? (sa < sb ? ua : ub) : std::min(ua, ub);
        case Op::Max: return with_sign ? (sa > sb ? ua : ub) : std::max(ua, ub);
        case Op::Neg: return cut(-a, type);
        case Op::Abs: return cut(u64(std::abs(sa)), type);
        case Op::Div: return with_sign ? cut(u64(sa / sb), type) : ua / ub;
        case Op::Rem: return with_sign ? cut(u64(sa % sb), type) : ua % ub;
        case Op::And: return cut(a & b, type);
        case Op::Or: return cut(a | b, type);
        case Op::Xor: return cut(a ^ b, type);
        case Op::Not: return cut(~a, type);
        // Shifts by more than the width are defined: nothing remains, or the sign.
        case Op::Shl: return u32(b) >= bits ? 0 : cut(a << u32(b), type);
        case Op::Shr:
            if (with_sign) return cut(u64(sa >> std::min<u64>(u32(b), bits - 1)), type);
            return u32(b) >= bits ? 0 : ua >> u32(b);
        case Op::Bfe: return extract_bits(a, b, c, type);
        case Op::Popc: return u64(__builtin_popcountll(ua));
        default: throw std::runtime_error("not known for integers: " + in.text);
    }
}

bool compare(const Instruction& in, u64 a, u64 b) {
    const Type type = in.type;
    if (is_float(type)) {
        const float x = number_of(a, type), y = number_of(b, type);
        const Variant variant = without_nan(in.variant);
        if (std::isnan(x) || std::isnan(y)) return variant != in.variant;
        return ordered(variant, x, y);
    }
    if (is_signed(type)) return ordered(in.variant, signed_of(a, type), signed_of(b, type));
    return ordered(in.variant, cut(a, type), cut(b, type));
}

u64 convert(const Instruction& in, u64 a, u64 b) {
    const Type from = in.type, to = in.result;
    // Of two values the first goes to the upper half.
    if (from == Type::F32 && to == Type::BF16x2) return u32(to_bf16(f32_of(a))) << 16 | to_bf16(f32_of(b));
    if (from == Type::F32 && to == Type::F16x2) return u32(to_f16(f32_of(a))) << 16 | to_f16(f32_of(b));
    if (from == Type::F32 && to == Type::E4M3x2) return u32(to_e4m3(f32_of(a))) << 8 | to_e4m3(f32_of(b));
    if (from == Type::E4M3x2 && to == Type::F16x2)
        return to_f16(e4m3_of(u8(a))) | u32(to_f16(e4m3_of(u8(a >> 8)))) << 16;
    if (is_float(from) && is_float(to)) return bits_as(number_of(a, from), to);
    if (is_float(from) || from == Type::E4M3x2) throw std::runtime_error("not known: " + in.text);
    if (to == Type::F32) return bits_of(is_signed(from) ? float(signed_of(a, from)) : float(cut(a, from)));
    return cut(is_signed(from) ? u64(signed_of(a, from)) : cut(a, from), to);
}

u32 permute(u32 a, u32 b, u32 selector) {
    const u64 both = u64(b) << 32 | a;
    u32 result = 0;
    for (int i = 0; i < 4; i++) {
        const u32 choice = selector >> 4 * i;
        u8 byte = u8(both >> 8 * (choice & 7));
        if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= u32(byte) << 8 * i;
    }
    return result;
}

}  // namespace ptx
