// Fibers, the order in which they run, and what they wait for. Part of emulator.cpp alone.
#pragma once
#include "emulator.h"

#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <deque>
#include <link.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr size_t PAGE = 4096, STACK = 64 << 10, MAX_SHARED = 227 << 10, SHARED_PAGES = 228 << 10;
constexpr unsigned long long CANARY = 0x5AFE57AC5AFE57ACull, PATIENCE = 4000;  // looks of each thread without any change: a deadlock
constexpr int POISON = 0xff;                                                    // NaN as a float, -1 as an integer

struct Copy { void* to; const void* from; unsigned bytes; void (*arrived)(void*, unsigned); void* barrier; bool ordinary; int commits = 0; };
// A product of a warpgroup as one of its warps does its part; `last`: the commit behind the products before it.
struct Product { emulator::Part part; emulator::Multiply multiply; bool last; };
struct Warp {
    std::deque<Product> products;
    std::vector<emulator::Called> called;  // since the start, for which the warps of a group must agree
    bool begun = false;
};

struct Store { char* to; unsigned bytes, thread, meeting, warp_meeting; char value[16]; };

struct Block;
struct Fiber {
    ucontext_t start;
    jmp_buf state;
    bool started, over;
    char* stack;
    Block* block;
    unsigned thread, mask, count;
    void* mine;
    emulator::Finish finish;
    const char* waits;  // null while it can run
    unsigned phase;     // of its cluster's barrier: when it arrived last
    bool arrived;       // there, and has not waited
    std::vector<Copy> copies;
    int commits = 0;
};
struct Barrier { std::vector<Fiber*> there; unsigned count = 0, threads = 0; };
// The barrier of a cluster: how many threads arrived in this phase, and who waits for its end.
struct Meeting { unsigned arrived = 0, phase = 0; std::vector<Fiber*> waiting; };
struct Block {
    uint3 index;
    unsigned live;
    std::deque<Fiber> fibers;
    std::vector<Fiber*> ready;
    std::vector<unsigned> pending;  // lanes of a warp that wait for others
    unsigned meetings = 0;
    std::vector<unsigned> warp_meetings;
    std::vector<Warp> warps;
    std::vector<bool> hidden;   // which 16 bytes of the dynamic shared memory `copy16` wrote, and products may not read
    std::vector<Store> stores;  // that other blocks do not see yet
    Barrier barriers[16];
    std::vector<Copy> copies;
    std::vector<char> statics;
    char* memory;  // dynamic shared memory; its end is the end of what may be accessed
};

struct Arena {  // memory that is kept from launch to launch
    std::vector<char*> stacks, shared;
} kept;

struct Launch {
    void (*kernel)(const void*);
    const void* arguments;
    unsigned threads, shared_bytes, next, cluster;
    std::vector<unsigned> order;
    std::deque<Block> blocks;
    std::vector<Meeting> meetings;
    Block* current = nullptr;
    char* statics = nullptr;
    size_t statics_bytes = 0;
    unsigned long long random, turns = 0, looks = 0;  // looks: since something changed
    bool together;
    unsigned burst_bits, eager, slow;  // how long blocks run alone; how often the last thread goes on first; how long stores and products take
} *launch;

Fiber* running;
jmp_buf scheduler;
sigjmp_buf escape;
char message[400];
thread_local char anchor;  // makes the library's thread-local memory exist, which is the kernels' static shared memory

unsigned long long draw() {  // splitmix64
    unsigned long long z = launch->random += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}
unsigned draw(unsigned below) { return static_cast<unsigned>(draw() % below); }

void say(const char* what) {
    if (running == nullptr) std::snprintf(message, sizeof(message), "%s", what);
    else std::snprintf(message, sizeof(message), "block (%u, %u), thread %u: %s", running->block->index.x, running->block->index.y, running->thread, what);
}

__attribute__((noinline)) void leave() {  // the fiber stays where it is; the scheduler goes on
    if (_setjmp(running->state) == 0) _longjmp(scheduler, 1);
}

void begin() {
    launch->kernel(launch->arguments);
    running->over = true;
    _longjmp(scheduler, 1);
}

__attribute__((noinline)) void enter(Fiber& fiber) {
    if (_setjmp(scheduler) != 0) return;
    running = &fiber;
    threadIdx = {fiber.thread, 0, 0}, blockIdx = fiber.block->index;
    if (fiber.started) _longjmp(fiber.state, 1);
    fiber.started = true;
    setcontext(&fiber.start);
}

void wake(Fiber* fiber) {
    fiber->waits = nullptr;
    fiber->block->ready.push_back(fiber);
}

void wait(const char* what) {
    running->waits = what;
    leave();
}

void release(Barrier& barrier, Block& block) {
    block.meetings += 1;
    for (Fiber* fiber : barrier.there) {
        if (fiber == nullptr) continue;  // it arrived and went on
        fiber->count = barrier.count;
        if (fiber != running) wake(fiber);
    }
    barrier.there.clear(), barrier.count = 0;
}

char* mapped(std::vector<char*>& pool, size_t index, size_t bytes) {  // whole pages, given out once and kept
    while (pool.size() <= index) {
        void* fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        emulator::must(fresh != MAP_FAILED, "no memory for so many threads");
        pool.push_back(static_cast<char*>(fresh));
    }
    return pool[index];
}

void poison(Block& block) {
    std::memset(block.memory, POISON, launch->shared_bytes);
    block.statics.assign(launch->statics_bytes, static_cast<char>(POISON));
}

void start(Block& block, unsigned number, size_t place) {
    block.index = {number % gridDim.x, number / gridDim.x, 0};
    block.live = launch->threads;
    char* shared = mapped(kept.shared, place, SHARED_PAGES + PAGE) + SHARED_PAGES;
    mprotect(shared, PAGE, PROT_NONE);  // nothing may touch what follows the end
    block.memory = shared - launch->shared_bytes;
    block.pending.assign((launch->threads + 31) / 32, 0), block.warp_meetings = block.pending;
    block.warps.resize(block.pending.size()), block.hidden.assign(launch->shared_bytes / 16 + 1, false);
    poison(block);
    block.fibers.resize(launch->threads);
    for (unsigned i = 0; i < launch->threads; ++i) {
        Fiber& fiber = block.fibers[i];
        fiber.started = fiber.over = false;
        fiber.block = &block, fiber.thread = i, fiber.waits = nullptr, fiber.arrived = false;
        fiber.stack = mapped(kept.stacks, place * launch->threads + i, STACK);
        *reinterpret_cast<unsigned long long*>(fiber.stack) = CANARY;
        getcontext(&fiber.start);
        fiber.start.uc_stack = {fiber.stack, 0, STACK};
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, begin, 0);
        block.ready.push_back(&fiber);
    }
    for (unsigned i = launch->threads; i-- > 1;) std::swap(block.ready[i], block.ready[draw(i + 1)]);
}

void activate(Block* block) {  // static shared memory is at one address for all blocks
    if (launch->current == block) return;
    if (launch->current != nullptr) std::memcpy(launch->current->statics.data(), launch->statics, launch->statics_bytes);
    std::memcpy(launch->statics, block->statics.data(), launch->statics_bytes);
    launch->current = block;
}

void reach_memory(const Store& one) {
    if (std::memcmp(one.to, one.value, one.bytes) != 0) launch->looks = 0;
    std::memcpy(one.to, one.value, one.bytes);
}

template <typename Which>
void send_all(Block& block, Which which) {  // in the order of the program
    auto end = block.stores.begin();
    for (const Store& one : block.stores)
        if (which(one)) reach_memory(one);
        else *end++ = one;
    block.stores.erase(end, block.stores.end());
}

void land(Block& block, const Copy& one) {
    std::memcpy(one.to, one.from, one.bytes);
    const auto at = static_cast<char*>(one.to) - block.memory;
    if (one.ordinary && at >= 0 && at < static_cast<long>(launch->shared_bytes)) block.hidden[at / 16] = true;
}

void multiply_next(Block& block, Warp& warp) {
    const Product one = warp.products.front();
    warp.products.pop_front();
    if (one.multiply != nullptr) one.multiply(one.part);
}

void arrive_some(Block& block, bool must) {
    for (Warp& warp : block.warps)
        if (!warp.products.empty() && draw(must ? 2 : launch->slow) == 0) multiply_next(block, warp);

    if (!block.stores.empty() && (must || block.stores.size() > 256 || draw(launch->slow) == 0)) {
        const char* at = block.stores[draw(block.stores.size())].to;
        send_all(block, [=](const Store& one) { return one.to == at; });
    }
    if (block.copies.empty() || (!must && draw(16) != 0)) return;
    std::swap(block.copies[draw(block.copies.size())], block.copies.back());
    const Copy one = block.copies.back();
    block.copies.pop_back();
    land(block, one);
    one.arrived(one.barrier, one.bytes);
}

void retire(Fiber& fiber) {
    Block& block = *fiber.block;
    running = &fiber;
    emulator::must(*reinterpret_cast<unsigned long long*>(fiber.stack) == CANARY, "more than 64 KiB of stack");
    emulator::must(fiber.copies.empty(), "the thread returned before its asynchronous copies were waited for");
    running = nullptr;
    block.live -= 1, launch->looks = 0;
    Barrier& barrier = block.barriers[0];
    if (block.live > 0 && barrier.threads == 0 && barrier.there.size() == block.live) release(barrier, block);
}

// One turn of one thread of a block, or of what it has under way.
void turn(Block& block) {
    activate(&block);
    arrive_some(block, block.ready.empty() && draw(8) == 0);
    if (block.ready.empty()) return;
    const size_t last = block.ready.size() - 1;
    std::swap(block.ready[draw(launch->eager) == 0 ? draw(last + 1) : last], block.ready[last]);
    Fiber* fiber = block.ready.back();
    block.ready.pop_back();
    launch->turns += 1;
    enter(*fiber);
    running = nullptr;
    if (fiber->over) retire(*fiber);
    else if (fiber->waits == nullptr) block.ready.push_back(fiber);
}

void deadlock(const char* what) {
    for (bool polls : {true, false})  // whoever asks again and again shows best what is missing
        for (Block& block : launch->blocks)
            for (Fiber& fiber : block.fibers)
                if (!fiber.over && (fiber.waits == nullptr) == polls) {
                    std::snprintf(message, sizeof(message), "%s: block (%u, %u), thread %u waits for %s", what, block.index.x, block.index.y,
                                  fiber.thread, polls ? "what another thread writes" : fiber.waits);
                    siglongjmp(escape, 1);
                }
}

void run_all() {
    unsigned burst = 0;
    Block* block = nullptr;
    std::vector<Block*> able;
    const size_t resident = launch->together ? launch->order.size() : 1;
    unsigned live_blocks = 0;
    while (true) {
        while (live_blocks < resident && launch->next < launch->order.size()) {
            if (!launch->together) launch->blocks.clear(), launch->current = nullptr;
            launch->blocks.emplace_back();
            start(launch->blocks.back(), launch->order[launch->next], launch->together ? launch->next : 0);
            launch->next += 1, live_blocks += 1, launch->looks = 0, block = nullptr;
        }
        if (live_blocks == 0) return;
        auto runs = [](const Block& one) { return !(one.ready.empty() && one.copies.empty() && one.stores.empty()); };
        if (block == nullptr || burst == 0 || !runs(*block)) {
            able.clear();
            for (Block& one : launch->blocks)
                if (runs(one)) able.push_back(&one);
            if (able.empty()) deadlock("a deadlock");
            block = able[draw(able.size())], burst = block->ready.empty() ? 1 : 1u << draw(launch->burst_bits);
        }
        burst -= 1;
        turn(*block);
        if (block->live == 0) {
            emulator::must(block->copies.empty(), "a block returned before its bulk copies arrived");
            for (size_t i = 0; i < block->warps.size(); ++i) {
                emulator::must(block->warps[i].products.empty(), "a block returned before its products were waited for");
                emulator::must(block->warps[i].called.size() == block->warps[i / 4 * 4].called.size(), "a product of a part of a warpgroup");
            }
            if (block->stores.empty()) live_blocks -= 1, block = nullptr;
        }
        if (launch->looks > PATIENCE * launch->threads * live_blocks) deadlock("nothing changes any more");
    }
}

int find_statics(dl_phdr_info* info, size_t, void* base) {
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& header = info->dlpi_phdr[i];
        char* block = static_cast<char*>(info->dlpi_tls_data);
        if (header.p_type != PT_TLS || block == nullptr || static_cast<char*>(base) < block || static_cast<char*>(base) >= block + header.p_memsz) continue;
        launch->statics = block, launch->statics_bytes = header.p_memsz;
        return 1;
    }
    return 0;
}

void out_of_bounds(int, siginfo_t* info, void*) {
    char what[100];
    std::snprintf(what, sizeof(what), "an access outside of a tensor or of shared memory, at %p", info->si_addr);
    say(what);
    siglongjmp(escape, 1);
}

}  // namespace
