// A forward pass of a few rows as one persistent kernel: a list of phases, run by all multiprocessors
// together.
//
// At few rows a forward pass is nothing but reading the weights once, so memory must never pause. Here it
// does not: in every block one warp (the producer) does nothing but copy this block's share of every weight
// matrix, phase after phase, into a ring of shared memory. It waits for free room and for nothing else,
// since weights depend on nothing. The other sixteen warps (the consumers) multiply what arrives. Between
// phases all blocks meet at a barrier in global memory, and attention runs as a phase of its own; while
// consumers wait or attend, the ring fills.
//
// Sums are taken in an order that depends on the matrix alone, never on how many rows there are: a row's
// result is the same bits whatever stands beside it.
//
// Defined by the caller: RING_BYTES, and WINDOW_BYTES of it that may be on their way at once; CHUNK_UNITS, the width of a tile; MAX_CHUNKS of the input that a warp holds
// at once.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INFINITY __uint_as_float(0x7f800000u)

constexpr int MAX_ROWS = 8;
constexpr int WARPS = 8;                  // consumers
constexpr int PRODUCERS = 2;              // warps
constexpr int CONSUMERS = WARPS * 32;
constexpr int THREADS = CONSUMERS + PRODUCERS * 32;
constexpr int UNIT = CONSUMERS;           // columns: 32 for each warp
constexpr int MAX_GROUPS = 2;             // tiles' rows whose sums are kept, and then added up together
constexpr int TILE_ROWS = 16;             // rows of a tile at most: one matrix instruction
constexpr int SLOTS = 16;                 // tiles in the ring at most
constexpr int PAD = 64;                   // bytes between a tile's rows: two rows of a quarter warp's reads fill all banks
constexpr int SUM_STRIDE = 20;            // floats between tokens in the exchange of partial sums
constexpr int SUMS = MAX_ROWS * SUM_STRIDE;
constexpr int D = 128;                    // head dimension
constexpr int KEYS = 16;                  // keys per block of scores
constexpr int KEY_GROUPS = WARPS / 2;     // warps that share the keys of a split; the others have the other half of D
constexpr int MAX_QUERIES = 32;           // query rows of one key head
constexpr int Q_BYTES = D * 2 + 64;
constexpr int CACHED_BLOCKS = 64;         // blocks of keys whose place a block of the grid remembers
constexpr int PART = 36;                  // floats a thread passes on: 32 sums, 2 maxima, 2 totals

enum Kind : u32 { MATMUL = 0, ATTENTION = 1, CONTEXT = 2 };
enum Epilogue : u32 { STORE = 0, ADD = 1, SILU = 2, LOGITS = 3 };

// How a matrix is cut up: rows are dealt out to blocks, a block's rows to tiles of group_rows. Columns are cut
// into passes, whose input a warp holds at once, and those into chunks, the width of a tile. Nothing here
// depends on the rows of the pass.
struct Matrix {
    u64 kind;
    u32 n, k, epilogue, group_rows;       // rows: with SILU pairs of them
    u32 units, pass_units, chunk_units, reserved;
    const u16 *weight;                    // [n, k]; with SILU [2 n, k], gates then ups

    __device__ void rows(u32 &first, u32 &count) const {
        first = n * blockIdx.x / gridDim.x;
        count = n * (blockIdx.x + 1) / gridDim.x - first;
    }
};

struct Matmul : Matrix {
    const u16 *input;     // [rows, input_stride]
    const u16 *norm;      // [k], or null
    u16 *output;          // [rows, output_stride]; with LOGITS fp32
    u64 input_stride, output_stride;
    u16 *tap;             // with ADD: the sum once more, or null
    u64 tap_stride;
};

struct Attention {
    u64 kind, heads, kv_heads, bidirectional;
    const u16 *qkv;                       // [rows, (heads + 2 kv_heads) * D]
    const u16 *q_norm, *k_norm;           // [D]
    u16 *output;                          // [rows, heads * D]
    u16 *k_cache, *v_cache;               // [slots, kv_heads, D]
    const float *cos_sin;                 // CONTEXT: [positions, D]
    u64 stride;                           // CONTEXT: qkv holds keys and values of one layer, rows this far apart
};

union Phase {
    u64 words[16];                        // the last: whether the next phase needs nothing of this one
    Matmul matmul;
    Attention attention;
};

struct Rows {
    const int *slots;                     // [sequences]
    const int *num_computed;              // [slots]
    const int *tables;                    // [slots, table_stride]
    const long long *kv_slots;            // [rows], negative: not written
    const int *positions;                 // [rows], of the rotation
    const float *cos_sin;                 // [positions, D]
    long long table_stride;
    int num_rows, num_seqs, span, block_size, kv_heads, splits;  // span: rows of a sequence
};

struct Scratch {
    u32 *barrier;                         // [1], 0 between launches
    u32 *arrived;                         // [sequences * kv_heads], 0 between launches
    float *parts;                         // [sequences * kv_heads * splits, 4, 32, 32]
    float *peaks;                         // [sequences * kv_heads * splits, 2, 4, 32]
};

// ---------------------------------------------------------------- instructions

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra out;\n"
        "bra again;\n"
        "out:\n"
        "}" ::"r"(bar), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy_row(u32 to, const void *from, u32 bytes, u32 bar, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}

// Sixteen bytes to shared memory, in the background; `copied` waits for this thread's.
__device__ __forceinline__ void copy16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copied() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

__device__ __forceinline__ uint4 shared_load(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

// Loads are in order with the barriers, which is all the order they need.
//
// Written during this launch by other blocks: read past the first-level cache, which is not coherent.
__device__ __forceinline__ uint4 fresh_load(const void *p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ u32 fresh_load32(const void *p) {
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

__device__ __forceinline__ float fresh_float(const float *p) { return __uint_as_float(fresh_load32(p)); }

__device__ __forceinline__ u16 fresh_load16(const void *p) {
    u16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float single(u16 value) { return __uint_as_float((u32)value << 16); }

__device__ __forceinline__ u16 round16(float x) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ u32 pack(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ float power2(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// ---------------------------------------------------------------- how a matrix is divided

// Tiles of any size, one behind the other; one that would run over the end begins at the start again. Tile
// after tile takes the next pair of barriers.
struct Ring {
    u32 base, full, empty;  // shared addresses
    u32 offset, slot, parity;

    // Bytes from the last tile's end to the end of one of `bytes` more.
    __device__ u32 needs(u32 bytes) const { return offset + bytes > RING_BYTES ? RING_BYTES - offset + bytes : bytes; }
    __device__ u32 place(u32 bytes) {
        if (offset + bytes > RING_BYTES) offset = 0;
        const u32 at = base + offset;
        offset += bytes;
        return at;
    }
    __device__ void advance() {
        if (++slot == SLOTS) {
            slot = 0;
            parity ^= 1;
        }
    }
    __device__ u32 full_bar() const { return full + slot * 8; }
    __device__ u32 empty_bar() const { return empty + slot * 8; }
};

// ---------------------------------------------------------------- producer

// All tiles of this block, in the order in which they are consumed: MAX_GROUPS at a time, pass by pass.
struct Walk {
    const Matrix *next;        // matrices are a phase apart
    int left;                  // matrices after `upcoming`
    Matrix m, upcoming;        // read one ahead, so that nobody waits for them
    u32 first, count, groups;
    u32 base, pass_start, pass_end, group, start;  // in rows and units
    bool done;

    __device__ Walk(const Phase *matrices, int count) {
        next = &matrices[0].matmul;
        left = count;
        done = false;
        load();
        enter();
    }
    __device__ void load() {
        if (left > 0) upcoming = *next;
        next = (const Matrix *)((const char *)next + sizeof(Phase));
        left--;
    }
    __device__ void enter() {
        if (left < 0) {
            done = true;
            return;
        }
        m = upcoming;
        load();
        m.rows(first, count);
        base = group = 0;
        pass(0);
    }
    __device__ void pass(u32 from) {
        start = pass_start = from;
        pass_end = min(from + m.pass_units, m.units);
    }
    __device__ void advance() {
        start += m.chunk_units;
        if (start < pass_end) return;
        start = pass_start;
        group += m.group_rows;
        const u32 end = min(base + MAX_GROUPS * m.group_rows, count);
        if (group < end) return;
        group = base;
        if (pass_end < m.units) {
            pass(pass_end);
        } else if (end < count) {
            group = base = end;
            pass(0);
        } else {
            enter();
        }
    }
    __device__ u32 tile_rows() const { return min(m.group_rows, count - group); }
    __device__ u32 row_bytes() const { return min(min(start + m.chunk_units, pass_end) * UNIT, m.k) * 2 - start * UNIT * 2; }
    __device__ u32 rows() const { return tile_rows() << (m.epilogue == SILU); }
    // Of a pair's two halves, gates stand before ups.
    __device__ u32 slot_row(u32 r) const { return m.epilogue == SILU && r >= 8 ? tile_rows() + r - 8 : r; }
    // Where the part of row r of the tile lies; null where the tile has no such row.
    __device__ const u16 *row(u32 r) const {
        const bool pairs = m.epilogue == SILU;
        const u32 within = pairs ? r & 7 : r;
        if (within >= tile_rows() || r >= TILE_ROWS) return nullptr;
        const u32 row = first + group + within + (pairs && r >= 8 ? m.n : 0);
        return m.weight + (u64)row * m.k + start * UNIT;
    }
};

// A copy is issued lane by lane, so that one warp could not keep up: each of several has its rows of a tile.
__device__ void produce(const Phase *matrices, int count, Ring ring, u32 *sizes) {
    const int producer = (threadIdx.x - CONSUMERS) >> 5, lane = threadIdx.x & 31;
    const u32 r = producer + lane * PRODUCERS;  // row of the tile
    u64 policy;  // weights are read once: let everything else stay in the cache
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    sizes += producer * SLOTS;
    // The oldest tile that may still be there, and the oldest that may still be on its way. Of those there are no
    // more than keep memory busy: all else that blocks read and write queues behind them.
    Ring tail = ring, landing = ring;
    u32 used = 0, tiles = 0, flying = 0, flying_tiles = 0;
    auto land = [&] {
        flying -= sizes[landing.slot];
        flying_tiles--;
        landing.advance();
    };
    for (Walk walk(matrices, count); !walk.done; walk.advance()) {
        const u32 rows = walk.rows(), row_bytes = walk.row_bytes(), bytes = rows * (row_bytes + PAD), needs = ring.needs(bytes);
        while (used + needs > RING_BYTES || tiles == SLOTS) {
            barrier_wait(tail.empty_bar(), tail.parity);
            if (flying_tiles == tiles) land();
            used -= sizes[tail.slot];
            tiles--;
            tail.advance();
        }
        while (flying && flying + needs > WINDOW_BYTES) {
            barrier_wait(landing.full_bar(), landing.parity);
            land();
        }
        used += needs;
        flying += needs;
        flying_tiles++;
        tiles++;
        __syncwarp();
        if (lane == 0) {
            sizes[ring.slot] = needs;
            if (producer == 0) barrier_expect(ring.full_bar(), rows * row_bytes);
        }
        __syncwarp();
        const u32 at = ring.place(bytes);
        if (const u16 *from = walk.row(r)) copy_row(at + walk.slot_row(r) * (row_bytes + PAD), from, row_bytes, ring.full_bar(), policy);
        ring.advance();
    }
}

// ---------------------------------------------------------------- matrix products

struct Block {  // what consumers carry through the phases
    Ring ring;
    float *sums;        // shared, [2][MAX_GROUPS][WARPS][SUMS]
    float *squares;     // shared, [WARPS][MAX_ROWS]
    u32 norm;           // shared address, this phase's norm weight
    u32 exchanges;
    int num_rows;
    float eps;
    float scale;        // the norm's, of the token this thread finishes; negative: not known yet
};

typedef u32 Input[MAX_CHUNKS][CHUNK_UNITS][4];

// Input columns of this warp's 32 in each unit, for the token this lane serves. A lane holds eight
// neighbours, so that it loads 16 bytes: the columns of two matrix instructions are dealt out accordingly,
// to weights and inputs alike.
//
// An RMSNorm is applied here but for its scale, which is one number per token and comes in at the end: the
// sum of squares is collected on the way, as the diagonal of X X^T, and the weight multiplied in.
__device__ __forceinline__ void load_input(Input &x, const Matmul &m, u32 first, Block &b) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int token = lane >> 2;
    const u32 own = warp * 32 + (lane & 3) * 8, end = min(first + m.pass_units, m.units);
    const u16 *row = m.input + token * m.input_stride + own;
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < CHUNK_UNITS; i++) {
            const u32 unit = first + c * m.chunk_units + i;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (i < m.chunk_units && unit < end && token < b.num_rows) v = fresh_load(row + unit * UNIT);
            x[c][i][0] = v.x, x[c][i][1] = v.y, x[c][i][2] = v.z, x[c][i][3] = v.w;
        }
    if (!m.norm) return;
    float square[4][4] = {};  // four chains, to be short
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < CHUNK_UNITS; i++) {
            u32(&v)[4] = x[c][i];
            mma(square[i & 1], v[0], 0, v[1], 0, v[0], v[1]);
            mma(square[2 + (i & 1)], v[2], 0, v[3], 0, v[2], v[3]);
            const u32 unit = min(c * m.chunk_units + i, m.units - 1);  // beyond the last the input is zero
            const uint4 w = shared_load(b.norm + (unit * UNIT + own) * 2);
            v[0] = multiply_pair(v[0], w.x);
            v[1] = multiply_pair(v[1], w.y);
            v[2] = multiply_pair(v[2], w.z);
            v[3] = multiply_pair(v[3], w.w);
        }
    if ((lane & 3) == token >> 1) {
        const int e = token & 1;
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < 4; i++) total += e ? square[i][1] : square[i][0];
        b.squares[warp * MAX_ROWS + token] = total;
    }
    b.scale = -1.f;
}

// The norm's scale of a token; all warps have loaded their input, and met since.
__device__ __forceinline__ float norm_scale(const Matmul &m, int token, Block &b) {
    if (!m.norm) return 1.f;
    if (b.scale < 0.f) {
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += b.squares[w * MAX_ROWS + token];
        b.scale = rsqrtf(total / (float)m.k + b.eps);
    }
    return b.scale;
}

// One row group over the chunks of a pass, as they arrive. `rows` of pairs count both.
__device__ __forceinline__ void multiply(float (&sum)[4], const Input &x, u32 units, const Matmul &m, u32 rows, Ring &ring) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    // The rows of the matrix instruction's two halves that this lane holds. It has sixteen; what the tile does
    // not have of them is read from its last row, and not used.
    const u32 upper_row = min((u32)lane >> 2, rows - 1), lower_row = min((m.epilogue == SILU ? rows / 2 : 8) + ((u32)lane >> 2), rows - 1);
    float other[4] = {};
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; c++) {
        if (c * m.chunk_units >= units) break;
        const u32 width = min(m.chunk_units, units - c * m.chunk_units);
        const u32 pitch = width * UNIT * 2 + PAD;
        barrier_wait(ring.full_bar(), ring.parity);
        const u32 at = ring.place(rows * pitch) + warp * 64 + (lane & 3) * 16;
        uint4 upper[CHUNK_UNITS], lower[CHUNK_UNITS];
        auto load = [&](int i) {
            const u32 column = at + min((u32)i, width - 1) * UNIT * 2;  // beyond the last the input is zero
            upper[i] = shared_load(column + upper_row * pitch);
            lower[i] = shared_load(column + lower_row * pitch);
        };
        constexpr int LEAD = 2;  // units that are on their way while one is multiplied
#pragma unroll
        for (int i = 0; i < LEAD; i++) load(i);
#pragma unroll
        for (int i = 0; i < CHUNK_UNITS; i++) {
            if (i + LEAD < CHUNK_UNITS) load(i + LEAD);
            mma(sum, upper[i].x, lower[i].x, upper[i].y, lower[i].y, x[c][i][0], x[c][i][1]);
            mma(other, upper[i].z, lower[i].z, upper[i].w, lower[i].w, x[c][i][2], x[c][i][3]);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.empty_bar());
        ring.advance();
    }
#pragma unroll
    for (int e = 0; e < 4; e++) sum[e] += other[e];
}

// Registers cannot be indexed, only chosen.
__device__ __forceinline__ void take(float (&sum)[4], const float (&sums)[MAX_GROUPS][4], u32 g) {
#pragma unroll
    for (int i = 0; i < MAX_GROUPS; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) sum[e] = i == 0 || g == i ? sums[i][e] : sum[e];
}
__device__ __forceinline__ void put(float (&sums)[MAX_GROUPS][4], const float (&sum)[4], u32 g) {
#pragma unroll
    for (int i = 0; i < MAX_GROUPS; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[i][e] = g == i ? sum[e] : sums[i][e];
}

__device__ __forceinline__ float collect(const float *sums) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += sums[w * SUMS];
    return total;
}

// Add up the warps' partial sums of MAX_GROUPS row groups and write the results: half of the warps does each.
__device__ __forceinline__ void finish(const float (&sums)[MAX_GROUPS][4], const Matmul &m, u32 row, u32 count, Block &b) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int index = threadIdx.x & 127, group = threadIdx.x >> 7, token = m.epilogue == SILU ? index >> 3 : index >> 4;
    const u32 r = m.epilogue == SILU ? index & 7 : index & 15, within = group * m.group_rows + r;
    const bool mine = token < b.num_rows && r < m.group_rows && within < count;
    const u64 to = token * m.output_stride + row + within;
    u16 before = 0;  // asked for early: its way is as long as the exchange
    if (mine && m.epilogue == ADD) before = fresh_load16(m.output + to);
    float *exchange = b.sums + (b.exchanges++ & 1) * MAX_GROUPS * WARPS * SUMS;
#pragma unroll
    for (int g = 0; g < MAX_GROUPS; g++) {
        float *at = exchange + (g * WARPS + warp) * SUMS + 2 * (lane & 3) * SUM_STRIDE + (lane >> 2);
        at[0] = sums[g][0];
        at[SUM_STRIDE] = sums[g][1];
        at[8] = sums[g][2];
        at[SUM_STRIDE + 8] = sums[g][3];
    }
    consumers_sync();  // also: what was read from the other half is read
    if (!mine) return;
    const float *from = exchange + group * WARPS * SUMS + token * SUM_STRIDE + r;
    const float scale = norm_scale(m, token, b);
    const float value = single(round16(scale * collect(from)));
    if (m.epilogue == STORE) {
        m.output[to] = round16(value);
    } else if (m.epilogue == LOGITS) {
        ((float *)m.output)[to] = value;
    } else if (m.epilogue == SILU) {
        const float up = single(round16(scale * collect(from + 8)));
        const float silu = single(round16(value / (1.f + __expf(-value))));
        m.output[to] = round16(silu * up);
    } else {
        const u16 total = round16(single(before) + value);
        m.output[to] = total;
        if (m.tap) m.tap[token * m.tap_stride + row + within] = total;
    }
}

__device__ __forceinline__ void multiply_phase(const Matmul m, Block &b) {
    Input x;
    load_input(x, m, 0, b);
    u32 first, count;
    m.rows(first, count);
    const bool one_pass = m.pass_units >= m.units;
    for (u32 base = 0; base < count; base += MAX_GROUPS * m.group_rows) {
        const u32 groups = min((u32)MAX_GROUPS, (count - base + m.group_rows - 1) / m.group_rows);
        float sums[MAX_GROUPS][4] = {};
        for (u32 start = 0; start < m.units; start += m.pass_units) {
#pragma unroll 1
            for (u32 g = 0; g < groups; g++) {
                float sum[4];
                take(sum, sums, g);
                const u32 rows = min(m.group_rows, count - base - g * m.group_rows) << (m.epilogue == SILU);
                multiply(sum, x, min(m.pass_units, m.units - start), m, rows, b.ring);
                put(sums, sum, g);
            }
            const u32 next = start + m.pass_units;
            if (!one_pass) load_input(x, m, next < m.units ? next : 0, b);
        }
        finish(sums, m, first + base, count - base, b);
    }
}

// ---------------------------------------------------------------- attention

// A block of the grid has one sequence, one key head and every splits-th block of sixteen keys, the same in
// every layer: what it needs to know of them is read once.
struct Item {
    int seq, kv_head, split, computed, blocks;
    bool mine;                   // whether the block has keys at all
    const int *table;
    const float *angles;         // shared, [span, D]
    const long long *kv_slots;   // shared, [span]
    const int *block_ids;        // shared, [CACHED_BLOCKS], of this block's blocks of keys, in order

    __device__ Item(const Rows &rows, float *angles_out, long long *slots_out, int *ids_out) {
        const int per_seq = rows.kv_heads * rows.splits, tid = threadIdx.x;
        mine = (int)blockIdx.x < rows.num_seqs * per_seq;
        seq = blockIdx.x / per_seq;
        kv_head = blockIdx.x / rows.splits % rows.kv_heads;
        split = blockIdx.x % rows.splits;
        angles = angles_out;
        kv_slots = slots_out;
        block_ids = ids_out;
        blocks = computed = 0;
        table = rows.tables;
        if (!mine) return;
        const int slot = rows.slots[seq];
        table += slot * rows.table_stride;
        computed = rows.num_computed[slot];
        blocks = (computed + rows.span + KEYS - 1) / KEYS;
        mine = split < blocks;
        if (tid < rows.span) slots_out[tid] = rows.kv_slots[seq * rows.span + tid];
        const int own = (blocks - split + rows.splits - 1) / rows.splits;
        for (int i = tid; i < own && i < CACHED_BLOCKS; i += CONSUMERS) ids_out[i] = table[(split + i * rows.splits) * KEYS / rows.block_size];
        for (int i = tid; i < rows.span * D; i += CONSUMERS)
            angles_out[i] = rows.cos_sin[(u64)rows.positions[seq * rows.span + i / D] * D + i % D];
    }
    // Where this block's i-th block of keys lies in a cache, in elements.
    __device__ long long keys(const Rows &rows, int i) const {
        const int kpos = (split + i * rows.splits) * KEYS;
        const long long id = i < CACHED_BLOCKS ? block_ids[i] : table[kpos / rows.block_size];
        return ((id * rows.block_size + kpos % rows.block_size) * rows.kv_heads + kv_head) * D;
    }
    // Bring old keys and values of a layer into the cache; new ones are still to be written.
    __device__ void prefetch(const Rows &rows, const Attention &a) const {
        if (!mine) return;
        const int own = (computed / KEYS - split + rows.splits - 1) / rows.splits;
        for (int line = threadIdx.x; line < own * 4 * KEYS; line += CONSUMERS) {
            const u16 *cache = line & 1 ? a.v_cache : a.k_cache;
            const u16 *at = cache + keys(rows, line / (4 * KEYS)) + (line >> 2) % KEYS * rows.kv_heads * D + (line >> 1 & 1) * 64;
            asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
        }
    }
};

// This lane's elements of a head [D]: 2 lane, 2 lane + 1, and the same + D / 2.
struct Head {
    u32 low, high;

    __device__ void load(const u16 *head) {
        const int lane = threadIdx.x & 31;
        low = fresh_load32(head + 2 * lane);
        high = fresh_load32(head + D / 2 + 2 * lane);
    }
    __device__ void store(u16 *head) const {
        const int lane = threadIdx.x & 31;
        *(u32 *)(head + 2 * lane) = low;
        *(u32 *)(head + D / 2 + 2 * lane) = high;
    }
    // Norm and rotation, rounded where the unfused ops round.
    __device__ void rotate(const u16 *weight, const float *angles, float eps) {
        const int lane = threadIdx.x & 31;
        float square = ::low(low) * ::low(low) + ::high(low) * ::high(low) + ::low(high) * ::low(high) + ::high(high) * ::high(high);
#pragma unroll
        for (int step = 16; step; step >>= 1) square += __shfl_xor_sync(~0u, square, step);
        const float scale = 1.f / sqrtf(square / D + eps);
        const u32 w1 = *(const u32 *)(weight + 2 * lane), w2 = *(const u32 *)(weight + D / 2 + 2 * lane);
        u32 n1 = pack(::low(low) * scale, ::high(low) * scale), n2 = pack(::low(high) * scale, ::high(high) * scale);
        n1 = pack(::low(n1) * ::low(w1), ::high(n1) * ::high(w1));
        n2 = pack(::low(n2) * ::low(w2), ::high(n2) * ::high(w2));
        const float2 cosine = *(const float2 *)(angles + 2 * lane), sine = *(const float2 *)(angles + D / 2 + 2 * lane);
        low = pack(::low(n1) * cosine.x - ::low(n2) * sine.x, ::high(n1) * cosine.y - ::high(n2) * sine.y);
        high = pack(::low(n2) * cosine.x + ::low(n1) * sine.x, ::high(n2) * cosine.y + ::high(n1) * sine.y);
    }
};

// Partial attention of 16 queries over half of the head dimension: sums, and per row the peak and total.
struct Part {
    float sum[8][4];
    float peak[2], total[2];

    __device__ void clear() {
#pragma unroll
        for (int t = 0; t < 8; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[t][e] = 0.f;
        peak[0] = peak[1] = -INFINITY;
        total[0] = total[1] = 0.f;
    }
    __device__ void put(float *to) const {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < 32; i++) to[i * 32 + lane] = sum[i >> 2][i & 3];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            to[(32 + r) * 32 + lane] = peak[r];
            to[(34 + r) * 32 + lane] = total[r];
        }
    }
    __device__ void merge(const float *from) {
        const int lane = threadIdx.x & 31;
        float mine[2], theirs[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float other = from[(32 + r) * 32 + lane];
            const float both = fmaxf(peak[r], other);
            mine[r] = peak[r] == -INFINITY ? 0.f : power2(peak[r] - both);
            theirs[r] = other == -INFINITY ? 0.f : power2(other - both);
            total[r] = total[r] * mine[r] + from[(34 + r) * 32 + lane] * theirs[r];
            peak[r] = both;
        }
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int r = (i & 3) >> 1;
            sum[i >> 2][i & 3] = sum[i >> 2][i & 3] * mine[r] + from[i * 32 + lane] * theirs[r];
        }
    }
};

// Keys kpos .. kpos + 15 of one sequence. Scores are Q K^T with the head dimension dealt out in eights, as
// in the matrix products; values are dealt out so that a lane reads 16 neighbouring bytes of four keys.
__device__ __forceinline__ void attend_block(Part (&parts)[2], int tiles, u32 queries, const u16 *keys, const u16 *values, long long key_stride, int half, int kpos, const int (&last)[2][2]) {
    const int lane = threadIdx.x & 31, quad = lane >> 2, j = lane & 3;
    const float scale = 0.08838834764831845f * 1.4426950408889634f;  // 1 / sqrt(D), and to base 2
    const u16 *key = keys + quad * key_stride + j * 8;
    uint4 k[2][4];
#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
        for (int c = 0; c < 4; c++) k[u][c] = *(const uint4 *)(key + u * 8 * key_stride + c * 32);
    uint4 v[4];
    const u16 *value = values + 2 * j * key_stride + half * (D / 2) + quad * 8;
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = *(const uint4 *)(value + ((i >> 1) * 8 + (i & 1)) * key_stride);
    const u32 v0[4] = {v[0].x, v[0].y, v[0].z, v[0].w}, v1[4] = {v[1].x, v[1].y, v[1].z, v[1].w};
    const u32 v2[4] = {v[2].x, v[2].y, v[2].z, v[2].w}, v3[4] = {v[3].x, v[3].y, v[3].z, v[3].w};
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        if (tile >= tiles) break;
        Part &part = parts[tile];
        float score[2][4] = {};
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const u32 at = queries + (tile * 16 + quad) * Q_BYTES + c * 64 + j * 16;
            const uint4 upper = shared_load(at), lower = shared_load(at + 8 * Q_BYTES);
#pragma unroll
            for (int u = 0; u < 2; u++) {
                mma(score[u], upper.x, lower.x, upper.y, lower.y, k[u][c].x, k[u][c].y);
                mma(score[u], upper.z, lower.z, upper.w, lower.w, k[u][c].z, k[u][c].w);
            }
        }
        float fade[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float peak = -INFINITY;
#pragma unroll
            for (int u = 0; u < 2; u++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &s = score[u][2 * r + e];
                    s = kpos + u * 8 + 2 * j + e <= last[tile][r] ? s * scale : -INFINITY;
                    peak = fmaxf(peak, s);
                }
            peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
            peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
            peak = fmaxf(peak, part.peak[r]);
            const float base = peak == -INFINITY ? 0.f : peak;  // nothing visible yet
            fade[r] = power2(part.peak[r] - base);
            part.peak[r] = peak;
            float total = 0.f;
#pragma unroll
            for (int u = 0; u < 2; u++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &s = score[u][2 * r + e];
                    s = power2(s - base);
                    total += s;
                }
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            part.total[r] = part.total[r] * fade[r] + total;
        }
        const u32 p[4] = {pack(score[0][0], score[0][1]), pack(score[0][2], score[0][3]), pack(score[1][0], score[1][1]), pack(score[1][2], score[1][3])};
#pragma unroll
        for (int t = 0; t < 8; t++) {
#pragma unroll
            for (int e = 0; e < 4; e++) part.sum[t][e] *= fade[e >> 1];
            const u32 pick = t & 1 ? 0x7632u : 0x5410u;
            mma(part.sum[t], p[0], p[1], p[2], p[3], __byte_perm(v0[t >> 1], v1[t >> 1], pick), __byte_perm(v2[t >> 1], v3[t >> 1], pick));
        }
    }
}

// A meeting of blocks: what was written before one arrives is seen by who has awaited all.
__device__ __forceinline__ void arrive(u32 *counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ void await(const u32 *counter, u32 target) {
    u32 seen;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    } while (seen < target);
}

// Where a key is added up does not depend on which rows are new: blocks of keys are counted from the
// sequence's start and dealt out in turn to splits, and within a split to warps. The splits of a head meet when
// all have their part, and put the parts together.
__device__ __forceinline__ void attention_phase(const Attention a, const Rows &rows, const Item &item, const Scratch &scratch, const u16 *norms, u32 &arrivals, Block &b, char *shared) {
    if (!item.mine) return;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int kv_heads = rows.kv_heads, group = (int)a.heads / kv_heads, span = rows.span, splits = rows.splits;
    const int active = min(splits, item.blocks);
    const int inverse = 1024 / group + 1;  // q / group for the few there are
    auto token_of = [&](int q) { return q * inverse >> 10; };
    const int queries = span * group, tiles = (queries + 15) / 16;
    const u32 width = ((u32)a.heads + 2 * kv_heads) * D;
    const u16 *qkv = a.qkv + item.seq * span * width;
    char *query_rows = shared;
    float *parts = (float *)shared;  // in the queries' place, once they are done with

    constexpr int PER_WARP = MAX_QUERIES / WARPS;
    Head heads[PER_WARP], key, value;
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
        const int q = min(warp + i * WARPS, queries - 1), t = token_of(q);
        heads[i].load(qkv + t * width + (item.kv_head * group + q - t * group) * D);
    }
    const int t = WARPS - 1 - warp;  // a row for each warp; the split that reads a new key writes it
    const bool writes = t < span && (item.computed + t) / KEYS % splits == item.split && item.kv_slots[t] >= 0;
    if (writes) {
        key.load(qkv + t * width + ((u32)a.heads + item.kv_head) * D);
        value.load(qkv + t * width + ((u32)a.heads + kv_heads + item.kv_head) * D);
    }
    if (span == 1) {
        heads[0].rotate(norms, item.angles, b.eps);
    } else {
#pragma unroll
        for (int i = 0; i < PER_WARP; i++) heads[i].rotate(norms, item.angles + token_of(min(warp + i * WARPS, queries - 1)) * D, b.eps);
    }
#pragma unroll
    for (int i = 0; i < PER_WARP; i++)
        if (warp + i * WARPS < queries) heads[i].store((u16 *)(query_rows + (warp + i * WARPS) * Q_BYTES));
    if (writes) {
        key.rotate(norms + D, item.angles + t * D, b.eps);
        const u64 at = ((u64)item.kv_slots[t] * kv_heads + item.kv_head) * D;
        key.store(a.k_cache + at);
        value.store(a.v_cache + at);
    }
    consumers_sync();

    const int half = warp / KEY_GROUPS, share = warp % KEY_GROUPS;
    Part part[2];
    int last[2][2];
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        part[tile].clear();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int query = tile * 16 + (lane >> 2) + 8 * r;
            last[tile][r] = item.computed + (a.bidirectional ? span - 1 : min(token_of(query), span - 1));
        }
    }
    const long long key_stride = (long long)kv_heads * D;
    const int own = (item.blocks - item.split + splits - 1) / splits;
    for (int i = share; i < own; i += KEY_GROUPS) {
        const long long at = item.keys(rows, i);
        attend_block(part, tiles, shared_address(query_rows), a.k_cache + at, a.v_cache + at, key_stride, half, (item.split + i * splits) * KEYS, last);
    }
    if (own > 1) consumers_sync();  // more than one warp of a half had keys
    for (int step = KEY_GROUPS / 2; step && own > 1; step >>= 1) {
        const bool gives = share >= step && share < 2 * step, takes = share < step;
        float *exchange = parts + (half * (KEY_GROUPS / 2) + (share & (step - 1))) * PART * 32;
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            if (tile >= tiles) break;
            if (gives) part[tile].put(exchange);
            consumers_sync();
            if (takes) part[tile].merge(exchange);
            consumers_sync();
        }
    }
    const int head_item = item.seq * kv_heads + item.kv_head;
    if (share == 0) {
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            if (tile >= tiles) break;
            float *to = scratch.parts + ((u64)(head_item * splits + item.split) * 4 + tile * 2 + half) * 1024;
#pragma unroll
            for (int i = 0; i < 32; i++) to[i * 32 + lane] = part[tile].sum[i >> 2][i & 3];
            if (half == 0) {
                float *peaks = scratch.peaks + ((u64)(head_item * splits + item.split) * 2 + tile) * 128;
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    peaks[r * 32 + lane] = part[tile].peak[r];
                    peaks[(2 + r) * 32 + lane] = part[tile].total[r];
                }
            }
        }
    }
    consumers_sync();
    arrivals += active;
    if (threadIdx.x == 0) {
        arrive(scratch.arrived + head_item);
        await(scratch.arrived + head_item, arrivals);
    }
    consumers_sync();
    // Each of these blocks now puts its share of the sums together.
    constexpr int AT_ONCE = 16;
    const float *peaks = scratch.peaks + (u64)head_item * splits * 256, *sums = scratch.parts + (u64)head_item * splits * 4096;
#pragma unroll 1
    for (int at = item.split * CONSUMERS + threadIdx.x; at < tiles * 2048; at += active * CONSUMERS) {
        const int tile = at >> 11, side = at >> 10 & 1, i = at >> 5 & 31, r = i >> 1 & 1;
        const int query = tile * 16 + (lane >> 2) + 8 * r;
        if (query >= queries) continue;
        const float *peaks_at = peaks + tile * 128 + r * 32 + lane;
        float peak = -INFINITY, total = 0.f, sum = 0.f;
#pragma unroll 1
        for (int s0 = 0; s0 < active; s0 += AT_ONCE) {
            float peak_of[AT_ONCE], total_of[AT_ONCE], sum_of[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                const bool there = s0 + k < active;
                peak_of[k] = there ? fresh_float(peaks_at + (s0 + k) * 256) : -INFINITY;
                total_of[k] = there ? fresh_float(peaks_at + (s0 + k) * 256 + 64) : 0.f;
                sum_of[k] = there ? fresh_float(sums + (s0 + k) * 4096 + at) : 0.f;
            }
            float both = peak;
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) both = fmaxf(both, peak_of[k]);
            const float fade = peak == -INFINITY ? 0.f : power2(peak - both);
            peak = both;
            total *= fade;
            sum *= fade;
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                const float weight = peak_of[k] == -INFINITY ? 0.f : power2(peak_of[k] - peak);
                total += weight * total_of[k];
                sum += weight * sum_of[k];
            }
        }
        const int d = side * (D / 2) + (2 * (lane & 3) + (i & 1)) * 8 + (i >> 2);
        const int t = token_of(query);
        a.output[((u64)(item.seq * span + t) * a.heads + item.kv_head * group + query - t * group) * D + d] = round16(sum / total);
    }
}

// Draft K/V of context rows: one layer's keys and values of every row, normed, rotated and written.
__device__ __forceinline__ void context_phase(const Attention a, const Rows &rows, const Block &b) {
    const int kv_heads = (int)a.kv_heads;
    for (int i = blockIdx.x * WARPS + (threadIdx.x >> 5); i < rows.num_rows * kv_heads; i += gridDim.x * WARPS) {
        const int row = i / kv_heads, kv_head = i % kv_heads;
        const long long slot = rows.kv_slots[row];
        if (slot < 0) continue;
        Head key, value;
        key.load(a.qkv + row * a.stride + kv_head * D);
        value.load(a.qkv + row * a.stride + (kv_heads + kv_head) * D);
        key.rotate(a.k_norm, a.cos_sin + (u64)rows.positions[row] * D, b.eps);
        const u64 at = ((u64)slot * kv_heads + kv_head) * D;
        key.store(a.k_cache + at);
        value.store(a.v_cache + at);
    }
}

// ---------------------------------------------------------------- the kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1)
run_phases(const Phase *phases, int num_phases, const Phase *matrices, int num_matrices, Rows rows, Scratch scratch, float eps) {
    extern __shared__ __align__(128) char shared[];
    __shared__ u64 barriers[2 * SLOTS];
    __shared__ u32 sizes[PRODUCERS * SLOTS];
    __shared__ float squares[WARPS * MAX_ROWS];
    __shared__ __align__(128) Phase current[2];
    __shared__ __align__(16) u16 head_norms[2 * D];
    __shared__ float angles[MAX_ROWS * D];
    __shared__ long long kv_slots[MAX_ROWS];
    __shared__ int block_ids[CACHED_BLOCKS];
    Ring ring;
    ring.base = shared_address(shared);
    ring.full = shared_address(barriers);
    ring.empty = ring.full + SLOTS * 8;
    ring.offset = ring.slot = 0;
    ring.parity = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(ring.full + i * 8, 1);
            barrier_init(ring.empty + i * 8, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        produce(matrices, num_matrices, ring, sizes);
        return;
    }
    char *rest = shared + RING_BYTES;
    Block b;
    b.ring = ring;
    b.sums = (float *)rest;
    b.squares = squares;
    b.norm = shared_address(rest) + 2 * MAX_GROUPS * WARPS * SUMS * 4;
    b.exchanges = 0;
    b.num_rows = rows.num_rows;
    b.eps = eps;
    const Item item(rows, angles, kv_slots, block_ids);
    u32 target = 0, arrivals = 0;
    for (int i = -1; i < num_phases; i++) {
        // Fetch the next phase's description while this one runs.
        if (i + 1 < num_phases && threadIdx.x < sizeof(Phase) / 16)
            copy16(shared_address(&current[(i + 1) & 1]) + threadIdx.x * 16, (const char *)(phases + i + 1) + threadIdx.x * 16);
        bool meet = false;
        if (i >= 0) {
            const Phase &phase = current[i & 1];
            if (phase.words[0] == MATMUL) multiply_phase(phase.matmul, b);
            else if (phase.words[0] == ATTENTION) attention_phase(phase.attention, rows, item, scratch, head_norms, arrivals, b, rest);
            else context_phase(phase.attention, rows, b);
            meet = !phase.words[15];
        }
        copied();
        consumers_sync();
        if (i + 1 == num_phases) break;
        if (meet && threadIdx.x == 0) arrive(scratch.barrier);
        const Phase &following = current[(i + 1) & 1];
        if (following.words[0] == MATMUL && following.matmul.norm)
            for (u32 at = threadIdx.x * 8; at < following.matmul.k; at += CONSUMERS * 8)
                copy16(b.norm + at * 2, following.matmul.norm + at);
        if (following.words[0] == ATTENTION && threadIdx.x < 2 * D / 8) {
            const u16 *norm = threadIdx.x < D / 8 ? following.attention.q_norm : following.attention.k_norm;
            copy16(shared_address(head_norms) + threadIdx.x * 16, norm + threadIdx.x % (D / 8) * 8);
        }
        if (following.words[0] == ATTENTION) item.prefetch(rows, following.attention);
        if (meet) {
            target += gridDim.x;
            if (threadIdx.x == 0) await(scratch.barrier, target);
        }
        copied();
        consumers_sync();
    }
    // The last block to leave sets the counters back: by then no block waits any more.
    if (threadIdx.x == 0 && atomicAdd(scratch.barrier, 1) == target + gridDim.x - 1) {
        *scratch.barrier = 0;
        for (int i = 0; i < rows.num_seqs * rows.kv_heads; i++) scratch.arrived[i] = 0;
    }
}
