#include "memory.hpp"

#include <sstream>
#include <stdexcept>

namespace ptx {

void merge(Clock& into, const Clock& from) {
    for (size_t i = 0; i < into.size(); i++) into[i] = std::max(into[i], from[i]);
}

void History::read(size_t at, size_t bytes, const Observer& by, Races& races) {
    for (size_t i = at; i < at + bytes; i++) {
        Cell& cell = cells_[i];
        if (!by.has_seen(cell.write)) races.add(cell.write, by);
        if (by.has_seen(cell.read)) {
            cell.read = by.now();
            continue;
        }
        if (cell.others < 0) {
            cell.others = int(reads_.size());
            reads_.emplace_back();
        }
        auto& others = reads_[size_t(cell.others)];
        const auto mine = std::find_if(others.begin(), others.end(), [&](auto& x) { return x.warp == by.warp; });
        if (mine == others.end())
            others.push_back(by.now());
        else
            *mine = by.now();
    }
}

void History::write(size_t at, size_t bytes, const Observer& by, Races& races) {
    for (size_t i = at; i < at + bytes; i++) {
        Cell& cell = cells_[i];
        for (const auto& access : {cell.write, cell.read})
            if (!by.has_seen(access)) races.add(access, by);
        if (cell.others >= 0) {
            for (const auto& access : reads_[size_t(cell.others)])
                if (!by.has_seen(access)) races.add(access, by);
            reads_[size_t(cell.others)].clear();
        }
        cell.write = by.now();
        cell.read = {};
    }
}

void History::write_again(size_t at, size_t bytes, const Observer& by, Races& races) {
    for (size_t i = at; i < at + bytes; i++)
        if (by.has_seen(cells_[i].write)) write(i, 1, by, races);
}

void GlobalMemory::add(u64 start, u64 bytes, bool read_only) {
    // Inputs cannot race, and may be large.
    ranges_.try_emplace(start, Range{start, bytes, read_only, History(has_history_ && !read_only ? bytes : 0)});
}

Range& GlobalMemory::find(u64 address, u64 bytes) {
    const auto holds = [&](const Range& range) {
        const u64 at = address - range.start;
        return address >= range.start && at <= range.bytes && bytes <= range.bytes - at;
    };
    if (last_ && holds(*last_)) return *last_;
    auto next = ranges_.upper_bound(address);
    if (next == ranges_.begin() || !holds(std::prev(next)->second)) {
        std::stringstream text;
        text << bytes << " bytes at an address outside the tensors";
        if (next != ranges_.begin()) {
            const Range& before = std::prev(next)->second;
            text << ", " << address - before.start << " bytes from the start of one of " << before.bytes;
        }
        throw std::runtime_error(text.str());
    }
    return *(last_ = &std::prev(next)->second);
}

}  // namespace ptx
