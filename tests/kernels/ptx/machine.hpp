// A grid of programs on one CPU thread: warps take turns at random, all programs resident at once.
//
// Asynchronous work happens as late as it may: a copy (cp.async) or a product (wgmma) when it is waited for, so that
// whoever reads its result too early gets what was there before, and whoever overwrites its inputs too early is caught.
#pragma once

#include <array>
#include <random>

#include "memory.hpp"

namespace ptx {

constexpr int kLanes = 32;
constexpr u32 kAllLanes = ~0u;

// A cp.async that has not been waited for; zeros where `copied` is 0.
struct PendingCopy {
    i32 instruction;
    u32 to;
    u64 from;
    u32 bytes, copied;
};

// A wgmma that has not been waited for: this warp's 16 of the 64 rows.
struct PendingProduct {
    i32 instruction;
    u64 left, right;                                   // descriptors
    std::vector<std::array<u32, kLanes>> left_values;  // where the left factor comes from registers
    bool adds;
};

struct Warp {
    int block, index;  // which program, and which warp of it
    i32 id;            // of all warps
    std::vector<std::array<u64, kLanes>> registers;
    std::array<u32, kLanes> next{};                           // instruction of each lane
    u32 live = kAllLanes, at_barrier = 0, at_collective = 0;  // lanes
    Clock clock;
    std::vector<PendingCopy> open_copies;
    std::vector<PendingProduct> open_products;
    std::vector<std::vector<PendingCopy>> copies;  // committed groups, the oldest first
    std::vector<std::vector<PendingProduct>> products;

    u32 ready() const { return live & ~at_barrier & ~at_collective; }
};

// What the warps of one program share.
struct Block {
    std::vector<u8> shared;
    History history;
    std::vector<u16> read_by_products;  // of each byte: how many products under way read it
    int arrived = 0;                    // threads at the barrier
};

class Machine {
public:
    Machine(Program program, std::vector<u64> parameters, int num_blocks, u32 shared_bytes, u32 seed,
            bool checks_races);
    GlobalMemory global;
    // Runs to the end and returns the number of instructions of warps; throws std::runtime_error with a place in the
    // source, also when more than `limit` instructions have run.
    u64 run(u64 limit);
    std::vector<std::string> races() const;

private:
    void step(Warp& warp);
    // The lanes that execute together next, and their instruction.
    std::pair<u32, u32> choose_lanes(const Warp& warp) const;
    void execute(Warp& warp, const Instruction& in, u32 lanes);
    void scalar(Warp& warp, const Instruction& in, int lane);
    void load(Warp& warp, const Instruction& in, int lane);
    void store(Warp& warp, const Instruction& in, int lane);
    void atomic(Warp& warp, const Instruction& in, int lane);
    void move(Warp& warp, const Instruction& in, int lane);
    void barrier(Warp& warp, u32 lanes);
    void shuffle(Warp& warp, const Instruction& in);
    void reduce(Warp& warp, const Instruction& in);
    void copy_async(Warp& warp, const Instruction& in, int lane);
    void finish_copy(Warp& warp, const PendingCopy& copy);
    void load_matrix(Warp& warp, const Instruction& in);
    void store_matrix(Warp& warp, const Instruction& in);
    void product(Warp& warp, const Instruction& in);
    void begin_product(Warp& warp, const Instruction& in);
    void finish_product(Warp& warp, const PendingProduct& product);
    template <class Visit>
    void for_inputs(const Warp& warp, const PendingProduct& product, Visit visit) const;

    u64 value(const Warp& warp, const Operand& operand, int lane) const;
    u64 address(const Warp& warp, const Operand& operand, int lane) const;
    void set(Warp& warp, const Operand& operand, int lane, u64 bits);
    Observer observer(const Warp& warp) const { return {warp.id, current_, warp.clock}; }
    enum class Use { Read, Write, WriteAgain };
    void check(History& history, u64 at, u64 bytes, const Warp& warp, Use use);
    // Host addresses of memory that the warp may use; throw where it may not.
    u8* in_global(Warp& warp, u64 address, u64 bytes, Use use, bool atomic = false);
    u8* in_shared(Warp& warp, u64 address, u64 bytes, Use use);
    // `element`: bytes of each value written.
    void write(Warp& warp, bool shared, u64 address, const u8* from, u64 bytes, u64 element);
    std::string describe(i32 instruction, i32 warp) const;

    Program program_;
    std::vector<u64> parameters_;
    u32 shared_bytes_;
    bool checks_races_;
    int warps_per_block_;
    std::vector<Block> blocks_;
    std::vector<Warp> warps_;
    std::unordered_map<u64, Clock> released_;  // by the address of an atomic
    Races races_;
    std::mt19937 random_;
    i32 current_ = 0;  // instruction
};

}  // namespace ptx
