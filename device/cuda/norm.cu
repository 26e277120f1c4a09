// Norms over rows; every statistic is a sum in strided_tree(256) order.
//
// The ladder:
// 1. *_any: a block of 256 threads a row, thread t keeps partial t; any width, stride and address.
// 2. *_rows: 32, 16 or 8 lanes a row. The whole row is sent for at once, into shared memory, where it also waits for its
//    second use; a lane's eight neighbours are eight partials, so that nothing crosses lanes before the tree. Best for
//    narrow rows. (Persistent warps that fetch the next row meanwhile were slower, 91 against 73 us at 8192 x 5120:
//    a warp's own latency is the limit, and they leave room for half as many warps.)
// 3. *_block, for wide rows: a block a row, one 16-byte load a thread; terms cross over through shared memory.
//    layer_norm_bf16_block2, for many rows: two loads a thread, so that more rows are under way on a multiprocessor.
//    (RMSNorm so made kept 58 registers, which undoes it, or spilled.)
// 4. *_bf16_*: the same, knowing that everything is bfloat16: branches on dtypes between a load and its use cost
//    latency (10 to 40 %).
#include "fast.cuh"
#include "tree.cuh"

enum { GEMMA = 1, NATIVE = 2 };

template <int V> struct Operands {
    Raw<V> x, residual;
};

struct RmsNorm {
    const void *x, *weight, *residual;
    void *residual_out, *out;
    i64 x_stride, residual_stride, width;
    int kind, weight_kind, residual_kind, flags;
    float eps;

    template <int V> VT_MEMBER Operands<V> read(i64 row, i64 at) const {
        Operands<V> raw;
        raw.x = fetch<V>(x, row * x_stride + at, kind);
        raw.residual = raw.x;
        if (residual != nullptr) raw.residual = fetch<V>(residual, row * residual_stride + at, residual_kind);
        return raw;
    }

    // What is normalised: x, or x + residual, rounded to the residual's dtype unless vLLM's native form is asked for.
    // The rounded sum takes the raw residual's place and, for `write`, is the new residual.
    template <int V> VT_MEMBER void value(float (&v)[V], i64 row, i64 at, Operands<V>& raw, bool write) const {
        widen(v, raw.x, kind);
        if (residual == nullptr) return;
        float r[V];
        widen(r, raw.residual, residual_kind);
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] += r[j];
        raw.residual = narrow(v, residual_kind);
        if (write) put(residual_out, row * width + at, raw.residual, residual_kind);
        if (!(flags & NATIVE)) widen(v, raw.residual, residual_kind);
    }

    template <int V> VT_MEMBER void finish(float (&v)[V], i64 row, i64 at, const Raw<V>& raw, float inverse) const {
        float w[V];
        widen(w, raw, weight_kind);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            float scaled = v[j] * inverse;
            if (flags & GEMMA) v[j] = scaled * (w[j] + 1.0f);
            else if (flags & NATIVE) v[j] = through(through(scaled, weight_kind) * w[j], weight_kind);
            else v[j] = scaled * w[j];
        }
        store(out, row * width + at, v, kind);
    }
};

#define RMS_NORM_PARAMETERS                                                                                      \
    i64 rows, i64 width, const void *x, i64 x_stride, i64 kind, const void *weight, i64 weight_kind,             \
        const void *residual, i64 residual_stride, i64 residual_kind, void *residual_out, void *out, float eps,  \
        i64 flags
#define RMS_NORM_ARGUMENTS                                                                                       \
    {x, weight, residual, residual_out, out, x_stride, residual_stride, width,                                   \
     (int)kind, (int)weight_kind, (int)residual_kind, (int)flags, eps}

// The common case, which the specialised kernels may assume: their branches on dtypes and flags are gone.
#define RMS_NORM_BF16 ((int)kind == BF16 && (int)weight_kind == BF16 && !((int)flags & NATIVE))
#define RMS_NORM_NAMES                                                                                           \
    rows, width, x, x_stride, kind, weight, weight_kind, residual, residual_stride, residual_kind, residual_out, \
        out, eps, flags

// Thread t's partial of a sum over the row, added up over a block of 256.
template <class F> VT_FN float row_sum(i64 width, F&& term) {
    __shared__ float partials[256];
    float partial = 0.0f;
    for (i64 at = threadIdx.x; at < width; at += 256) partial += term(at);
    __syncthreads();
    partials[threadIdx.x] = partial;
    __syncthreads();
    return tree_of_shared(partials);
}

extern "C" __global__ void __launch_bounds__(256) rms_norm_any(RMS_NORM_PARAMETERS) {
    const RmsNorm norm = RMS_NORM_ARGUMENTS;
    i64 row = blockIdx.x;
    float v[1];
    float total = row_sum(width, [&](i64 at) {
        Operands<1> raw = norm.read<1>(row, at);
        norm.value(v, row, at, raw, true);
        return v[0] * v[0];
    });
    float inverse = inverse_root(total, (float)width, eps);
    for (i64 at = threadIdx.x; at < width; at += 256) {
        Operands<1> raw = norm.read<1>(row, at);
        norm.value(v, row, at, raw, false);
        norm.finish(v, row, at, fetch<1>(weight, at, norm.weight_kind), inverse);
    }
}

// A row in the hands of `lanes` neighbouring lanes, `step` elements a turn, 8 a lane. A lane works on what itself has
// put into shared memory, so that no lane waits for another.
struct Lanes {
    i64 row;
    int width, first, step, lanes;

    VT_MEMBER Lanes(i64 rows, i64 width, int lanes) : width((int)width), lanes(lanes) {
        row = (i64)blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
        first = row < rows ? (threadIdx.x % lanes) * 8 : this->width;
        step = lanes * 8;
    }

    // Send for the row's elements at base[begin ...].
    template <int UNROLL> VT_MEMBER void stage(void* shared, const void* base, i64 begin, int kind) const {
        int item = item_size(kind);
#pragma unroll UNROLL
        for (int i = first; i < width; i += step) {
            char* to = (char*)shared + i * item;
            const char* from = (const char*)base + (begin + i) * item;
            copy_async(to, from);
            if (kind == F32) copy_async(to + 16, from + 16);
        }
    }
};

// work(at, row) on a row in shared memory, after stage(at, row) has sent for it whole.
template <class S, class W>
VT_FN void staged_row(i64 rows, i64 width, int lanes, int row_bytes, unsigned char* shared, S&& stage, W&& work) {
    unsigned char* row = shared + (threadIdx.x / lanes) * row_bytes;
    const Lanes at(rows, width, lanes);
    stage(at, row);
    copies_arrive();
    work(at, row);
}

VT_FN void add_squares(float (&p)[8], const float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) p[j] += v[j] * v[j];
}

template <int UNROLL> VT_FN void rms_norm_rows_body(RMS_NORM_PARAMETERS, i64 lanes) {
    VT_SHARED(shared);
    const RmsNorm norm = RMS_NORM_ARGUMENTS;
    const bool native = norm.flags & NATIVE;
    int x_bytes = (int)width * item_size(norm.kind);
    int row_bytes = x_bytes + (residual ? (int)width * item_size(norm.residual_kind) : 0);
    auto stage = [&](const Lanes& at, unsigned char* row) {
        at.stage<UNROLL>(row, x, at.row * x_stride, norm.kind);
        if (residual) at.stage<UNROLL>(row + x_bytes, residual, at.row * residual_stride, norm.residual_kind);
    };
    staged_row(rows, width, (int)lanes, row_bytes, shared, stage, [&](const Lanes& at, unsigned char* row) {
        float p[8] = {}, v[8];
#pragma unroll UNROLL
        for (int i = at.first; i < at.width; i += at.step) {
            Operands<8> raw;
            raw.x = fetch<8>(row, i, norm.kind);
            if (residual) raw.residual = fetch<8>(row + x_bytes, i, norm.residual_kind);
            norm.value(v, at.row, i, raw, true);
            if (residual && !native) put(row + x_bytes, i, raw.residual, norm.residual_kind);
            add_squares(p, v);
        }
        float inverse = inverse_root(tree_of_neighbours(p, at.lanes), (float)width, eps);
#pragma unroll UNROLL
        for (int i = at.first; i < at.width; i += at.step) {
            Raw<8> w = fetch<8>(weight, i, norm.weight_kind);
            if (residual && !native) {
                load(v, row + x_bytes, i, norm.residual_kind);
            } else {
                Operands<8> raw;
                raw.x = fetch<8>(row, i, norm.kind);
                if (residual) raw.residual = fetch<8>(row + x_bytes, i, norm.residual_kind);
                norm.value(v, at.row, i, raw, false);
            }
            norm.finish(v, at.row, i, w, inverse);
        }
    });
}

extern "C" __global__ void __launch_bounds__(128) rms_norm_rows(RMS_NORM_PARAMETERS, i64 lanes) {
    rms_norm_rows_body<1>(RMS_NORM_NAMES, lanes);
}

extern "C" __global__ void __launch_bounds__(128) rms_norm_bf16_rows(RMS_NORM_PARAMETERS, i64 lanes) {
    VT_ASSUME(RMS_NORM_BF16 && residual == nullptr);
    rms_norm_rows_body<4>(RMS_NORM_NAMES, lanes);
}

extern "C" __global__ void __launch_bounds__(128) rms_norm_add_bf16_rows(RMS_NORM_PARAMETERS, i64 lanes) {
    VT_ASSUME(RMS_NORM_BF16 && residual != nullptr && (int)residual_kind == BF16);
    rms_norm_rows_body<4>(RMS_NORM_NAMES, lanes);
}

// The sum over a row whose terms lie in shared memory, complete; `partials` is room for 256 more.
VT_FN float block_sum(const float* terms, float* partials, int width) {
    for (int t = threadIdx.x; t < 256; t += blockDim.x) {
        float partial = 0.0f;
        int i = t;
        for (; i + 3 * 256 < width; i += 4 * 256) {
            float a = terms[i], b = terms[i + 256], c = terms[i + 512], d = terms[i + 768];
            partial += a;
            partial += b;
            partial += c;
            partial += d;
        }
        for (; i < width; i += 256) partial += terms[i];
        partials[t] = partial;
    }
    __syncthreads();
    return tree_of_shared(partials);
}

VT_FN void rms_norm_block_body(RMS_NORM_PARAMETERS) {
    VT_SHARED(shared);
    float* terms = (float*)shared;
    const RmsNorm norm = RMS_NORM_ARGUMENTS;
    i64 row = blockIdx.x;
    int at = threadIdx.x * 8;
    float v[8], squares[8];
    Raw<8> w = {};
    if (at < width) {
        Operands<8> raw = norm.read<8>(row, at);
        w = fetch<8>(weight, at, norm.weight_kind);
        norm.value(v, row, at, raw, true);
#pragma unroll
        for (int j = 0; j < 8; ++j) squares[j] = v[j] * v[j];
        store(terms, at, squares, F32);
    }
    __syncthreads();
    float inverse = inverse_root(block_sum(terms, terms + width, (int)width), (float)width, eps);
    if (at < width) norm.finish(v, row, at, w, inverse);
}

extern "C" __global__ void __launch_bounds__(1024) rms_norm_block(RMS_NORM_PARAMETERS) {
    rms_norm_block_body(RMS_NORM_NAMES);
}

extern "C" __global__ void __launch_bounds__(1024) rms_norm_bf16_block(RMS_NORM_PARAMETERS) {
    VT_ASSUME(RMS_NORM_BF16 && residual == nullptr);
    rms_norm_block_body(RMS_NORM_NAMES);
}

extern "C" __global__ void __launch_bounds__(1024) rms_norm_add_bf16_block(RMS_NORM_PARAMETERS) {
    VT_ASSUME(RMS_NORM_BF16 && residual != nullptr && (int)residual_kind == BF16);
    rms_norm_block_body(RMS_NORM_NAMES);
}

// RMSNorm times a gate: ((x * inv) * w) * act(gate); without weight and gate, and with the sum for the mean, L2 norm.
struct Gated {
    const void* weight;
    void* out;
    i64 width;
    int weight_kind, gate_kind, out_kind;
    bool gated, sigmoid;

    // gate: where the row's gates begin.
    template <int V> VT_MEMBER void finish(float (&v)[V], i64 row, i64 at, const void* gate, float inverse) const {
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] = v[j] * inverse;
        if (gated) {
            float w[V], z[V], y[V];
            load(w, weight, at, weight_kind);
            load(z, gate, at, gate_kind);
#pragma unroll
            for (int j = 0; j < V; ++j) v[j] = v[j] * w[j];
            if (sigmoid) gate_products<false>(y, z, v, F32, out_kind);
            else gate_products<true>(y, z, v, F32, out_kind);
            store(out, row * width + at, y, out_kind);
        } else {
            store(out, row * width + at, v, out_kind);
        }
    }
};

#define GATED_PARAMETERS                                                                                         \
    i64 rows, i64 width, const void *x, i64 x_stride, i64 kind, const void *weight, i64 weight_kind,             \
        const void *gate, i64 gate_stride, i64 gate_kind, void *out, i64 out_kind, float eps, i64 sigmoid
#define GATED_ARGUMENTS                                                                                          \
    {weight, out, width, (int)weight_kind, (int)gate_kind, (int)out_kind, gate != nullptr, sigmoid != 0}

#define GATED_BF16 ((int)kind == BF16 && (int)weight_kind == BF16 && (int)gate_kind == BF16 && (int)out_kind == BF16)
#define GATED_NAMES                                                                                              \
    rows, width, x, x_stride, kind, weight, weight_kind, gate, gate_stride, gate_kind, out, out_kind, eps, sigmoid

extern "C" __global__ void __launch_bounds__(256) gated_norm_any(GATED_PARAMETERS) {
    const Gated norm = GATED_ARGUMENTS;
    i64 row = blockIdx.x, begin = row * x_stride;
    const char* gate_row = (const char*)gate + row * gate_stride * item_size(norm.gate_kind);
    float v[1];
    float total = row_sum(width, [&](i64 at) {
        load(v, x, begin + at, (int)kind);
        return v[0] * v[0];
    });
    float inverse = inverse_root(total, gate ? (float)width : 0.0f, eps);
    for (i64 at = threadIdx.x; at < width; at += 256) {
        load(v, x, begin + at, (int)kind);
        norm.finish(v, row, at, gate_row, inverse);
    }
}

template <int UNROLL> VT_FN void gated_norm_rows_body(GATED_PARAMETERS, i64 lanes) {
    VT_SHARED(shared);
    const Gated norm = GATED_ARGUMENTS;
    int x_bytes = (int)width * item_size((int)kind);
    int row_bytes = x_bytes + (gate ? (int)width * item_size(norm.gate_kind) : 0);
    auto stage = [&](const Lanes& at, unsigned char* row) {
        at.stage<UNROLL>(row, x, at.row * x_stride, (int)kind);
        if (gate) at.stage<UNROLL>(row + x_bytes, gate, at.row * gate_stride, norm.gate_kind);
    };
    staged_row(rows, width, (int)lanes, row_bytes, shared, stage, [&](const Lanes& at, unsigned char* row) {
        float p[8] = {}, v[8];
#pragma unroll UNROLL
        for (int i = at.first; i < at.width; i += at.step) {
            load(v, row, i, (int)kind);
            add_squares(p, v);
        }
        float inverse = inverse_root(tree_of_neighbours(p, at.lanes), gate ? (float)width : 0.0f, eps);
#pragma unroll UNROLL
        for (int i = at.first; i < at.width; i += at.step) {
            load(v, row, i, (int)kind);
            norm.finish(v, at.row, i, row + x_bytes, inverse);
        }
    });
}

extern "C" __global__ void __launch_bounds__(128) gated_norm_rows(GATED_PARAMETERS, i64 lanes) {
    gated_norm_rows_body<1>(GATED_NAMES, lanes);
}

extern "C" __global__ void __launch_bounds__(128) gated_norm_bf16_rows(GATED_PARAMETERS, i64 lanes) {
    VT_ASSUME(GATED_BF16 && gate != nullptr && sigmoid == 0);
    gated_norm_rows_body<4>(GATED_NAMES, lanes);
}

extern "C" __global__ void __launch_bounds__(128) l2norm_bf16_rows(GATED_PARAMETERS, i64 lanes) {
    VT_ASSUME((int)kind == BF16 && (int)out_kind == BF16 && gate == nullptr);
    gated_norm_rows_body<4>(GATED_NAMES, lanes);
}

struct LayerNorm {
    const void *weight, *bias;
    void* out;
    i64 width;
    int kind, weight_kind, bias_kind;

    template <int V> VT_MEMBER void finish(float (&v)[V], i64 row, i64 at, float mean, float inverse) const {
        float w[V];
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] = (v[j] - mean) * inverse;
        if (weight != nullptr) {
            load(w, weight, at, weight_kind);
#pragma unroll
            for (int j = 0; j < V; ++j) v[j] *= w[j];
        }
        if (bias != nullptr) {
            load(w, bias, at, bias_kind);
#pragma unroll
            for (int j = 0; j < V; ++j) v[j] += w[j];
        }
        store(out, row * width + at, v, kind);
    }
};

#define LAYER_NORM_PARAMETERS                                                                                    \
    i64 rows, i64 width, const void *x, i64 x_stride, i64 kind, const void *weight, i64 weight_kind,             \
        const void *bias, i64 bias_kind, void *out, float eps
#define LAYER_NORM_ARGUMENTS {weight, bias, out, width, (int)kind, (int)weight_kind, (int)bias_kind}

#define LAYER_NORM_BF16                                                                                          \
    ((int)kind == BF16 && (int)weight_kind == BF16 && (int)bias_kind == BF16 && weight != nullptr && bias != nullptr)
#define LAYER_NORM_NAMES rows, width, x, x_stride, kind, weight, weight_kind, bias, bias_kind, out, eps

extern "C" __global__ void __launch_bounds__(256) layer_norm_any(LAYER_NORM_PARAMETERS) {
    const LayerNorm norm = LAYER_NORM_ARGUMENTS;
    i64 row = blockIdx.x, begin = row * x_stride;
    float v[1];
    float mean = row_sum(width, [&](i64 at) {
        load(v, x, begin + at, (int)kind);
        return v[0];
    }) / (float)width;
    float total = row_sum(width, [&](i64 at) {
        load(v, x, begin + at, (int)kind);
        return (v[0] - mean) * (v[0] - mean);
    });
    float inverse = inverse_root(total, (float)width, eps);
    for (i64 at = threadIdx.x; at < width; at += 256) {
        load(v, x, begin + at, (int)kind);
        norm.finish(v, row, at, mean, inverse);
    }
}

template <int UNROLL> VT_FN void layer_norm_rows_body(LAYER_NORM_PARAMETERS, i64 lanes) {
    VT_SHARED(shared);
    const LayerNorm norm = LAYER_NORM_ARGUMENTS;
    auto stage = [&](const Lanes& at, unsigned char* row) {
        at.stage<UNROLL>(row, x, at.row * x_stride, (int)kind);
    };
    int row_bytes = (int)width * item_size((int)kind);
    staged_row(rows, width, (int)lanes, row_bytes, shared, stage, [&](const Lanes& at, unsigned char* row) {
        float p[8] = {}, squares[8] = {}, v[8];
#pragma unroll UNROLL
        for (int i = at.first; i < at.width; i += at.step) {
            load(v, row, i, (int)kind);
#pragma unroll
            for (int j = 0; j < 8; ++j) p[j] += v[j];
        }
        float mean = tree_of_neighbours(p, at.lanes) / (float)width;
#pragma unroll UNROLL
        for (int i = at.first; i < at.width; i += at.step) {
            load(v, row, i, (int)kind);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] -= mean;
            add_squares(squares, v);
        }
        float inverse = inverse_root(tree_of_neighbours(squares, at.lanes), (float)width, eps);
#pragma unroll UNROLL
        for (int i = at.first; i < at.width; i += at.step) {
            load(v, row, i, (int)kind);
            norm.finish(v, at.row, i, mean, inverse);
        }
    });
}

extern "C" __global__ void __launch_bounds__(128) layer_norm_rows(LAYER_NORM_PARAMETERS, i64 lanes) {
    layer_norm_rows_body<1>(LAYER_NORM_NAMES, lanes);
}

extern "C" __global__ void __launch_bounds__(128) layer_norm_bf16_rows(LAYER_NORM_PARAMETERS, i64 lanes) {
    VT_ASSUME(LAYER_NORM_BF16);
    layer_norm_rows_body<4>(LAYER_NORM_NAMES, lanes);
}

template <int GROUPS> VT_FN void layer_norm_block_body(LAYER_NORM_PARAMETERS) {
    VT_SHARED(shared);
    float* terms = (float*)shared;
    const LayerNorm norm = LAYER_NORM_ARGUMENTS;
    i64 row = blockIdx.x;
    Raw<8> raw[GROUPS];
    float v[8];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        int at = (g * blockDim.x + threadIdx.x) * 8;
        if (at < width) raw[g] = fetch<8>(x, row * x_stride + at, (int)kind);
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        int at = (g * blockDim.x + threadIdx.x) * 8;
        if (at >= width) continue;
        widen(v, raw[g], (int)kind);
        store(terms, at, v, F32);
    }
    __syncthreads();
    float mean = block_sum(terms, terms + width, (int)width) / (float)width;
    __syncthreads();
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        int at = (g * blockDim.x + threadIdx.x) * 8;
        if (at >= width) continue;
        widen(v, raw[g], (int)kind);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = (v[j] - mean) * (v[j] - mean);
        store(terms, at, v, F32);
    }
    __syncthreads();
    float inverse = inverse_root(block_sum(terms, terms + width, (int)width), (float)width, eps);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        int at = (g * blockDim.x + threadIdx.x) * 8;
        if (at >= width) continue;
        widen(v, raw[g], (int)kind);
        norm.finish(v, row, at, mean, inverse);
    }
}

extern "C" __global__ void __launch_bounds__(1024) layer_norm_block(LAYER_NORM_PARAMETERS) {
    layer_norm_block_body<1>(LAYER_NORM_NAMES);
}

extern "C" __global__ void __launch_bounds__(1024) layer_norm_bf16_block(LAYER_NORM_PARAMETERS) {
    VT_ASSUME(LAYER_NORM_BF16);
    layer_norm_block_body<1>(LAYER_NORM_NAMES);
}

extern "C" __global__ void __launch_bounds__(512, 3) layer_norm_bf16_block2(LAYER_NORM_PARAMETERS) {
    VT_ASSUME(LAYER_NORM_BF16);
    layer_norm_block_body<2>(LAYER_NORM_NAMES);
}
