// Instructions on matrices: PTX ISA, "Warp Level Matrix Instructions" and "Asynchronous Warpgroup Level Matrix
// Instructions", whose figures say which lane holds which element.
#include <stdexcept>

#include "machine.hpp"

namespace ptx {

namespace {

// In ldmatrix and stmatrix a lane holds two neighbours of 16 bits of an 8 x 8 matrix, in columns 2 * (lane % 4) of row
// lane / 4, or of its transpose.
using Tile = std::array<std::array<u8, 16>, 8>;

u8* element_of(Tile& tile, int lane, int which, bool transposed) {
    const size_t row = size_t(lane / 4), column = size_t(2 * (lane % 4) + which);
    return transposed ? &tile[column][2 * row] : &tile[row][2 * column];
}

float element_at(const u8* place, Type type) {
    if (type == Type::E4M3) return e4m3_of(*place);
    u16 bits;
    std::memcpy(&bits, place, 2);
    return type == Type::BF16 ? bf16_of(bits) : f16_of(bits);
}

// Rows of 32 bytes, as numbers.
struct Factor {
    explicit Factor(int rows, int columns) : columns(columns), values(size_t(rows * columns)) {}
    float& at(int row, int column) { return values[size_t(row * columns + column)]; }
    int columns;
    std::vector<float> values;
};

// A lane's register of a factor holds 4 bytes of one row; registers of the left factor: (row, lower half of the
// columns), (row + 8, lower half), (row, upper half), (row + 8, upper half); of the right: lower, upper half.
void unpack(Factor& factor, int row, int half, int lane, u32 bits, Type type) {
    const int size = bytes_of(type), per_register = 4 / size;
    u8 bytes[4];
    std::memcpy(bytes, &bits, 4);
    for (int i = 0; i < per_register; i++)
        factor.at(row, half * factor.columns / 2 + lane % 4 * per_register + i) = element_at(bytes + i * size, type);
}

float dot(Factor& left, int row, Factor& right, int column) {
    double sum = 0;
    for (int i = 0; i < left.columns; i++) sum += double(left.at(row, i)) * right.at(column, i);
    return float(sum);
}

// Row and column of a lane's i-th accumulator.
int result_row(int lane, int i) { return lane / 4 + 8 * (i / 2 % 2); }
int result_column(int lane, int i) { return 8 * (i / 4) + 2 * (lane % 4) + i % 2; }

// A shared-memory descriptor of wgmma: PTX ISA, "Matrix Descriptor Format"; layouts as in CUTLASS' mma_sm90_desc.hpp.
struct Descriptor {
    explicit Descriptor(u64 bits)
        : start(u32(bits & 0x3fff) << 4),
          leading(u32(bits >> 16 & 0x3fff) << 4),
          stride(u32(bits >> 32 & 0x3fff) << 4),
          mode(int(bits >> 62)) {
        if (bits >> 49 & 7) throw std::runtime_error("not known: a base offset in a descriptor");
    }
    // Rows of the factor lie along memory: the byte-th of a row's 32 bytes.
    u32 along(int row, int byte) const {
        const u32 r = u32(row), b = u32(byte);
        if (mode == 0) return start + r / 8 * stride + r % 8 * 16 + b / 16 * leading + b % 16;
        return swizzled(start + r / 8 * stride + r % 8 * span() + b);
    }
    // Columns lie along memory (16-bit elements only).
    u32 across(int row, int column) const {
        const u32 r = u32(row), c = u32(column);
        if (mode == 0) return start + r / 8 * stride + r % 8 * 2 + c % 8 * 16 + c / 8 * leading;
        const u32 per_span = span() / 2;
        return swizzled(start + r / per_span * leading + r % per_span * 2 + c % 8 * span() + c / 8 * stride);
    }

private:
    u32 span() const { return 256u >> mode; }  // swizzle of 128, 64 or 32 bytes
    // XORs the number of the 16-byte piece with that of the 128-byte row.
    u32 swizzled(u32 address) const { return address ^ (address >> 7 & (span() / 16 - 1)) << 4; }
    u32 start, leading, stride;
    int mode;
};

bool right_is_across(const Instruction& in) { return in.type != Type::E4M3 && in.args.back().value == 1; }

}  // namespace

void Machine::load_matrix(Warp& warp, const Instruction& in) {
    std::vector<std::array<u32, kLanes>> loaded(size_t(in.width));
    for (int matrix = 0; matrix < in.width; matrix++) {
        Tile tile;
        for (int row = 0; row < 8; row++) {
            const u64 from = address(warp, in.args[1], 8 * matrix + row);
            std::memcpy(tile[size_t(row)].data(), in_shared(warp, from, 16, Use::Read), 16);
        }
        for (int lane = 0; lane < kLanes; lane++) {
            u16 pair[2];
            for (int i = 0; i < 2; i++) std::memcpy(&pair[i], element_of(tile, lane, i, in.transposed), 2);
            std::memcpy(&loaded[size_t(matrix)][size_t(lane)], pair, 4);
        }
    }
    for (size_t matrix = 0; matrix < loaded.size(); matrix++)
        for (int lane = 0; lane < kLanes; lane++)
            set(warp, in.args[0].parts[matrix], lane, loaded[matrix][size_t(lane)]);
}

void Machine::store_matrix(Warp& warp, const Instruction& in) {
    for (int matrix = 0; matrix < in.width; matrix++) {
        Tile tile;
        for (int lane = 0; lane < kLanes; lane++) {
            const u32 bits = u32(value(warp, in.args[1].parts[size_t(matrix)], lane));
            for (int i = 0; i < 2; i++) {
                const u16 half = u16(bits >> 16 * i);
                std::memcpy(element_of(tile, lane, i, in.transposed), &half, 2);
            }
        }
        for (int row = 0; row < 8; row++)
            write(warp, true, address(warp, in.args[0], 8 * matrix + row), tile[size_t(row)].data(), 16, 2);
    }
}

void Machine::product(Warp& warp, const Instruction& in) {
    Factor left(16, in.k), right(8, in.k);
    for (int lane = 0; lane < kLanes; lane++) {
        for (int i = 0; i < 4; i++)
            unpack(left, lane / 4 + 8 * (i % 2), i / 2, lane, u32(value(warp, in.args[1].parts[size_t(i)], lane)),
                   in.type);
        for (int i = 0; i < 2; i++)
            unpack(right, lane / 4, i, lane, u32(value(warp, in.args[2].parts[size_t(i)], lane)), in.type);
    }
    for (int lane = 0; lane < kLanes; lane++)
        for (int i = 0; i < 4; i++) {
            const float sum = f32_of(value(warp, in.args[3].parts[size_t(i)], lane));
            const float more = dot(left, result_row(lane, i), right, result_column(lane, i));
            set(warp, in.args[0].parts[size_t(i)], lane, bits_of(sum + more));
        }
}

// Calls visit(address) for every 16 bytes of shared memory that this warp's part of a product reads.
template <class Visit>
void Machine::for_inputs(const Warp& warp, const PendingProduct& product, Visit visit) const {
    const Instruction& in = program_.code[size_t(product.instruction)];
    const Descriptor left(product.left), right(product.right);
    if (product.left_values.empty())
        for (int row = 0; row < 16; row++)
            for (int byte = 0; byte < 32; byte += 16) visit(left.along(warp.index % 4 * 16 + row, byte));
    if (right_is_across(in))
        for (int column = 0; column < in.k; column++)
            for (int row = 0; row < in.n; row += 8) visit(right.across(row, column));
    else
        for (int row = 0; row < in.n; row++)
            for (int byte = 0; byte < 32; byte += 16) visit(right.along(row, byte));
}

void Machine::begin_product(Warp& warp, const Instruction& in) {
    // sum, left, right, whether to add, signs, and for 16 bits whether factors are transposed
    const auto& args = in.args;
    for (size_t i = 4; i < args.size(); i++)
        if (args[i].value != (i < 6) && (i < 6 || i + 1 != args.size()))
            throw std::runtime_error("not known: this form");
    PendingProduct product{current_, 0, value(warp, args[2], 0), {}, bool(value(warp, args[3], 0) & 1)};
    if (args[1].kind == Operand::Kind::Vector) {
        for (const auto& part : args[1].parts)
            for (int lane = 0; lane < kLanes; lane++) {
                if (lane == 0) product.left_values.emplace_back();
                product.left_values.back()[size_t(lane)] = u32(value(warp, part, lane));
            }
    } else {
        product.left = value(warp, args[1], 0);
    }
    Block& block = blocks_[size_t(warp.block)];
    for_inputs(warp, product, [&](u32 at) {
        in_shared(warp, at, 16, Use::Read);
        for (u32 i = 0; i < 16; i++) block.read_by_products[at - kSharedBase + i]++;
    });
    warp.open_products.push_back(std::move(product));
}

void Machine::finish_product(Warp& warp, const PendingProduct& product) {
    current_ = product.instruction;
    const Instruction& in = program_.code[size_t(current_)];
    Block& block = blocks_[size_t(warp.block)];
    for_inputs(warp, product, [&](u32 at) {
        in_shared(warp, at, 16, Use::Read);
        for (u32 i = 0; i < 16; i++) block.read_by_products[at - kSharedBase + i]--;
    });
    const int size = bytes_of(in.type);
    const Descriptor from_left(product.left), from_right(product.right);
    const auto read = [&](u32 at) { return element_at(&block.shared[at - kSharedBase], in.type); };
    Factor left(16, in.k), right(in.n, in.k);
    for (int i = 0; i < in.k; i++) {
        for (int row = 0; row < in.n; row++)
            right.at(row, i) = read(right_is_across(in) ? from_right.across(row, i) : from_right.along(row, i * size));
        if (product.left_values.empty())
            for (int row = 0; row < 16; row++)
                left.at(row, i) = read(from_left.along(warp.index % 4 * 16 + row, i * size));
    }
    for (size_t i = 0; i < product.left_values.size(); i++)
        for (int lane = 0; lane < kLanes; lane++)
            unpack(left, lane / 4 + 8 * int(i % 2), int(i / 2), lane, product.left_values[i][size_t(lane)], in.type);
    const auto& sums = in.args[0].parts;
    for (int lane = 0; lane < kLanes; lane++)
        for (size_t i = 0; i < sums.size(); i++) {
            const float sum = product.adds ? f32_of(value(warp, sums[i], lane)) : 0.0f;
            const float more = dot(left, result_row(lane, int(i)), right, result_column(lane, int(i)));
            set(warp, sums[i], lane, bits_of(sum + more));
        }
}

}  // namespace ptx
