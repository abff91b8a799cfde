// What a kernel's instructions do to the fibers, and a whole launch.
#include "schedule.h"

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
    const Copy one{to, from, bytes, nullptr, nullptr, true, running->commits};
    if (draw(2) == 0) land(*running->block, one);
    else running->copies.push_back(one);
}
void commit_copies() { running->commits += 1; }
void finish_copies(int commits) {
    std::vector<Copy> later;
    for (const Copy& one : running->copies)
        if (commits >= 0 && one.commits >= running->commits - commits) later.push_back(one);
        else land(*running->block, one);
    std::swap(running->copies, later);
}
void copy_to_barrier(void* to, const void* from, unsigned bytes, void (*arrived)(void*, unsigned), void* barrier) {
    running->block->copies.push_back({to, from, bytes, arrived, barrier, false});
}

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
    must(!block.hidden[offset / 16], "a product reads what copy16 wrote, which a GPU shows it behind a fence only");
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
