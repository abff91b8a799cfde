// The talker's layers for one position of each row, in one cooperative launch.
//
// A layer has six exchanges: those of persistent.cuh and one more, because the blocks of a kv head share its attention. Each of their warps
// has every READERS-th position, whose keys and values it reads before the queries arrive. A block joins the results of its warps and sends
// them to the others of the kv head as a part {values, largest score, sum of weights} for each query head. Then each block receives all
// parts of a few elements and sends their sum to all blocks. The new key and value arrive with the queries, and the warp that has the new
// position writes them into the page.
#pragma once
#include "persistent_chain.cuh"

namespace {

template <class S>
struct Talk {
    static constexpr int GROUP = S::HEADS / S::KV, PARTS = S::BLOCKS / S::KV, READERS = PARTS * S::WARPS, AHEAD = 4 / S::ROWS;
    static constexpr int OWN = GROUP * S::HEAD / PARTS, CELL = S::HEAD + 2, PARTS_AT = S::LOGITS_AT;  // OWN: elements whose parts a block adds
    static_assert(S::BLOCKS % S::KV == 0 && PARTS <= 32 && OWN % 2 == 0 && OWN <= 64 && S::HEAD % OWN == 0, "blocks of a kv head");
    static_assert(S::TOKENS == S::ROWS && S::ROWS <= S::WARPS, "one position of each row");
};

template <class S>
struct TalkShared {
    using T = Talk<S>;
    char ring[S::STAGES * S::CHUNK];
    bf16 slices[S::WARPS][S::TOKENS][S::LARGEST_SLICE + 32];
    float partial[2][S::WARPS][S::TOKENS][S::OUTPUTS];
    float squares[S::WARPS][S::TOKENS];
    float found[S::ROWS][S::WARPS][T::GROUP][T::CELL];  // the result of each warp: values, largest score, sum of weights
    float parts[S::ROWS][T::PARTS][T::OWN + 2];
    unsigned long long full[S::STAGES], empty[S::STAGES];
    long long slots[S::ROWS];
    int positions[S::ROWS], places[S::ROWS][S::WARPS][32];
};

template <class S, bool TESTED>
struct Talker : Chain<S, TalkShared<S>, TalkArgs, TESTED> {
    using T = Talk<S>;
    using Base = Chain<S, TalkShared<S>, TalkArgs, TESTED>;
    using Base::p, Base::s, Base::block, Base::thread, Base::warp, Base::lane, Base::epoch, Base::carried;
    using Base::sync, Base::publish, Base::next_epoch;
    static constexpr int UNITS = S::HEAD / 4, AHEAD = T::AHEAD;
    const int kv = blockIdx.x / T::PARTS, part = blockIdx.x % T::PARTS, reader = part * S::WARPS + threadIdx.x / 32;

    __device__ Talker(const TalkArgs& arguments, TalkShared<S>& memory) : Base(arguments, memory) {}

    // The index of a position in the keys and values of a layer, in units of one head of one position.
    __device__ __forceinline__ int place(int row, int at) const {
        const long long page = p.page_table[s.slots[row] * p.table_width + at / p.page_size];
        return static_cast<int>((page * S::KV + kv) * p.page_size + at % p.page_size);
    }
    // The index of this lane's first element of this warp's i-th position.
    __device__ __forceinline__ long long element(int row, int i) const {
        return static_cast<long long>(i < 32 ? s.places[row][warp][i] : place(row, i * T::READERS + reader)) * S::HEAD + lane * 4;
    }

    struct Cached {
        uint2 keys[AHEAD], values[AHEAD];
    };
    // Reads the keys and values of AHEAD of this warp's positions, beginning with its `first`-th one. The new position is not read.
    __device__ __forceinline__ void read(Cached& to, int layer, int row, int first) const {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const bool there = (first + i) * T::READERS + reader < s.positions[row] && lane < UNITS;
            const long long at = layer * p.layer_size + (there ? element(row, first + i) : 0);
            to.keys[i] = there ? *reinterpret_cast<const uint2*>(p.keys + at) : make_uint2(0, 0);
            to.values[i] = there ? *reinterpret_cast<const uint2*>(p.values + at) : make_uint2(0, 0);
        }
    }

    // A warp's result for a query head so far: the largest score, the sum of weights, and the weighted sum of values.
    struct Found {
        float top = -INFINITE, total = 0.f, mixed[4] = {};
    };
    // Adds MANY positions to the result, of which the first `count` exist (online softmax).
    template <int MANY>
    __device__ __forceinline__ void take(Found& found, uint2 query, const uint2* keys, const uint2* values, int count) const {
        const float2 q0 = widen(query.x), q1 = widen(query.y);
        float score[MANY], top = found.top;
#pragma unroll
        for (int i = 0; i < MANY; ++i) {
            const float2 k0 = widen(keys[i].x), k1 = widen(keys[i].y);
            float sum = fmaf(q0.x, k0.x, fmaf(q0.y, k0.y, fmaf(q1.x, k1.x, q1.y * k1.y)));
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
            score[i] = i < count ? sum * p.scale : -INFINITE;
            top = fmaxf(top, score[i]);
        }
        const float kept = __expf(found.top - top);
        found.top = top, found.total *= kept;
#pragma unroll
        for (int j = 0; j < 4; ++j) found.mixed[j] *= kept;
#pragma unroll
        for (int i = 0; i < MANY; ++i) {
            const float share = __expf(score[i] - top);
            const float2 v0 = widen(values[i].x), v1 = widen(values[i].y);
            found.total += share;
            found.mixed[0] = fmaf(share, v0.x, found.mixed[0]), found.mixed[1] = fmaf(share, v0.y, found.mixed[1]);
            found.mixed[2] = fmaf(share, v1.x, found.mixed[2]), found.mixed[3] = fmaf(share, v1.y, found.mixed[3]);
        }
    }

    // Attends to this warp's positions of a row. `cached` already has the first of them.
    __device__ __forceinline__ void attend_row(Cached& cached, int layer, int row, const bf16* norms) {
        const int last = s.positions[row];
        const bool mine = last % T::READERS == reader;
        const bf16* angles = p.rope + static_cast<long long>(last) * S::HEAD;
        const auto query_turn = this->turn_of(norms, angles), key_turn = this->turn_of(norms + S::HEAD, angles);
        uint2 heads[T::GROUP + 2] = {};
        this->template receive<T::GROUP + 2>(
            [&](int i) {
                const int head = i < T::GROUP ? kv * T::GROUP + i : S::HEADS + (i - T::GROUP) * S::KV + kv;
                return lane < UNITS && (i < T::GROUP || mine) ? S::QKV_AT + (row * S::QKV + head * S::HEAD) / 2 + lane * 2 : -1;
            },
            [&](int i, uint2 v) { heads[i] = v; });
        __syncwarp();
        Found found[T::GROUP];
#pragma unroll
        for (int i = 0; i < T::GROUP; ++i) heads[i] = this->turned(heads[i], query_turn);
#pragma unroll 1
        for (int first = 0; first * T::READERS + reader < last; first += AHEAD) {
            if (first > 0) read(cached, layer, row, first);
            const int count = (last - reader - first * T::READERS + T::READERS - 1) / T::READERS;
#pragma unroll
            for (int i = 0; i < T::GROUP; ++i) take<AHEAD>(found[i], heads[i], cached.keys, cached.values, count);
        }
        if (mine) {
            const uint2 key = this->turned(heads[T::GROUP], key_turn), value = heads[T::GROUP + 1];
            if (lane < UNITS) {
                const long long at = layer * p.layer_size + element(row, last / T::READERS);
                *reinterpret_cast<uint2*>(p.keys + at) = key, *reinterpret_cast<uint2*>(p.values + at) = value;
            }
#pragma unroll
            for (int i = 0; i < T::GROUP; ++i) take<1>(found[i], heads[i], &key, &value, 1);
        }
#pragma unroll
        for (int i = 0; i < T::GROUP; ++i) {
            float* to = s.found[row][warp][i];
            if (lane < UNITS) *reinterpret_cast<float2*>(to + lane * 4) = make_float2(found[i].mixed[0], found[i].mixed[1]);
            if (lane < UNITS) *reinterpret_cast<float2*>(to + lane * 4 + 2) = make_float2(found[i].mixed[2], found[i].mixed[3]);
            if (lane == 0) *reinterpret_cast<float2*>(to + S::HEAD) = make_float2(found[i].top, found[i].total);
        }
    }

    __device__ __forceinline__ int part_place(int row, int from, int query) const {
        return T::PARTS_AT + (((row * S::KV + kv) * T::PARTS + from) * T::GROUP + query) * T::CELL;
    }
    // Joins the results of the block's warps into one part and publishes it. The largest score of a part without positions is -infinity.
    __device__ __forceinline__ void publish_parts() {
        for (int i = thread; i < S::ROWS * T::GROUP * S::HEAD; i += S::THREADS) {
            const int row = i / (T::GROUP * S::HEAD), query = i / S::HEAD % T::GROUP, at = i % S::HEAD;
            float top = -INFINITE, total = 0.f, mixed = 0.f;
#pragma unroll
            for (int w = 0; w < S::WARPS; ++w) top = fmaxf(top, s.found[row][w][query][S::HEAD]);
#pragma unroll
            for (int w = 0; w < S::WARPS; ++w) {
                const float* found = s.found[row][w][query];
                const float share = found[S::HEAD] == -INFINITE ? 0.f : __expf(found[S::HEAD] - top);
                total = fmaf(share, found[S::HEAD + 1], total), mixed = fmaf(share, found[at], mixed);
            }
            const int to = part_place(row, part, query);
            publish(to + at, __float_as_uint(mixed));
            if (at < 2) publish(to + S::HEAD + at, __float_as_uint(at == 0 ? top : total));
        }
    }
    // Receives the parts of the elements of a row that this block adds; returns this lane's pair of the sums.
    __device__ __forceinline__ uint32_t joined(int row) {
        constexpr int CELLS = T::OWN / 2 + 1;
        const int query = part * T::OWN / S::HEAD, first = part * T::OWN % S::HEAD;
        this->template receive<parts(T::PARTS * CELLS, 32)>(
            [&](int i) {
                const int from = (lane + 32 * i) / CELLS, cell = (lane + 32 * i) % CELLS;
                return from < T::PARTS ? part_place(row, from, query) + (cell < T::OWN / 2 ? first + cell * 2 : S::HEAD) : -1;
            },
            [&](int i, uint2 v) {
                const int from = (lane + 32 * i) / CELLS, cell = (lane + 32 * i) % CELLS;
                *reinterpret_cast<float2*>(&s.parts[row][from][cell * 2]) = make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
            });
        __syncwarp();
        const bool has = lane < T::PARTS;
        const float top = has ? s.parts[row][lane][T::OWN] : -INFINITE;
        float best = top;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, step));
        const float share = __expf(top - best);
        float total = has ? share * s.parts[row][lane][T::OWN + 1] : 0.f;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
        float2 mixed = make_float2(0.f, 0.f);
#pragma unroll
        for (int from = 0; from < T::PARTS; ++from) {
            const float times = __shfl_sync(0xffffffffu, share, from);
            const float2 v = *reinterpret_cast<const float2*>(&s.parts[row][from][lane < T::OWN / 2 ? lane * 2 : 0]);
            mixed.x = fmaf(times, v.x, mixed.x), mixed.y = fmaf(times, v.y, mixed.y);
        }
        return narrow(mixed.x / total, mixed.y / total);
    }

    __device__ __forceinline__ void attend(Cached (&cached)[S::ROWS], int layer, const bf16* norms) {
#pragma unroll
        for (int row = 0; row < S::ROWS; ++row) attend_row(cached[row], layer, row, norms);
        sync();
        next_epoch();
        publish_parts();
        const uint32_t pair = warp < S::ROWS ? joined(warp) : 0;
        next_epoch();
        if (warp < S::ROWS && lane < T::OWN / 2)
            publish(S::MIXED_AT + (warp * S::MIXED + kv * T::GROUP * S::HEAD + part * T::OWN) / 2 + lane, pair);
    }

    __device__ __forceinline__ const bf16* input(int row) const { return p.inputs + s.slots[row] * S::WIDTH; }

    __device__ __forceinline__ void run() {
        epoch = p.control[TALKER_EPOCH];
        this->look();
        if (thread < S::ROWS) s.slots[thread] = p.rows[thread], s.positions[thread] = static_cast<int>(p.positions[p.rows[thread]]);
        sync();
#pragma unroll
        for (int row = 0; row < S::ROWS; ++row) {
            const int at = lane * T::READERS + reader;
            if (at <= s.positions[row]) s.places[row][warp][lane] = place(row, at);
        }
        __syncwarp();
        this->with_pair(S::ROWS, [&](int row, int at) { carried = *reinterpret_cast<const uint32_t*>(input(row) + at); });
#pragma unroll 1
        for (int layer = 0; layer < p.layers; ++layer) {
            const bf16* norms = p.norms + layer * S::LAYER_NORMS;
            Cached cached[S::ROWS];
            Base::run_layer(
                norms, S::ROWS,
                [&] {
                    if (layer == 0) this->read_slice([&](int row) { return input(row); }, S::ROWS);
                    else this->template receive_slice<S::WIDTH>(S::STATE_AT, S::ROWS);
                },
                [&] {
#pragma unroll
                    for (int row = 0; row < S::ROWS; ++row) read(cached[row], layer, row, 0);
                    attend(cached, layer, norms + 2 * S::NORM);
                });
        }
        this->with_pair(S::ROWS, [&](int row, int at) { *reinterpret_cast<uint32_t*>(p.x + row * S::WIDTH + at) = carried; });
        if (block == 0 && thread == 0) p.control[TALKER_EPOCH] = epoch;
    }
};

template <class S, bool TESTED>
__device__ __forceinline__ void talk(const TalkArgs& p) {
    auto& s = *reinterpret_cast<TalkShared<S>*>(dynamic_shared());
    run_block<S>(s, [&] { Talker<S, TESTED>(p, s).run(); }, [&] {
        const int chunks = p.layers * S::LAYER_CHUNKS;
        Stream<S, TalkShared<S>, TalkArgs, TESTED> stream(p, s);
        stream.send(p.weights + static_cast<long long>(blockIdx.x) * chunks * S::CHUNK, chunks);
        stream.finish();
    });
}

}  // namespace

// As PREDICTOR of persistent.cuh. Three of the sizes (codes, layers, codebooks after code 0) belong to a predictor and mean nothing for a
// talker.
#define TALKER(NAME, BYTES, TESTED, ...)                                                                           \
    extern "C" __global__ void __launch_bounds__(Shape<__VA_ARGS__>::THREADS + 32, 1) NAME(const TalkArgs p) {     \
        static_assert(sizeof(TalkShared<Shape<__VA_ARGS__>>) <= BYTES, "more shared memory than the launch asks for"); \
        talk<Shape<__VA_ARGS__>, TESTED>(p);                                                                       \
    }
#define PUBLISHED_TALKER 1024, 3072, 16, 8, 128, 8, 1, 1, 128, 8, 4, 8
