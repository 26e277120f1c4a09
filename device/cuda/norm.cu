// Norms over rows; every statistic is a sum in strided_tree(256) order.
//
// The ladder:
// 1. *_any: a block of 256 threads a row, thread t keeps partial t; any width, stride and address.
// 2. *_rows: 32, 16 or 8 lanes a row, 16-byte loads, four under way a lane; a lane's eight neighbours are eight
//    partials, so the sum needs no shared memory, and the row waits in shared memory for its second use.
// 3. rms_norm_block: for few rows a block each, one 16-byte load a thread; squares cross over through shared memory.
#include "tree.cuh"

enum { GEMMA = 1, NATIVE = 2 };

template <int V> struct Operands {
    Raw<V> x, residual;
};

// Operands of one RMSNorm: x and, where there is one, the residual; strides in elements, results contiguous.
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
    template <int V> VT_MEMBER void value(float (&v)[V], i64 row, i64 at, const Operands<V>& raw, bool write) const {
        widen(v, raw.x, kind);
        if (residual == nullptr) return;
        float r[V];
        widen(r, raw.residual, residual_kind);
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] += r[j];
        Raw<V> sum = narrow(v, residual_kind);
        if (write) put(residual_out, row * width + at, sum, residual_kind);
        if (!(flags & NATIVE)) widen(v, sum, residual_kind);
    }

    template <int V> VT_MEMBER void finish(float (&v)[V], i64 row, i64 at, float inverse) const {
        float w[V];
        load(w, weight, at, weight_kind);
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

// Thread t's partial of a sum over the row, added up over the block.
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
        norm.value(v, row, at, norm.read<1>(row, at), true);
        return v[0] * v[0];
    });
    float inverse = inverse_root(total, (float)width, eps);
    for (i64 at = threadIdx.x; at < width; at += 256) {
        norm.value(v, row, at, norm.read<1>(row, at), false);
        norm.finish(v, row, at, inverse);
    }
}

// A row in the hands of `lanes` neighbouring lanes, `step` elements a turn, 8 a lane.
struct Lanes {
    i64 row;
    int first, step, lanes;
    bool live;
    unsigned char* stash;  // this row's copy in shared memory; a lane reads back what itself has put there

    VT_MEMBER Lanes(i64 rows, i64 width, int lanes, int kind, unsigned char* shared) : lanes(lanes) {
        int group = threadIdx.x / lanes, groups = blockDim.x / lanes;
        row = (i64)blockIdx.x * groups + group;
        live = row < rows;
        first = (threadIdx.x % lanes) * 8;
        step = lanes * 8;
        stash = shared + group * width * item_size(kind);
    }
};

#define AHEAD 4  // loads that a lane has under way

// f(i, read(i)) over the lane's groups of 8, with AHEAD reads issued before the first f.
template <class R, class F> VT_FN void each_group(const Lanes& at, i64 width, R&& read, F&& f) {
    if (!at.live) return;
    for (i64 base = at.first; base < width; base += AHEAD * at.step) {
        decltype(read(base)) raw[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (base + u * at.step < width) raw[u] = read(base + u * at.step);
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (base + u * at.step < width) f(base + u * at.step, raw[u]);
    }
}

VT_FN void add_squares(float (&p)[8], const float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) p[j] += v[j] * v[j];
}

extern "C" __global__ void __launch_bounds__(128) rms_norm_rows(RMS_NORM_PARAMETERS, i64 lanes, i64 stashed) {
    VT_SHARED(shared);
    const RmsNorm norm = RMS_NORM_ARGUMENTS;
    const Lanes at(rows, width, (int)lanes, norm.kind, shared);
    float p[8] = {}, v[8];
    auto read = [&](i64 i) { return norm.read<8>(at.row, i); };
    each_group(at, width, read, [&](i64 i, const Operands<8>& raw) {
        norm.value(v, at.row, i, raw, true);
        if (stashed) put(at.stash, i, residual ? narrow(v, norm.kind) : raw.x, norm.kind);
        add_squares(p, v);
    });
    float inverse = inverse_root(tree_of_neighbours(p, at.lanes), (float)width, eps);
    if (!at.live) return;
    for (i64 i = at.first; i < width; i += at.step) {
        if (stashed) load(v, at.stash, i, norm.kind);
        else norm.value(v, at.row, i, norm.read<8>(at.row, i), false);
        norm.finish(v, at.row, i, inverse);
    }
}

extern "C" __global__ void __launch_bounds__(1024) rms_norm_block(RMS_NORM_PARAMETERS) {
    VT_SHARED(shared);
    float* squares = (float*)shared;
    float* partials = squares + width;
    const RmsNorm norm = RMS_NORM_ARGUMENTS;
    i64 row = blockIdx.x;
    int at = threadIdx.x * 8;
    float v[8];
    if (at < width) {
        norm.value(v, row, at, norm.read<8>(row, at), true);
#pragma unroll
        for (int j = 0; j < 8; ++j) squares[at + j] = v[j] * v[j];
    }
    __syncthreads();
    for (int t = threadIdx.x; t < 256; t += blockDim.x) {
        float partial = 0.0f;
        for (int i = t; i < width; i += 256) partial += squares[i];
        partials[t] = partial;
    }
    __syncthreads();
    float inverse = inverse_root(tree_of_shared(partials), (float)width, eps);
    if (at < width) norm.finish(v, row, at, inverse);
}

// RMSNorm times a gate: ((x * inv) * w) * act(gate); without weight and gate, and with the sum for the mean, L2 norm.
struct Gated {
    const void *weight, *gate;
    void* out;
    i64 gate_stride, width;
    int weight_kind, gate_kind, out_kind;
    bool sigmoid;

    template <int V> VT_MEMBER void finish(float (&v)[V], i64 row, i64 at, float inverse) const {
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] = v[j] * inverse;
        if (gate != nullptr) {
            float w[V], z[V];
            load(w, weight, at, weight_kind);
            load(z, gate, row * gate_stride + at, gate_kind);
#pragma unroll
            for (int j = 0; j < V; ++j) v[j] = (v[j] * w[j]) * (sigmoid ? vt_sigmoid(z[j]) : vt_silu(z[j]));
        }
        store(out, row * width + at, v, out_kind);
    }
};

#define GATED_PARAMETERS                                                                                         \
    i64 rows, i64 width, const void *x, i64 x_stride, i64 kind, const void *weight, i64 weight_kind,             \
        const void *gate, i64 gate_stride, i64 gate_kind, void *out, i64 out_kind, float eps, i64 sigmoid
#define GATED_ARGUMENTS                                                                                          \
    {weight, gate, out, gate_stride, width, (int)weight_kind, (int)gate_kind, (int)out_kind, sigmoid != 0}

extern "C" __global__ void __launch_bounds__(256) gated_norm_any(GATED_PARAMETERS) {
    const Gated norm = GATED_ARGUMENTS;
    i64 row = blockIdx.x, begin = row * x_stride;
    float v[1];
    float total = row_sum(width, [&](i64 at) {
        load(v, x, begin + at, (int)kind);
        return v[0] * v[0];
    });
    float inverse = inverse_root(total, gate ? (float)width : 0.0f, eps);
    for (i64 at = threadIdx.x; at < width; at += 256) {
        load(v, x, begin + at, (int)kind);
        norm.finish(v, row, at, inverse);
    }
}

extern "C" __global__ void __launch_bounds__(128) gated_norm_rows(GATED_PARAMETERS, i64 lanes) {
    VT_SHARED(shared);
    const Gated norm = GATED_ARGUMENTS;
    const Lanes at(rows, width, (int)lanes, (int)kind, shared);
    float p[8] = {}, v[8];
    auto read = [&](i64 i) { return fetch<8>(x, at.row * x_stride + i, (int)kind); };
    each_group(at, width, read, [&](i64 i, const Raw<8>& raw) {
        put(at.stash, i, raw, (int)kind);
        widen(v, raw, (int)kind);
        add_squares(p, v);
    });
    float inverse = inverse_root(tree_of_neighbours(p, at.lanes), gate ? (float)width : 0.0f, eps);
    if (!at.live) return;
    for (i64 i = at.first; i < width; i += at.step) {
        load(v, at.stash, i, (int)kind);
        norm.finish(v, at.row, i, inverse);
    }
}

struct LayerNorm {
    const void *weight, *bias;
    void* out;
    i64 width;
    int kind, weight_kind, bias_kind;

    template <int V> VT_MEMBER void finish(float (&v)[V], i64 row, i64 at, float mean, float inverse) const {
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] = (v[j] - mean) * inverse;
        float w[V];
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

extern "C" __global__ void __launch_bounds__(128) layer_norm_rows(LAYER_NORM_PARAMETERS, i64 lanes) {
    VT_SHARED(shared);
    const LayerNorm norm = LAYER_NORM_ARGUMENTS;
    const Lanes at(rows, width, (int)lanes, (int)kind, shared);
    float p[8] = {}, v[8];
    auto read = [&](i64 i) { return fetch<8>(x, at.row * x_stride + i, (int)kind); };
    each_group(at, width, read, [&](i64 i, const Raw<8>& raw) {
        put(at.stash, i, raw, (int)kind);
        widen(v, raw, (int)kind);
#pragma unroll
        for (int j = 0; j < 8; ++j) p[j] += v[j];
    });
    float mean = tree_of_neighbours(p, at.lanes) / (float)width;
#pragma unroll
    for (int j = 0; j < 8; ++j) p[j] = 0.0f;
    for (i64 i = at.first; at.live && i < width; i += at.step) {
        load(v, at.stash, i, (int)kind);
#pragma unroll
        for (int j = 0; j < 8; ++j) p[j] += (v[j] - mean) * (v[j] - mean);
    }
    float inverse = inverse_root(tree_of_neighbours(p, at.lanes), (float)width, eps);
    if (!at.live) return;
    for (i64 i = at.first; i < width; i += at.step) {
        load(v, at.stash, i, (int)kind);
        norm.finish(v, at.row, i, mean, inverse);
    }
}
