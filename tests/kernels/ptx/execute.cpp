// What each instruction does, but for those on matrices.
#include <stdexcept>

#include "machine.hpp"
#include "scalar.hpp"

namespace ptx {

u64 Machine::value(const Warp& warp, const Operand& operand, int lane) const {
    switch (operand.kind) {
        case Operand::Kind::Register: return warp.registers[size_t(operand.reg)][size_t(lane)];
        case Operand::Kind::Immediate: return operand.value;
        case Operand::Kind::Special:
            return u64(operand.special == Special::ThreadX ? warp.index * kLanes + lane : warp.block);
        default: throw std::runtime_error("not known: this operand");
    }
}

u64 Machine::address(const Warp& warp, const Operand& operand, int lane) const {
    const u64 base = operand.reg < 0 ? 0 : warp.registers[size_t(operand.reg)][size_t(lane)];
    return base + operand.value;
}

void Machine::set(Warp& warp, const Operand& operand, int lane, u64 bits) {
    if (operand.kind != Operand::Kind::Sink) warp.registers[size_t(operand.reg)][size_t(lane)] = bits;
}

// The values of an operand of one or several.
static const Operand& part(const Operand& operand, int index) {
    return operand.kind == Operand::Kind::Vector ? operand.parts[size_t(index)] : operand;
}

void Machine::scalar(Warp& warp, const Instruction& in, int lane) {
    const auto& args = in.args;
    const auto argument = [&](size_t i) { return i < args.size() ? value(warp, args[i], lane) : 0; };
    u64 result;
    switch (in.op) {
        case Op::Select: result = cut(argument(argument(3) & 1 ? 1 : 2), in.type); break;
        case Op::Compare: result = compare(in, argument(1), argument(2)); break;
        case Op::Convert: result = convert(in, argument(1), argument(2)); break;
        case Op::Permute: result = permute(u32(argument(1)), u32(argument(2)), u32(argument(3))); break;
        case Op::LoadParameter: result = cut(parameters_.at(args[1].value), in.type); break;
        default: result = compute(in, argument(1), argument(2), argument(3));
    }
    set(warp, args[0], lane, result);
}

// mov, which also packs several registers into one and unpacks them.
void Machine::move(Warp& warp, const Instruction& in, int lane) {
    const Operand &to = in.args[0], &from = in.args[1];
    const size_t parts = std::max(to.parts.size(), from.parts.size());
    if (parts == 0) return set(warp, to, lane, cut(value(warp, from, lane), in.type));
    const int bits = 8 * bytes_of(in.type) / int(parts);
    const u64 mask = (u64(1) << bits) - 1;
    u64 packed = 0;
    for (size_t i = 0; i < parts; i++) {
        const int shift = bits * int(i);
        if (from.kind == Operand::Kind::Vector)
            packed |= (value(warp, from.parts[i], lane) & mask) << shift;
        else
            set(warp, to.parts[i], lane, value(warp, from, lane) >> shift & mask);
    }
    if (from.kind == Operand::Kind::Vector) set(warp, to, lane, packed);
}

void Machine::load(Warp& warp, const Instruction& in, int lane) {
    const u64 from = address(warp, in.args[1], lane), bytes = u64(bytes_of(in.type));
    if (in.acquire)
        if (auto released = released_.find(from); released != released_.end()) merge(warp.clock, released->second);
    const u64 all = bytes * u64(in.width);
    const u8* place =
        in.shared ? in_shared(warp, from, all, Use::Read) : in_global(warp, from, all, Use::Read, in.atomic);
    for (int i = 0; i < in.width; i++) {
        u64 bits = 0;
        std::memcpy(&bits, place + u64(i) * bytes, bytes);
        // Into a wider register, a signed value is extended.
        set(warp, part(in.args[0], i), lane, is_signed(in.type) ? u64(signed_of(bits, in.type)) : bits);
    }
}

void Machine::store(Warp& warp, const Instruction& in, int lane) {
    const u64 bytes = u64(bytes_of(in.type));
    u8 values[16];
    for (int i = 0; i < in.width; i++) {
        const u64 bits = value(warp, part(in.args[1], i), lane);
        std::memcpy(values + u64(i) * bytes, &bits, bytes);
    }
    write(warp, in.shared, address(warp, in.args[0], lane), values, bytes * u64(in.width), bytes);
}

void Machine::atomic(Warp& warp, const Instruction& in, int lane) {
    const size_t first = in.op == Op::Atomic;
    const u64 at = address(warp, in.args[first], lane), bytes = u64(bytes_of(in.type));
    u8* const place = in_global(warp, at, bytes, Use::Write, true);
    u64 old = 0;
    std::memcpy(&old, place, bytes);
    const u64 operand = value(warp, in.args[first + 1], lane);
    u64 result;
    if (in.variant == Variant::Add)
        result = old + operand;
    else if (in.variant == Variant::Or)
        result = old | operand;
    else
        throw std::runtime_error("not known: this atomic");
    std::memcpy(place, &result, bytes);
    if (first) set(warp, in.args[0], lane, old);
    if (!checks_races_) return;
    Clock& released = released_.try_emplace(at, warps_.size()).first->second;
    if (in.acquire) merge(warp.clock, released);
    if (in.release) {
        merge(released, warp.clock);
        warp.clock[size_t(warp.id)]++;
    }
}

void Machine::shuffle(Warp& warp, const Instruction& in) {
    std::array<u64, kLanes> values, results;
    for (int lane = 0; lane < kLanes; lane++) values[size_t(lane)] = value(warp, in.args[1], lane);
    for (int lane = 0; lane < kLanes; lane++) {
        // PTX, shfl.sync: c holds a clamp and, from bit 8, a mask that cuts the warp into segments.
        const int by = int(value(warp, in.args[2], lane) & 31);
        const int clamp = int(value(warp, in.args[3], lane) & 31),
                  segment = int(value(warp, in.args[3], lane) >> 8 & 31);
        if (u32(value(warp, in.args[4], lane)) != kAllLanes) throw std::runtime_error("not known: some lanes only");
        const int last = (lane & segment) | (clamp & ~segment);
        int from;
        bool inside;
        if (in.variant == Variant::Up) {
            from = lane - by;
            inside = from >= last;
        } else {
            from = in.variant == Variant::Butterfly ? lane ^ by : (lane & segment) | (by & ~segment);
            inside = from <= last;
        }
        results[size_t(lane)] = values[size_t(inside ? from : lane)];
    }
    for (int lane = 0; lane < kLanes; lane++) set(warp, in.args[0], lane, u32(results[size_t(lane)]));
}

void Machine::reduce(Warp& warp, const Instruction& in) {
    Instruction combine = in;
    combine.op = in.variant == Variant::Add ? Op::Add : Op::Max;
    u64 result = value(warp, in.args[1], 0);
    for (int lane = 1; lane < kLanes; lane++) result = compute(combine, result, value(warp, in.args[1], lane), 0);
    for (int lane = 0; lane < kLanes; lane++) set(warp, in.args[0], lane, result);
}

void Machine::copy_async(Warp& warp, const Instruction& in, int lane) {
    PendingCopy copy{current_, u32(address(warp, in.args[0], lane)), address(warp, in.args[1], lane),
                     u32(in.args[2].value), 0};
    copy.copied = in.args.size() > 3 ? u32(value(warp, in.args[3], lane)) : copy.bytes;
    if (copy.copied != 0 && copy.copied != copy.bytes) throw std::runtime_error("not known: a part of a copy");
    // Both places are in use from now until the wait.
    if (copy.copied) in_global(warp, copy.from, copy.bytes, Use::Read);
    in_shared(warp, copy.to, copy.bytes, Use::Write);
    warp.open_copies.push_back(copy);
}

void Machine::finish_copy(Warp& warp, const PendingCopy& copy) {
    current_ = copy.instruction;
    u8* const to = in_shared(warp, copy.to, copy.bytes, Use::Write);
    if (copy.copied)
        std::memcpy(to, in_global(warp, copy.from, copy.bytes, Use::Read), copy.bytes);
    else
        std::memset(to, 0, copy.bytes);
}

template <class Pending, class Finish>
static void finish_groups(std::vector<std::vector<Pending>>& groups, u64 left, Finish finish) {
    while (groups.size() > left) {
        for (const auto& pending : groups.front()) finish(pending);
        groups.erase(groups.begin());
    }
}

template <class Pending>
static void commit(std::vector<std::vector<Pending>>& groups, std::vector<Pending>& open) {
    groups.push_back(std::move(open));
    open.clear();
}

void Machine::execute(Warp& warp, const Instruction& in, u32 lanes) {
    const auto each = [&](void (Machine::*what)(Warp&, const Instruction&, int)) {
        for (int lane = 0; lane < kLanes; lane++)
            if (lanes >> lane & 1) (this->*what)(warp, in, lane);
    };
    switch (in.op) {
        case Op::Move: return each(&Machine::move);
        case Op::Load: return each(&Machine::load);
        case Op::Store: return each(&Machine::store);
        case Op::Atomic:
        case Op::Reduction: return each(&Machine::atomic);
        case Op::Barrier: return barrier(warp, lanes);
        case Op::Return: warp.live &= ~lanes; return;
        case Op::Branch:
        case Op::Nothing: return;
        case Op::Shuffle: return shuffle(warp, in);
        case Op::WarpReduction: return reduce(warp, in);
        case Op::CopyAsync: return each(&Machine::copy_async);
        case Op::CopyCommit: return commit(warp.copies, warp.open_copies);
        case Op::CopyWait:
            return finish_groups(warp.copies, in.args[0].value, [&](auto& copy) { finish_copy(warp, copy); });
        case Op::LoadMatrix: return load_matrix(warp, in);
        case Op::StoreMatrix: return store_matrix(warp, in);
        case Op::Product: return product(warp, in);
        case Op::AsyncProduct: return begin_product(warp, in);
        case Op::ProductCommit: return commit(warp.products, warp.open_products);
        case Op::ProductWait:
            return finish_groups(warp.products, in.args[0].value,
                                 [&](auto& product) { finish_product(warp, product); });
        default: return each(&Machine::scalar);
    }
}

}  // namespace ptx
