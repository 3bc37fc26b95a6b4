// Memory with a record of who used each byte last, by which unordered accesses are found.
#pragma once

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "program.hpp"

namespace ptx {

// Vector clocks: `clock[w]` counts the releases of warp w that a warp has seen.
using Clock = std::vector<u32>;

void merge(Clock& into, const Clock& from);

struct Access {
    u32 time = 0;  // of the warp's own clock
    i32 warp = -1, instruction = -1;
};

// Who accesses, and what of others it has seen.
struct Observer {
    i32 warp, instruction;
    const Clock& clock;
    bool has_seen(const Access& access) const {
        return access.warp < 0 || access.warp == warp || access.time <= clock[size_t(access.warp)];
    }
    Access now() const { return {clock[size_t(warp)], warp, instruction}; }
};

// Pairs of accesses, one of them a write, that no barrier or release and acquire puts in order.
class Races {
public:
    // By the two instructions: the warps that were first seen there.
    std::map<std::pair<i32, i32>, std::pair<i32, i32>> found;
    void add(const Access& earlier, const Observer& later) {
        found.try_emplace({earlier.instruction, later.instruction}, earlier.warp, later.warp);
    }
};

// The accesses to one piece of memory, byte by byte.
class History {
public:
    explicit History(size_t bytes) : cells_(bytes) {}
    void read(size_t at, size_t bytes, const Observer& by, Races& races);
    void write(size_t at, size_t bytes, const Observer& by, Races& races);
    // A write of values that are there already: warps may hold the same values and all store them.
    void write_again(size_t at, size_t bytes, const Observer& by, Races& races);

private:
    struct Cell {
        Access write, read;
        int others = -1;  // reads by further warps: number in `reads_`
    };
    std::vector<Cell> cells_;
    std::vector<std::vector<Access>> reads_;
};

// Part of the host's memory that a kernel may use.
struct Range {
    u64 start, bytes;
    bool read_only;
    History history;
};

class GlobalMemory {
public:
    explicit GlobalMemory(bool has_history) : has_history_(has_history) {}
    void add(u64 start, u64 bytes, bool read_only);
    // Throws std::runtime_error where the kernel has no business.
    Range& find(u64 address, u64 bytes);

private:
    bool has_history_;
    std::map<u64, Range> ranges_;
    Range* last_ = nullptr;
};

}  // namespace ptx
