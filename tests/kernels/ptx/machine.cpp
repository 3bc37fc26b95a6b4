#include "machine.hpp"

#include <stdexcept>

namespace ptx {

Machine::Machine(Program program, std::vector<u64> parameters, int num_blocks, u32 shared_bytes, u32 seed,
                 bool checks_races)
    : global(checks_races),
      program_(std::move(program)),
      parameters_(std::move(parameters)),
      shared_bytes_(shared_bytes),
      checks_races_(checks_races),
      warps_per_block_(program_.num_threads / kLanes),
      random_(seed) {
    if (program_.num_threads < kLanes || program_.num_threads % kLanes)
        throw std::runtime_error("not known here: programs of " + std::to_string(program_.num_threads) + " threads");
    if (size_t(program_.num_parameters) != parameters_.size())
        throw std::runtime_error("the kernel takes " + std::to_string(program_.num_parameters) + " parameters, not " +
                                 std::to_string(parameters_.size()));
    // Uninitialised memory and registers hold NaN in every format, or large numbers.
    const Block empty{std::vector<u8>(shared_bytes, 0xff), History(checks_races ? shared_bytes : 0),
                      std::vector<u16>(shared_bytes)};
    blocks_.resize(size_t(num_blocks), empty);
    warps_.resize(blocks_.size() * size_t(warps_per_block_));
    for (size_t i = 0; i < warps_.size(); i++) {
        Warp& warp = warps_[i];
        warp.id = i32(i);
        warp.block = warp.id / warps_per_block_;
        warp.index = warp.id % warps_per_block_;
        warp.registers.resize(size_t(program_.num_registers));
        for (auto& lanes : warp.registers) lanes.fill(~u64(0));
        warp.clock.resize(warps_.size());
        warp.clock[i] = 1;
    }
}

u64 Machine::run(u64 limit) {
    std::vector<Warp*> running;
    for (auto& warp : warps_) running.push_back(&warp);
    u64 executed = 0;
    while (!running.empty()) {
        std::vector<size_t> able;
        for (size_t i = 0; i < running.size(); i++)
            if (running[i]->ready()) able.push_back(i);
        if (able.empty()) {
            const Warp& warp = *running[0];
            const int lane = __builtin_ctz(warp.live);
            throw std::runtime_error("every warp waits: " + describe(i32(warp.next[size_t(lane)]), warp.id));
        }
        const size_t chosen = able[random_() % able.size()];
        Warp& warp = *running[chosen];
        // Turns of very different lengths, so that warps overtake each other by little and by far.
        const u32 turn = 1u << random_() % 10;
        for (u32 i = 0; i < turn && warp.ready(); i++, executed++) step(warp);
        if (!warp.live) running.erase(running.begin() + i64(chosen));
        if (executed > limit) throw std::runtime_error("no end in sight: " + describe(current_, warp.id));
    }
    return executed;
}

std::pair<u32, u32> Machine::choose_lanes(const Warp& warp) const {
    // Who is furthest behind goes first, so lanes that took different branches meet again.
    u32 behind = ~0u, lanes = 0;
    for (int lane = 0; lane < kLanes; lane++)
        if (warp.ready() >> lane & 1) behind = std::min(behind, warp.next[size_t(lane)]);
    for (int lane = 0; lane < kLanes; lane++)
        if ((warp.ready() >> lane & 1) && warp.next[size_t(lane)] == behind) lanes |= 1u << lane;
    return {lanes, behind};
}

void Machine::step(Warp& warp) {
    auto [lanes, at] = choose_lanes(warp);
    const Instruction& in = program_.code[at];
    current_ = i32(at);
    if (is_collective(in.op)) {
        // All lanes take part: wait for those that are elsewhere.
        for (int lane = 0; lane < kLanes; lane++)
            if ((warp.at_collective >> lane & 1) && warp.next[size_t(lane)] == at) lanes |= 1u << lane;
        warp.at_collective = lanes == kAllLanes ? 0 : warp.at_collective | lanes;
        if (lanes != kAllLanes) return;
    }
    u32 active = lanes;
    if (in.predicate >= 0)
        for (int lane = 0; lane < kLanes; lane++)
            if ((warp.registers[size_t(in.predicate)][size_t(lane)] & 1) == in.negated) active &= ~(1u << lane);
    for (int lane = 0; lane < kLanes; lane++)
        if (lanes >> lane & 1)
            warp.next[size_t(lane)] = in.op == Op::Branch && (active >> lane & 1) ? u32(in.target) : at + 1;
    try {
        execute(warp, in, active);
    } catch (const std::runtime_error& error) {
        throw std::runtime_error(std::string(error.what()) + ": " + describe(i32(at), warp.id));
    }
}

void Machine::barrier(Warp& warp, u32 lanes) {
    Block& block = blocks_[size_t(warp.block)];
    warp.at_barrier |= lanes;
    block.arrived += __builtin_popcount(lanes);
    if (block.arrived < program_.num_threads) return;
    block.arrived = 0;
    Warp* const first = &warps_[size_t(warp.block * warps_per_block_)];
    for (int i = 0; i < warps_per_block_; i++) first[i].at_barrier = 0;
    if (!checks_races_) return;
    Clock all = first->clock;
    for (int i = 1; i < warps_per_block_; i++) merge(all, first[i].clock);
    for (int i = 0; i < warps_per_block_; i++) {
        first[i].clock = all;
        first[i].clock[size_t(first[i].id)]++;
    }
}

void Machine::check(History& history, u64 at, u64 bytes, const Warp& warp, Use use) {
    if (!checks_races_) return;
    if (use == Use::Read) history.read(at, bytes, observer(warp), races_);
    if (use == Use::Write) history.write(at, bytes, observer(warp), races_);
    if (use == Use::WriteAgain) history.write_again(at, bytes, observer(warp), races_);
}

u8* Machine::in_global(Warp& warp, u64 address, u64 bytes, Use use, bool atomic) {
    if (address % bytes) throw std::runtime_error("an address that is no multiple of " + std::to_string(bytes));
    Range& range = global.find(address, bytes);
    if (range.read_only) {
        if (use != Use::Read) throw std::runtime_error("a write to an input");
        return reinterpret_cast<u8*>(address);
    }
    // Atomics do not race with each other; with plain writes they do, as reads would.
    check(range.history, address - range.start, bytes, warp, atomic ? Use::Read : use);
    return reinterpret_cast<u8*>(address);
}

u8* Machine::in_shared(Warp& warp, u64 address, u64 bytes, Use use) {
    Block& block = blocks_[size_t(warp.block)];
    const u64 at = u32(address) - kSharedBase;
    if (address % bytes) throw std::runtime_error("a shared address that is no multiple of " + std::to_string(bytes));
    if (at + bytes > shared_bytes_) throw std::runtime_error("an address outside the program's shared memory");
    if (use != Use::Read)
        for (u64 i = at; i < at + bytes; i++)
            if (block.read_by_products[i]) throw std::runtime_error("a write to what a product under way reads");
    check(block.history, at, bytes, warp, use);
    return &block.shared[at];
}

// Lanes of a butterfly sum differ in the last bit, and all of them store. Small integers, read as floats, are not
// normal.
static bool nearly_equal(const u8* a, const u8* b, u64 bytes, u64 element) {
    if (std::memcmp(a, b, bytes) == 0) return true;
    if (element != 4) return false;
    for (u64 i = 0; i < bytes; i += 4) {
        float x, y;
        std::memcpy(&x, a + i, 4);
        std::memcpy(&y, b + i, 4);
        const bool near = std::isnormal(x) && std::isnormal(y) && std::fabs(x - y) <= 1e-5f * std::fabs(y);
        if (!near && std::memcmp(a + i, b + i, 4)) return false;
    }
    return true;
}

void Machine::write(Warp& warp, bool shared, u64 address, const u8* from, u64 bytes, u64 element) {
    const u8* present = nullptr;
    if (shared && u32(address) - kSharedBase + bytes <= shared_bytes_)
        present = &blocks_[size_t(warp.block)].shared[u32(address) - kSharedBase];
    else if (!shared)
        present = (global.find(address, bytes), reinterpret_cast<const u8*>(address));
    const Use use = present && nearly_equal(present, from, bytes, element) ? Use::WriteAgain : Use::Write;
    std::memcpy(shared ? in_shared(warp, address, bytes, use) : in_global(warp, address, bytes, use), from, bytes);
}

std::string Machine::describe(i32 instruction, i32 warp) const {
    const Instruction& in = program_.code[size_t(instruction)];
    return in.text + " at " + in.place + ", program " + std::to_string(warp / warps_per_block_) + ", warp " +
           std::to_string(warp % warps_per_block_);
}

std::vector<std::string> Machine::races() const {
    std::vector<std::string> texts;
    for (const auto& [instructions, warps] : races_.found)
        texts.push_back("race between " + describe(instructions.first, warps.first) + " and " +
                        describe(instructions.second, warps.second));
    return texts;
}

}  // namespace ptx
