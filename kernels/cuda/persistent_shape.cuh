// The arguments of the persistent kernels, their tiles, and the shared memory of a block.
#pragma once
#include "common.cuh"
#include "draws.cuh"

namespace {

struct Args {
    static constexpr uint32_t KERNEL = 0;
    const char* weights;  // [blocks], for each block the chunks of its layers, then those of its heads
    const bf16 *norms, *rope, *x, *inputs, *table, *text;  // norms: of each layer: input, post, q, k; then the final one; padded widths
    const long long *rows, *seeds, *top_k, *starts, *trailing;
    long long *codes, *frames, *positions;
    const int* finite;
    unsigned char* flags;
    const float *temperature, *top_p;
    const unsigned char* greedy;
    bf16* state_inputs;
    uint2* packets;
    uint32_t* control;  // indexed by `Control`
    long long end, dead;
    int talker, trailing_width, patience, gap, delay, silent, starved, keeping;
    unsigned seed;
    float eps, scale;
};

// The same for the talker's layers, whose keys and values are [layers, pages, kv heads, page size, head].
struct TalkArgs {
    static constexpr uint32_t KERNEL = 1;
    const char* weights;  // [blocks], for each block the chunks of its layers
    const bf16 *norms, *rope, *inputs;
    bf16* x;  // [rows, width], the state before the final norm
    const long long *rows, *positions, *page_table;
    bf16 *keys, *values;
    uint2* packets;
    uint32_t* control;
    long long layer_size;  // elements of the keys of a layer
    int layers, table_width, page_size, patience, gap, delay, silent, starved, keeping;
    unsigned seed;
    float eps, scale;
};

enum Flag { ENDED = 1, NOT_FINITE = 2, FAILED = 4 };
enum Control { EPOCH = 0, FAULT = 1, TALKER_EPOCH = 2 };
// What a thread that reports a fault waited for. The word of a fault has, from the highest bit: a 1; `KERNEL`, 1 bit; the wait, 2 bits; the
// block, 8 bits; the exchange or chunk, 20 bits.
enum Wait { PACKETS = 0, WEIGHTS = 1, ROOM = 2, LAST_COPY = 3 };
// Limits of waits in the ring. TRIES_PER_LOOK: the producer's tries between two looks at the fault word; CLOCKS_PER_TRY: a consumer may wait
// `patience` times this many clocks; LAST_TRIES: tries for the last copies; LONGEST_TRY: the maximum number of clocks that count between two
// tries of a consumer.
constexpr int TRIES_PER_LOOK = 256, CLOCKS_PER_TRY = 32, LAST_TRIES = 1 << 16;
constexpr unsigned LONGEST_TRY = 1 << 16;
constexpr int REPORTED = -(1 << 30);  // lower than `rest` can become by waiting
constexpr int STARVED_CHUNK = 5;  // the chunk that a starved block of a test never receives

__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__device__ constexpr int parts(int whole, int part) { return (whole + part - 1) / part; }

// Sizes of a predictor and its tiles. TILES: 512-byte tiles per warp in a chunk of the ring; TOKENS: maximum tokens that pass its layers
// together; LATER: codebooks after code 0.
template <int WIDTH_, int INNER_, int HEADS_, int KV_, int HEAD_, int CODES_, int LAYERS_, int LATER_, int BLOCKS_, int WARPS_, int TILES_,
          int STAGES_, int ROWS_, int TOKENS_ = 2 * ROWS_>
struct Shape {
    static constexpr int WIDTH = WIDTH_, INNER = INNER_, HEADS = HEADS_, KV = KV_, HEAD = HEAD_, CODES = CODES_, LAYERS = LAYERS_;
    static constexpr int LATER = LATER_, BLOCKS = BLOCKS_, WARPS = WARPS_, TILES = TILES_, STAGES = STAGES_, ROWS = ROWS_;
    static constexpr int THREADS = WARPS * 32, TOKENS = TOKENS_, SPAN = LATER + 1, MIXED = HEADS * HEAD, QKV = (HEADS + 2 * KV) * HEAD;
    static constexpr int SLICE = HEAD / (BLOCKS / HEADS), CHUNK = WARPS * TILES * 512;
    static_assert(BLOCKS <= 256, "a block's number in the word of a fault");
    static_assert(BLOCKS % HEADS == 0 && HEAD % (BLOCKS / HEADS) == 0 && SLICE % 2 == 0 && HEAD % 8 == 0 && HEAD <= 128, "blocks of a head");
    static_assert((HEAD & (HEAD - 1)) == 0 && WIDTH % 4 == 0 && INNER % 4 == 0 && CODES % 4 == 0 && WARPS % ROWS == 0, "packets in pairs");

    // groups: of 8 rows, per block, of a matrix of n rows; steps: blocks of 32 values, per warp, of an inner size; chunks: of a product.
    __device__ static constexpr int groups(int n) { return parts(n, BLOCKS * 8); }
    __device__ static constexpr int steps(int inner) { return parts(inner, WARPS * 32); }
    __device__ static constexpr int chunks(int inner, int groups) { return parts(steps(inner) * groups, TILES); }
    // Every block must own rows of one of these products: it then sends values to all others in each layer, before the next layer
    // overwrites attention's results.
    static_assert((BLOCKS - 1) * 8 * groups(WIDTH) < WIDTH || (BLOCKS - 1) * 8 * groups(INNER) < INNER, "the last block owns no row");
    static constexpr int LAYER_CHUNKS = chunks(WIDTH, groups(QKV)) + chunks(MIXED, groups(WIDTH)) + chunks(WIDTH, 2 * groups(INNER)) +
                                        chunks(INNER, groups(WIDTH));
    static constexpr int HEAD_CHUNKS = chunks(WIDTH, groups(CODES)), BLOCK_CHUNKS = LAYERS * LAYER_CHUNKS + LATER * HEAD_CHUNKS;
    static constexpr int LARGEST_SLICE = 32 * larger(steps(WIDTH), larger(steps(MIXED), steps(INNER)));
    static constexpr int OUTPUTS = 8 * larger(larger(groups(QKV), 2 * groups(INNER)), larger(groups(CODES), groups(WIDTH)));
    static_assert(TOKENS * groups(WIDTH) * 4 <= THREADS, "one pair of the state per thread");
    static constexpr int NORM = steps(WIDTH) * WARPS * 32, LAYER_NORMS = 2 * NORM + 2 * HEAD;

    // The first packet of each exchange, whose packets are [token][pair].
    static constexpr int QKV_AT = 0, MIXED_AT = QKV_AT + TOKENS * QKV / 2, MIDDLE_AT = MIXED_AT + TOKENS * MIXED / 2;
    static constexpr int INNER_AT = MIDDLE_AT + TOKENS * WIDTH / 2, STATE_AT = INNER_AT + TOKENS * INNER / 2;
    static constexpr int LOGITS_AT = STATE_AT + TOKENS * WIDTH / 2;
    using Drawer = Team<WARPS / ROWS, 4 * parts(CODES, 4 * THREADS / ROWS)>;
};

struct DrawSettings {
    float temperature, top_p;
    int top_k;
    bool greedy;
};

// The settings of a row's slot. They are in shared memory, because they are rarely read.
struct Request {
    long long slot, frame, text;
    unsigned long long seed;
    DrawSettings settings;
};

template <class S>
struct Shared {
    char ring[S::STAGES * S::CHUNK];
    bf16 slices[S::WARPS][S::TOKENS][S::LARGEST_SLICE + 32];  // the slice of each vector that a warp multiplies
    bf16 keys[S::LAYERS][S::ROWS][S::SPAN][S::HEAD], values[S::LAYERS][S::ROWS][S::SPAN][S::SLICE], queries[S::TOKENS][S::HEAD];
    float partial[2][S::WARPS][S::TOKENS][S::OUTPUTS];
    float squares[S::WARPS][S::TOKENS];
    float scores[S::TOKENS][S::SPAN];
    typename S::Drawer::Board boards[S::ROWS];
    unsigned long long full[S::STAGES], empty[S::STAGES];
    Request requests[S::ROWS];
    int codes[S::ROWS][S::LATER + 1], fine[S::ROWS];
};

}  // namespace
