// PTX as Triton writes it, parsed into instructions.
#pragma once

#include <string>
#include <vector>

#include "numbers.hpp"

namespace ptx {

// clang-format off
enum class Op {
    Add, Sub, Mul, MulHi, MulWide, Mad, MadWide, Fma, Min, Max, Neg, Abs, Div, Rem, And, Or, Xor, Not, Shl, Shr,
    Bfe, Popc, Ex2, Rsqrt, Select, Compare, Move, Convert, Permute, LoadParameter, Load, Store, Atomic, Reduction,
    Barrier, Branch, Return, Shuffle, WarpReduction, CopyAsync, CopyCommit, CopyWait, LoadMatrix, StoreMatrix,
    Product, AsyncProduct, ProductCommit, ProductWait,
    // Without effect here: bar.warp.sync, and fences between the generic and the asynchronous proxy.
    Nothing,
};
// clang-format on

// clang-format off
enum class Type {
    None, S8, S16, S32, S64, U8, U16, U32, U64, B8, B16, B32, B64, F16, BF16, F32, Pred, F16x2, BF16x2, E4M3,
    E4M3x2, S16x2,
};
// clang-format on

int bytes_of(Type type);
bool is_signed(Type type);
bool is_float(Type type);
// Whether all lanes of a warp execute an instruction together.
bool is_collective(Op op);

// What follows the name of an instruction, where it needs telling apart.
// clang-format off
enum class Variant {
    None, Eq, Ne, Lt, Le, Gt, Ge, Equ, Neu, Ltu, Leu, Gtu, Geu, Add, Or, Max, Butterfly, Index, Up,
};
// clang-format on

enum class Special { ThreadX, BlockX };

// Where the program's shared memory begins: CUDA keeps the first KB for itself.
constexpr u32 kSharedBase = 1024;

struct Operand {
    enum class Kind { Register, Immediate, Vector, Address, Special, Sink };
    Kind kind = Kind::Immediate;
    int reg = -1;   // Register; Address: the base, -1 for none
    u64 value = 0;  // Immediate; Address: the offset or the number of a parameter
    Special special = Special::ThreadX;
    std::vector<Operand> parts;  // Vector
};

struct Instruction {
    Op op = Op::Nothing;
    Type type = Type::None;    // of the operands
    Type result = Type::None;  // where it differs
    Variant variant = Variant::None;
    int predicate = -1;  // register, -1 for none
    bool negated = false;
    bool shared = false;  // memory space; else global
    bool acquire = false, release = false, atomic = false;
    bool transposed = false;
    int width = 1;            // values of a vector access, matrices of ldmatrix
    int m = 0, n = 0, k = 0;  // of a product
    int target = -1;          // of a branch
    std::vector<Operand> args;
    std::string text, place;  // the name with its suffixes; the line of source code
};

struct Program {
    std::vector<Instruction> code;
    int num_registers = 0;
    int num_parameters = 0;
    int num_threads = 0;
};

// Throws std::runtime_error for what is not known here.
Program parse(const std::string& text);

}  // namespace ptx
