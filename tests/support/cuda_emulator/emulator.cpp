// Fibers, the order in which they run, and what they wait for.
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

struct Copy { void* to; const void* from; unsigned bytes; void (*arrived)(void*, unsigned); void* barrier; bool ordinary; };
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
    std::vector<bool> hidden;   // which 16 bytes of the dynamic shared memory `copy16` wrote, and products may not see yet
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

// Copies of a thread after which it arrives at a barrier.
struct Left { unsigned copies; void (*arrived)(void*, unsigned); void* barrier; };
void one_less(void* left, unsigned) {
    auto* mine = static_cast<Left*>(left);
    if ((mine->copies -= 1) > 0) return;
    mine->arrived(mine->barrier, 0);
    delete mine;
}

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

namespace emulator {

void fail(const char* what) {
    say(what);
    siglongjmp(escape, 1);
}
void pause() {
    launch->looks += 1;
    leave();
}
void progress() { launch->looks = 0; }
unsigned lane() { return running->thread % 32; }
unsigned long long turns() { return launch->turns; }
char* dynamic_shared() { return running->block->memory; }

void meet_warp(unsigned mask, void* mine, Finish finish, const char* what) {
    Fiber& me = *running;
    const unsigned warp = me.thread / 32;
    unsigned& pending = me.block->pending[warp];
    must(mask >> lane() & 1, "a warp's instruction whose mask leaves out the thread itself");
    me.mine = mine, me.finish = finish, me.mask = mask;
    pending |= 1u << lane();
    if ((pending & mask) != mask) return wait(what);
    void* lanes[32] = {};
    for (int i = 0; i < 32; ++i) {
        if (!(mask >> i & 1)) continue;
        const Fiber& one = me.block->fibers[warp * 32 + i];
        must(one.mask == mask && one.finish == finish, "the lanes of a warp meet at different instructions");
        lanes[i] = one.mine;
    }
    finish(lanes, mask);
    pending &= ~mask, me.block->warp_meetings[warp] += 1;
    for (int i = 0; i < 32; ++i)
        if ((mask >> i & 1) && i != static_cast<int>(me.thread % 32)) wake(&me.block->fibers[warp * 32 + i]);
}

unsigned meet_block(int identity, unsigned threads, bool mine) {
    must(identity >= 0 && identity < 16, "a barrier of an identity that is not 0 to 15");
    Block& block = *running->block;
    Barrier& barrier = block.barriers[identity];
    must(barrier.there.empty() || barrier.threads == threads, "threads meet at one barrier with different counts");
    barrier.threads = threads, barrier.count += mine;
    barrier.there.push_back(running);
    if (barrier.there.size() < (threads == 0 ? block.live : threads)) wait("the others at a barrier of the block");
    else release(barrier, block);
    return running->count;
}

Meeting& my_meeting() {
    must(launch->cluster > 1, "a barrier of a cluster in a launch without clusters");
    const Block& block = *running->block;
    return launch->meetings[(block.index.y * gridDim.x + block.index.x) / launch->cluster];
}
char* shared_of(unsigned rank, unsigned bytes) {
    must(rank < launch->cluster && bytes <= launch->shared_bytes, "an address outside of the cluster's shared memory");
    const uint3 index = running->block->index;
    const Block& other = launch->blocks[index.y * gridDim.x + index.x / launch->cluster * launch->cluster + rank];
    must(my_meeting().phase > 0 && other.live > 0, "a block of the cluster that may not have started, or has returned");
    return other.memory;
}
void arrive_in_cluster() {
    Meeting& meeting = my_meeting();
    must(!running->arrived, "a thread arrives twice at the barrier of a cluster");
    running->arrived = true, running->phase = meeting.phase, meeting.arrived += 1, launch->looks = 0;
    if (meeting.arrived < launch->cluster * launch->threads) return;
    meeting.arrived = 0, meeting.phase += 1;
    for (Fiber* fiber : meeting.waiting) wake(fiber);
    meeting.waiting.clear();
}
void wait_for_cluster() {
    Meeting& meeting = my_meeting();
    must(running->arrived, "a thread waits at the barrier of a cluster before it arrived");
    running->arrived = false;
    if (meeting.phase != running->phase) return;
    meeting.waiting.push_back(running);
    wait("the others at the barrier of a cluster");
}

void load(void* to, const void* from, unsigned bytes) {
    std::memcpy(to, from, bytes);
    const auto* first = static_cast<const char*>(from);
    for (const Store& one : running->block->stores) {
        if (one.to >= first + bytes || one.to + one.bytes <= first) continue;
        for (unsigned i = 0; i < one.bytes; ++i) {
            const auto place = one.to + i - first;
            if (place >= 0 && place < bytes) static_cast<char*>(to)[place] = one.value[i];
        }
    }
}
void store(void* to, const void* from, unsigned bytes) {
    Block& block = *running->block;
    Store one{static_cast<char*>(to), bytes, running->thread, block.meetings, block.warp_meetings[running->thread / 32], {}};
    std::memcpy(one.value, from, bytes);
    launch->together ? block.stores.push_back(one) : reach_memory(one);
}
void fence() {
    Block& block = *running->block;
    const unsigned me = running->thread;
    send_all(block, [&](const Store& one) {
        return one.thread == me || one.meeting < block.meetings || (one.thread / 32 == me / 32 && one.warp_meeting < block.warp_meetings[me / 32]);
    });
}
void send(const void* at) {
    send_all(*running->block, [=](const Store& one) { return one.to == at; });
}
void meet_at(int identity, unsigned threads) {
    Block& block = *running->block;
    Barrier& barrier = block.barriers[identity];
    must(identity > 0 && identity < 16, "a barrier of an identity that is not 1 to 15");
    must(barrier.there.empty() || barrier.threads == threads, "threads meet at one barrier with different counts");
    barrier.threads = threads;
    barrier.there.push_back(nullptr);
    if (barrier.there.size() == threads) release(barrier, block);
}
void copy_later(void* to, const void* from, unsigned bytes) {
    const Copy one{to, from, bytes, nullptr, nullptr, true};
    if (draw(2) == 0) land(*running->block, one);
    else running->copies.push_back(one);
}
void finish_copies() {
    for (const Copy& one : running->copies) land(*running->block, one);
    running->copies.clear();
}
void copy_to_barrier(void* to, const void* from, unsigned bytes, void (*arrived)(void*, unsigned), void* barrier) {
    running->block->copies.push_back({to, from, bytes, arrived, barrier, false});
}
void send_copies(void (*arrived)(void*, unsigned), void* barrier) {
    auto& mine = running->copies;
    if (mine.empty()) return arrived(barrier, 0);
    auto* left = new Left{static_cast<unsigned>(mine.size()), arrived, barrier};
    for (Copy one : mine) {
        one.arrived = one_less, one.barrier = left;
        running->block->copies.push_back(one);
    }
    mine.clear();
}
void show_to_products() { running->block->hidden.assign(running->block->hidden.size(), false); }

void begin_products() { running->block->warps[running->thread / 32].begun = true; }
void add_product(const Part& part, Multiply multiply, const Called& called) {
    Block& block = *running->block;
    Warp& warp = block.warps[running->thread / 32];
    must(warp.begun, "a product without products_begin before it");
    warp.called.push_back(called);
    for (unsigned i = running->thread / 128 * 4, end = i + 4; i < end; ++i) {
        must(i < block.warps.size(), "a product of a part of a warpgroup");
        const auto& other = block.warps[i].called;
        if (other.size() >= warp.called.size()) must(other[warp.called.size() - 1] == called, "the warps of a group call different products");
    }
    warp.products.push_back({part, multiply, false});
    warp.products.back().part.thread = running->thread / 32 * 32;
    while (!warp.products.empty() && draw(launch->slow) == 0) multiply_next(block, warp);
}
void commit_products() { running->block->warps[running->thread / 32].products.push_back({{}, nullptr, true}); }
void finish_products(unsigned pending) {
    Warp& warp = running->block->warps[running->thread / 32];
    unsigned groups = 0;
    for (const Product& one : warp.products) groups += one.last;
    must(warp.products.empty() || warp.products.back().last, "a wait for products that were not committed");
    while (groups > pending) {
        groups -= warp.products.front().last;
        multiply_next(*running->block, warp);
    }
    warp.begun = false;
}
const void* seen_by_products(unsigned offset) {
    const Block& block = *launch->current;
    must(offset + 16 <= launch->shared_bytes, "a product reads outside of shared memory");
    must(!block.hidden[offset / 16], "a product reads what copy16 wrote without writes_to_products");
    return block.memory + offset;
}

}  // namespace emulator

// Runs a whole launch. Null, or what went wrong; then memory that the kernel was given is in any state.
extern "C" const char* emulator_launch(void (*kernel)(const void*), const void* arguments, unsigned grid_x, unsigned grid_y, unsigned threads,
                                       unsigned shared_bytes, unsigned long long seed, int together, unsigned cluster) {
    Launch here{};
    launch = &here, running = nullptr, anchor = 0;
    here.kernel = kernel, here.arguments = arguments, here.threads = threads, here.shared_bytes = shared_bytes;
    here.random = seed * 0x2545F4914F6CDD1Dull + 1, here.together = together != 0 || cluster > 1, here.cluster = cluster;
    blockDim = {threads, 1, 1}, gridDim = {grid_x, grid_y, 1};
    dl_iterate_phdr(find_statics, &anchor);
    if (cluster < 1 || cluster > 8 || grid_x % cluster != 0) return "clusters of 1 to 8 blocks along x, in whole numbers";
    here.meetings.resize(grid_x * grid_y / cluster);
    if (threads == 0 || threads > 1024 || shared_bytes + here.statics_bytes > MAX_SHARED) return "more threads or shared memory than a block has";
    for (unsigned i = 0; i < grid_x * grid_y; ++i) here.order.push_back(i);
    for (unsigned i = grid_x * grid_y; !here.together && i-- > 1;) std::swap(here.order[i], here.order[draw(i + 1)]);
    here.burst_bits = 1 + draw(13), here.eager = 1u << 2 * draw(4), here.slow = 4u << 2 * draw(5);
    static char handler_stack[64 << 10];
    stack_t other{handler_stack, 0, sizeof(handler_stack)}, before;
    struct sigaction action{}, segv, bus;
    action.sa_sigaction = out_of_bounds, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaltstack(&other, &before), sigaction(SIGSEGV, &action, &segv), sigaction(SIGBUS, &action, &bus);
    const bool failed = sigsetjmp(escape, 1) != 0;
    if (!failed) run_all();
    sigaltstack(&before, nullptr), sigaction(SIGSEGV, &segv, nullptr), sigaction(SIGBUS, &bus, nullptr);
    return failed ? message : nullptr;
}
