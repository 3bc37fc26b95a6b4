// What Python calls.
#include <stdexcept>

#include "machine.hpp"

struct Tensor {
    u64 start, bytes, read_only;
};

// Runs a kernel; returns the number of instructions of warps, or -1. `message` gets what was wrong, a line each.
extern "C" i64 run_ptx(const char* text, const u64* parameters, int num_parameters, const Tensor* tensors,
                       int num_tensors, int num_blocks, u32 shared_bytes, u32 seed, int checks_races, u64 limit,
                       char* message, size_t size) {
    std::string said;
    i64 executed = -1;
    try {
        ptx::Machine machine(ptx::parse(text), {parameters, parameters + num_parameters}, num_blocks, shared_bytes,
                             seed, checks_races);
        for (int i = 0; i < num_tensors; i++)
            machine.global.add(tensors[i].start, tensors[i].bytes, tensors[i].read_only);
        try {
            executed = i64(machine.run(limit));
        } catch (const std::exception& error) {
            said = std::string(error.what()) + "\n";
        }
        for (const auto& race : machine.races()) said += race + "\n";
    } catch (const std::exception& error) {
        said = std::string(error.what()) + "\n";
    }
    const size_t length = std::min(said.size(), size - 1);
    std::memcpy(message, said.data(), length);
    message[length] = 0;
    return executed;
}
