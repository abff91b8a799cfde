// The functions of kernels/cuda/wgmma.cuh in plain C++, for the emulator.
#pragma once

using Matrix = unsigned long long;

namespace emulator {

constexpr unsigned SHARED_START = 1024;  // the first bytes of shared memory are the system's

struct Piece { float* d; const uint32_t* a; Called called; };

inline float element(Matrix matrix, unsigned row, unsigned k) {
    const unsigned start = (matrix & 0x3fff) << 4, along_k = (matrix >> 16 & 0x3fff) << 4, along_rows = (matrix >> 32 & 0x3fff) << 4;
    const unsigned kind = matrix >> 62, line = kind == 1 ? 128 : kind == 2 ? 64 : 16;  // bytes of a row that lie together
    must((matrix << 2 >> 48) == 0 && (matrix >> 14 & 3) == 0 && (matrix >> 30 & 3) == 0, "a matrix in shared memory that is not one");
    unsigned at = start + row / 8 * along_rows + row % 8 * line + k / 8 * (kind == 0 ? along_k : 16);
    if (kind != 0) at ^= (at >> 7 & (line / 16 - 1)) << 4;
    must(at >= SHARED_START, "a product reads outside of shared memory");
    return half_of(static_cast<const bf16*>(seen_by_products(at - SHARED_START))[k % 8], 0);
}

// A warp's 16 rows: one addition in float32 after the other, k from 0 to 15; the hardware's own order is not documented.
inline void multiply_part(const Part& part) {
    const Called& called = part.called;
    float a[16][16];
    for (unsigned k = 0; k < 16; ++k)
        for (unsigned row = 0; row < 16; ++row)
            a[row][k] = part.from_registers ? half_of(part.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2)
                                            : element(called.a, part.thread % 128 / 2 + row, k);
    for (int column = 0; column < called.columns; ++column) {
        float b[16];
        for (unsigned k = 0; k < 16; ++k) b[k] = element(called.b, column, k);
        for (int row = 0; row < 16; ++row) {
            float& d = part.d[row % 8 * 4 + column % 8 / 2][column / 8 * 4 + row / 8 * 2 + column % 2];
            float sum = called.add ? d : 0.f;
            for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k];
            d = sum;
        }
    }
}

inline void gather_part(void* const* lanes, unsigned mask) {
    must(mask == ~0u, "a product of a warpgroup without all lanes");
    const Called& called = static_cast<const Piece*>(lanes[0])->called;
    Part part{called, 0, static_cast<const Piece*>(lanes[0])->a != nullptr};
    for (int lane = 0; lane < 32; ++lane) {
        const auto& one = *static_cast<const Piece*>(lanes[lane]);
        must(one.called == called, "the lanes of a warp call different products");
        part.d[lane] = one.d;
        if (one.a != nullptr) std::memcpy(part.a[lane], one.a, sizeof(part.a[lane]));
    }
    add_product(part, multiply_part, called);
}
inline void multiply_later(float* d, const uint32_t* a, Matrix first, Matrix b, int columns, bool add) {
    Piece mine{d, a, {first, b, columns, add}};
    meet_warp(~0u, &mine, gather_part, "a product of a warpgroup");
}

inline void all_begin(void* const*, unsigned mask) { must(mask == ~0u, "products_begin without all lanes"), begin_products(); }
inline void all_commit(void* const*, unsigned mask) { must(mask == ~0u, "products_commit without all lanes"), commit_products(); }
template <int PENDING>
void all_wait(void* const*, unsigned mask) { must(mask == ~0u, "products_wait without all lanes"), finish_products(PENDING); }

}  // namespace emulator

inline uint32_t shared_address(const void* p) {
    const auto offset = static_cast<const char*>(p) - emulator::dynamic_shared();
    emulator::must(offset >= 0 && offset < (228 << 10), "an address outside of dynamic shared memory");
    return static_cast<uint32_t>(offset) + emulator::SHARED_START;
}
inline Matrix matrix_at(const void* start, uint32_t along_k, uint32_t along_rows) {
    emulator::must_align(start, 16);
    emulator::must(along_k % 16 == 0 && along_rows % 16 == 0, "a matrix in shared memory that is not one");
    const Matrix distances = static_cast<Matrix>(along_k >> 4) << 16 | static_cast<Matrix>(along_rows >> 4) << 32;
    return distances | (shared_address(start) >> 4);
}
inline Matrix matrix_of_lines(const void* start) {
    emulator::must(shared_address(start) % 1024 == 0, "a matrix of lines that starts at no multiple of 1024");
    return matrix_at(start, 16, 1024) | 1ull << 62;
}
inline Matrix moved(Matrix matrix, int bytes) {
    emulator::must(bytes % 16 == 0, "a matrix in shared memory that is not one");
    return matrix + bytes / 16;
}

inline Matrix swizzled_matrix_at(const void* start) { return matrix_at(start, 16, 512) | 2ull << 62; }

inline void products_begin() { emulator::meet_warp(~0u, nullptr, emulator::all_begin, "products_begin"); }
inline void products_commit() { emulator::meet_warp(~0u, nullptr, emulator::all_commit, "products_commit"); }
template <int PENDING>
void products_wait() { emulator::meet_warp(~0u, nullptr, emulator::all_wait<PENDING>, "products_wait"); }
inline void multiply(float (&d)[16], Matrix a, Matrix b, bool add) { emulator::multiply_later(d, nullptr, a, b, 32, add); }
inline void multiply(float (&d)[32], Matrix a, Matrix b, bool add) { emulator::multiply_later(d, nullptr, a, b, 64, add); }
inline void multiply(float (&d)[64], Matrix a, Matrix b, bool add) { emulator::multiply_later(d, nullptr, a, b, 128, add); }
inline void multiply(float (&d)[48], Matrix a, Matrix b, bool add) { emulator::multiply_later(d, nullptr, a, b, 96, add); }
inline void multiply(float (&d)[48], const uint32_t (&a)[4], Matrix b, bool add) { emulator::multiply_later(d, a, 0, b, 96, add); }
inline void multiply(float (&d)[96], Matrix a, Matrix b, bool add) { emulator::multiply_later(d, nullptr, a, b, 192, add); }
inline void multiply(float (&d)[96], const uint32_t (&a)[4], Matrix b, bool add) { emulator::multiply_later(d, a, 0, b, 192, add); }

inline void store16_if(bool wanted, void* to, uint4 v) {
    if (wanted) store16(to, v);
}
// As tests/parity/test_codec_unit_emulated.py makes it, where a GPU's driver has its own form.
struct alignas(64) TensorMap {
    const char* address;
    long long sizes[3];
    int box[3];
    char rest[128 - 8 - 24 - 12];
};
inline void tensor_copy(void* to, const TensorMap& map, int channel, int step, int row, unsigned long long* barrier) {
    static const char zeros[16] = {};
    const int parts = map.box[0] / 8;  // 16 bytes each, which change places within a row
    emulator::must((parts == 4 || parts == 8) && map.box[2] == 1, "a box that is not of 32 or 64 channels");
    emulator::must(shared_address(to) % (128 * parts) == 0, "a box that starts at no multiple of 8 of its rows");
    for (int i = 0; i < map.box[1] * parts; ++i) {
        const int at = step + i / parts, first = channel + i % parts * 8;
        const bool inside = at >= 0 && at < map.sizes[1] && first < map.sizes[0] && row >= 0 && row < map.sizes[2];
        const char* from = inside ? map.address + ((row * map.sizes[1] + at) * map.sizes[0] + first) * 2 : zeros;
        bulk_copy(static_cast<char*>(to) + (i ^ i / 8 % parts) * 16, from, 16, barrier);
    }
}
inline void arrive_some(int identity, int threads) { emulator::meet_at(identity, threads); }
template <int COUNT> void give_registers() {}
template <int COUNT> void take_registers() {}
inline float fast_sine(float v) { return std::sin(v); }
