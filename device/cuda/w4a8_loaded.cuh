// Products of e4m3 activations with weights of 4 bits on Hopper, dense and by experts, for any number of rows: stages of one
// group of 128 k. Tiles and stages: packed_loaded.cuh.
#pragma once
#include "packed_loaded.cuh"
#include "w4a8_tables.cuh"

#if VT_TILES

#ifdef __CUDACC__
// d += a b: 64 rows x 32 k of e4m3 codes from registers, the length of `d` twice over as rows of `b`.
VT_FN void multiply_codes(float (&d)[8], const unsigned (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7"
                 "}, {%8, %9, %10, %11}, %12, 1, 1, 1;\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
VT_FN void multiply_codes(float (&d)[32], const unsigned (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1;\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
VT_FN void multiply_codes(float (&d)[64], const unsigned (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1;\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
                   "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
                   "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
                   "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
                   "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#else
template <int SUMS> __attribute__((optimize("O3"))) void multiply_codes(float (&d)[SUMS], const unsigned (&a)[4], u64 b) {
    using namespace emulation;
    int lane = running->number & 31, g = lane >> 2, t = lane & 3, first = 2 * (int)(b & 15);
    const float* value = factors(0.0f);
    const u8* right = (const u8*)(b & ~15ull);
    const Operands* lanes = operands.lanes({{a[0], a[1], a[2], a[3]}, {0, 0}});
    for (int s = 0; s < SUMS; s += s & 1 ? 3 : 1) {  // sums s and s + 2 are of one token
        int token = 8 * (s >> 2) + 2 * t + (s & 1);
        for (int half = 0; half < 2; ++half) {
            float sum = d[s + 2 * half];
            for (int k = 0; k < 32; ++k) {
                unsigned code = lanes[4 * g + ((k & 15) >> 2)].a[2 * (k >> 4) + half] >> 8 * (k & 3) & 0xffu;
                sum += value[code] * value[right[token * 128 + (((first + (k >> 4)) ^ (token & 7)) << 4) + (k & 15)]];
            }
            d[s + 2 * half] = sum;
        }
    }
    operands.close();
}
#endif

// Of one expert: words, tables and scales of its columns.
struct W4a8Job {
    static constexpr int OWN = 4096 + 512;
    const char *words, *tables;
    const float *channel, *token;
    i64 columns;
    float factor[2];

    // A thread has two vectors of the words of each group of columns, and one of the tables of one.
    template <int GROUPS> struct Sender {
        const char *line[GROUPS], *beside;
        i64 columns;
        int to, beside_to;
        VT_MEMBER void send(u8* here, int chunk) const {
#pragma unroll
            for (int c = 0; c < GROUPS; ++c) {
                const char* from = line[c] + chunk * columns * 64;
                copy_async(here + c * OWN + to, from);
                copy_async(here + c * OWN + to + 2048, from + columns * 32);
            }
            if (beside != nullptr) copy_async(here + beside_to, beside + chunk * columns * 8);
        }
    };
    template <int GROUPS, class C> VT_MEMBER Sender<GROUPS> sender(int thread, C column_of) const {
        Sender<GROUPS> s;
        s.columns = columns, s.to = thread * 16;
#pragma unroll
        for (int c = 0; c < GROUPS; ++c) s.line[c] = words + column_of(c) * 16 + thread / 64 * columns * 16 + thread % 64 * 16;
        int group = thread >> 5;
        s.beside = group < GROUPS ? tables + column_of(group) * 8 + (thread & 31) * 16 : nullptr;
        s.beside_to = group * OWN + 4096 + (thread & 31) * 16;
        return s;
    }
    VT_MEMBER void begin(i64 left, int warp, int lane) {
#pragma unroll
        for (int h = 0; h < 2; ++h) factor[h] = channel[left + column(warp, lane >> 2, h)];
    }
    VT_MEMBER void unpack(unsigned (&a)[4][4], const char* mine, int warp, int lane) const {
        Table low, up;
        low.fetch(mine + 4096 + column(warp, lane >> 2, 0) * 8);
        up.fetch(mine + 4096 + column(warp, lane >> 2, 1) * 8);
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            uint2 q = *(const uint2*)(mine + s * 1024 + warp * 256 + lane * 8);
            a[s][0] = low.look_up(q.x), a[s][1] = up.look_up(q.x >> 16);
            a[s][2] = low.look_up(q.y), a[s][3] = up.look_up(q.y >> 16);
        }
    }
    template <int SUMS> VT_MEMBER void multiply(float (&sums)[SUMS], const unsigned (&a)[4], u64 rows) const {
        multiply_codes(sums, a, rows);
    }
    VT_MEMBER int column(int warp, int g, int h) const { return 16 * warp + 8 * h + g; }
    VT_MEMBER unsigned short end(float x, i64 row, bool there, i64, int h) const {
        return (unsigned short)narrow_bf16(there ? factor[h] * (token[row] * x) : 0.0f, 0.0f);
    }
};

// high: clusters side by side that share an expert's rows.
template <int ROWS, int GROUPS, int LANES, int BLOCKS>
VT_FN void w4a8_loaded(const TensorMap& rows_map, i64 rows, i64 columns, i64 depth, i64 experts, const void* words, const void* tables,
                       const float* channel, const float* token, const i64* offsets, const int* sizes, void* out, i64 high,
                       i64 length, i64 vectors, i64 stages, u8* memory) {
    constexpr int IN_CLUSTER = cluster_of(BLOCKS);
    int cluster = (int)blockIdx.x / IN_CLUSTER, rest = cluster / (int)high, rank = IN_CLUSTER == 1 ? 0 : block_of_cluster();
    int wide = IN_CLUSTER * GROUPS * 64, across = (int)((columns + wide - 1) / wide), expert = rest / across;
    if (expert >= experts) return;
    Own own = rows_of(offsets, sizes, expert, rows);
    LoadedWork work;
    work.first = own.first, work.rows = (int)own.count, work.top = (cluster - rest * (int)high) * ROWS, work.apart = (int)high * ROWS;
    work.columns = columns, work.left = (i64)(rest - expert * across) * wide + rank * GROUPS * 64;
    work.chunks = (int)(depth / GROUP), work.length = (int)length, work.stages = (int)stages, work.vectors = (int)vectors;
    if (work.top >= work.rows) return;  // as all of the cluster
    W4a8Job job;
    job.words = (const char*)words + expert * (depth / 2) * columns;
    job.tables = (const char*)tables + expert * (depth / GROUP) * columns * 8;
    job.channel = channel + expert * columns, job.token = token, job.columns = columns;
    packed_loaded<W4a8Job, ROWS, GROUPS, LANES, BLOCKS>(job, work, rows_map, (unsigned short*)out, memory);
}

#define W4A8_LOADED(NAME, ROWS, GROUPS, LANES, BLOCKS)                                                                   \
    extern "C" __global__ void CLUSTER_DIMS(BLOCKS) __launch_bounds__(128 + 128 * GROUPS * LANES, 1)                     \
        NAME(VT_MAP rows_map, i64 rows, i64 columns, i64 depth, i64 experts, const void* words, const void* tables,                   \
             const float* channel, const float* token, const i64* offsets, const int* sizes, void* out, i64 high,        \
             i64 length, i64 vectors, i64 stages) {                                                                      \
        VT_SHARED(memory);                                                                                               \
        w4a8_loaded<ROWS, GROUPS, LANES, BLOCKS>(rows_map, rows, columns, depth, experts, words, tables, channel, token,          \
                                                 offsets, sizes, out, high, length, vectors, stages, memory);            \
    }
#endif
