// What one thread computes from values.
#pragma once

#include "program.hpp"

namespace ptx {

// The low bits of `value` that a register of `type` holds.
u64 cut(u64 value, Type type);
i64 signed_of(u64 value, Type type);

u64 compute(const Instruction& in, u64 a, u64 b, u64 c);
bool compare(const Instruction& in, u64 a, u64 b);
u64 convert(const Instruction& in, u64 a, u64 b);
u32 permute(u32 a, u32 b, u32 selector);

}  // namespace ptx
