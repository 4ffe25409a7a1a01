// A forward pass of a few rows as one persistent kernel: a list of phases, run by all multiprocessors
// together.
//
// At few rows a forward pass is nothing but reading the weights once, so memory must never pause. Here it
// does not: in every block two warps (the producers) do nothing but copy this block's share of every weight
// matrix, phase after phase, into a ring of shared memory. They wait for free room and for nothing else,
// since weights depend on nothing. The other eight warps (the consumers) multiply what arrives, or attend.
//
// What blocks give each other is its own flag: a place that has not been written yet holds NOTHING, a value
// that no result has, and who needs it reads until something is there. So a result is on its way to all
// blocks the moment it is stored, and nobody meets. What has been read everywhere is blanked again in time
// for the next layer: see `forget`.
//
// Sums are taken in an order that depends on the matrix alone, never on how many rows there are: a row's
// result is the same bits whatever stands beside it.
//
// Defined by the caller: RING_BYTES, and WINDOW_BYTES of it that may be on their way at once; CHUNK_UNITS,
// the width of a tile; MAX_CHUNKS of the input that a warp holds at once.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INFINITY __uint_as_float(0x7f800000u)

constexpr int MAX_ROWS = 8;
constexpr int WARPS = 8;                  // consumers
constexpr int PRODUCERS = 2;              // warps
constexpr int CONSUMERS = WARPS * 32;
constexpr int THREADS = CONSUMERS + 128;  // registers are dealt out to groups of four warps
constexpr int UNIT = CONSUMERS;           // columns: 32 for each warp
constexpr int MAX_GROUPS = 2;             // tiles' rows whose sums are kept, and then added up together
constexpr int TILE_ROWS = 16;             // rows of a tile at most: one matrix instruction
constexpr int SLOTS = 16;                 // tiles in the ring at most
constexpr int PAD = 64;                   // bytes between a tile's rows: two rows of a quarter warp's reads fill all banks
constexpr int LEAD = 4;                   // units whose weights are on their way to registers while one is multiplied
constexpr int SUM_STRIDE = 20;            // floats between tokens in the exchange of partial sums
constexpr int SUMS = MAX_ROWS * SUM_STRIDE;
constexpr int D = 128;                    // head dimension
constexpr int KEYS = 16;                  // keys per block of scores
constexpr int KEY_GROUPS = WARPS / 2;     // warps that share the keys of a split; the others have the other half of D
constexpr int MAX_QUERIES = 32;           // query rows of one key head
constexpr int MAX_SPLITS = 16;            // blocks of the grid that share the keys of a head
constexpr int Q_BYTES = D * 2 + 64;
constexpr int CACHED_BLOCKS = 64;         // blocks of keys whose place a block of the grid remembers
constexpr int PART = 36;                  // floats a thread passes on: 32 sums, 2 maxima, 2 totals
constexpr int MAX_RANGES = 6;             // pieces of memory that a phase forgets
constexpr u32 NOTHING = 0xffffffffu;      // a float, or two bf16, not yet written: conversions round every NaN to 0x7fff

enum Kind : u32 { MATMUL = 0, ATTENTION = 1, CONTEXT = 2 };
enum Epilogue : u32 { STORE = 0, ADD = 1, SILU = 2, LOGITS = 3 };

// How a matrix is cut up: rows are dealt out to blocks, a block's rows to tiles of group_rows. Columns are cut
// into passes, whose input a warp holds at once, and those into chunks, the width of a tile. Nothing here
// depends on the rows of the pass.
struct Range { u64 start, bytes; };       // both multiples of sixteen

struct Matrix {
    u32 kind, awaited;                    // awaited: whether the input is written during this launch
    u32 n, k, epilogue, group_rows;       // rows: with SILU pairs of them
    u32 units, pass_units, chunk_units, num_ranges;
    const u16 *weight;                    // [n, k]; with SILU [2 n, k], gates then ups

    // Bytes between a tile's rows.
    __device__ u32 pitch() const { return chunk_units * UNIT * 2 + PAD; }
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
    const u16 *before;    // with ADD: what is added to, laid out as the output
    Range ranges[MAX_RANGES];  // what may be forgotten once the input is there, `num_ranges` of them
};

struct Attention {
    u32 kind, awaited;
    u64 heads, kv_heads, bidirectional;
    const u16 *qkv;                       // [rows, (heads + 2 kv_heads) * D]
    const u16 *q_norm, *k_norm;           // [D]
    u16 *output;                          // [rows, heads * D]
    u16 *k_cache, *v_cache;               // [slots, kv_heads, D]
    const float *cos_sin;                 // CONTEXT: [positions, D]
    u64 stride;                           // CONTEXT: qkv holds keys and values of one layer, rows this far apart
};

union Phase {
    u32 kind;
    u64 words[32];
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
    int num_rows, num_seqs, span, block_size, kv_heads, splits, queries;  // span: rows of a sequence; queries: of a key head
};

struct Scratch {
    u32 *barrier;                         // [1]
    float *parts;                         // [sequences * kv_heads * splits, MAX_QUERIES, D]
    float *peaks;                         // [sequences * kv_heads * splits, MAX_QUERIES, 2]: peak and total
    const Range *blank;                   // what holds NOTHING at first, `num_blank` of them
    long long num_blank;
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

// What blocks give each other goes past the first-level cache, which is not coherent. These are in order
// with all else that is volatile here.
__device__ __forceinline__ void ask(u32 (&v)[4], const void *p, bool really) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
                 "@p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3]) : "l"(p), "r"((u32)really));
}
__device__ __forceinline__ void ask(u32 (&v)[2], const void *p, bool really) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];\n}"
                 : "+r"(v[0]), "+r"(v[1]) : "l"(p), "r"((u32)really));
}
__device__ __forceinline__ void ask(u32 &v, const void *p, bool really) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.relaxed.gpu.global.u32 %0, [%1];\n}"
                 : "+r"(v) : "l"(p), "r"((u32)really));
}
__device__ __forceinline__ u16 ask16(const void *p) {
    u16 v;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

__device__ __forceinline__ void give(void *p, u16 v) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory");
}
__device__ __forceinline__ void give(void *p, u32 a, u32 b) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void give(void *p, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// A float that may be anything.
__device__ __forceinline__ u32 something(float x) { return min(__float_as_uint(x), NOTHING - 1); }

// Whether any half of these words is still NOTHING.
__device__ __forceinline__ bool missing_half(u32 v) { return v >= 0xffff0000u || (v & 0xffffu) == 0xffffu; }
__device__ __forceinline__ bool missing_half(const u32 (&v)[4]) {
    return missing_half(__vmaxu2(__vmaxu2(v[0], v[1]), __vmaxu2(v[2], v[3])));
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

// All tiles of this block, in the order in which they are consumed: MAX_GROUPS row groups at a time, pass by
// pass, chunk by chunk, and of each chunk the groups.
struct Walk {
    const Matrix *next;        // matrices are a phase apart
    int left;                  // matrices after `upcoming`
    Matrix m, upcoming;        // read one ahead, so that nobody waits for them
    u32 first, count;
    u32 base, group, pass_end, start;  // in rows and units
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
        start = from;
        pass_end = min(from + m.pass_units, m.units);
    }
    __device__ void advance() {
        const u32 end = min(base + MAX_GROUPS * m.group_rows, count);
        group += m.group_rows;
        if (group < end) return;
        group = base;
        start += m.chunk_units;
        if (start < pass_end) return;
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
    __device__ u32 row_bytes() const { return min(m.chunk_units, pass_end - start) * UNIT * 2; }
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
        const u32 rows = walk.rows(), row_bytes = walk.row_bytes(), pitch = walk.m.pitch();
        const u32 bytes = rows * pitch, needs = ring.needs(bytes);
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
        if (const u16 *from = walk.row(r)) copy_row(at + walk.slot_row(r) * pitch, from, row_bytes, ring.full_bar(), policy);
        ring.advance();
    }
}

// ---------------------------------------------------------------- matrix products

struct Block {  // what consumers carry through the phases
    Ring ring;
    float *sums;        // shared, [2][MAX_GROUPS][WARPS][SUMS]
    float *squares;     // shared, [WARPS][MAX_ROWS]
    u32 norm;           // shared address, this phase's norm weight; each warp has brought its own columns
    u32 exchanges;
    int num_rows;
    float eps;
    float scale;        // the norm's, of the token this thread finishes; negative: not known yet
};

// Of a chunk of the input this warp's 32 columns in each unit, for the token this lane serves. A lane holds
// eight neighbours, so that it loads 16 bytes: the columns of two matrix instructions are dealt out
// accordingly, to weights and inputs alike.
struct Chunk {
    u32 x[CHUNK_UNITS][4];

    // Units first, first + 1, ... below end; what is beyond is zero.
    __device__ __forceinline__ void load(const Matmul &m, u32 first, u32 end, const Block &b) {
#pragma unroll
        for (int i = 0; i < CHUNK_UNITS; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) x[i][e] = 0;
            ask(x[i], at(m, first + i), i < m.chunk_units && first + i < end && token() < b.num_rows);
        }
    }
    // Read again, until all of it is there.
    __device__ __forceinline__ void settle(const Matmul &m, u32 first) {
        for (bool again = m.awaited; again;) {
            again = false;
#pragma unroll
            for (int i = 0; i < CHUNK_UNITS; i++) {
                const bool missing = missing_half(x[i]);
                ask(x[i], at(m, first + i), missing);
                again |= missing;
            }
        }
        __syncwarp();
    }

  private:
    __device__ static int token() { return (threadIdx.x & 31) >> 2; }
    __device__ static const u16 *at(const Matmul &m, u32 unit) {
        return m.input + token() * m.input_stride + unit * UNIT + (threadIdx.x >> 5) * 32 + (threadIdx.x & 3) * 8;
    }
};

typedef Chunk Input[MAX_CHUNKS];

// An RMSNorm but for its scale, which is one number per token and comes in at the end: the sum of squares is
// collected, as the diagonal of X X^T, and the weight multiplied in.
__device__ __forceinline__ void apply_norm(Input &input, const Matmul &m, Block &b) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = lane >> 2;
    const u32 own = warp * 32 + (lane & 3) * 8;
    float square[4][4] = {};  // four chains, to be short
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < CHUNK_UNITS; i++) {
            u32(&v)[4] = input[c].x[i];
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

// Bring a phase's norm weight: each warp its own columns, so that nobody else waits for them.
__device__ __forceinline__ void fetch_norm(const Phase *phase, const Block &b) {
    if (!phase || phase->kind != MATMUL || !phase->matmul.norm) return;
    __syncwarp();  // the last phase's has been read
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (u32 unit = lane >> 2; unit < phase->matmul.units; unit += 8) {
        const u32 at = unit * UNIT + warp * 32 + (lane & 3) * 8;
        copy16(b.norm + at * 2, phase->matmul.norm + at);
    }
}

// The norm's scale of a token; all warps have normed their input, and met since.
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

// A tile of so many rows: its size, and where the rows of the matrix instruction's two halves lie that this lane
// holds. It has sixteen; what the tile does not have of them is read from its last row, and not used.
struct Shape {
    u32 bytes, upper, lower;

    __device__ Shape(const Matmul &m, u32 group_rows) {
        const u32 row = (threadIdx.x & 31) >> 2, rows = group_rows << (m.epilogue == SILU), pitch = m.pitch();
        const u32 own = (threadIdx.x >> 5) * 64 + (threadIdx.x & 3) * 16;
        bytes = rows * pitch;
        upper = min(row, rows - 1) * pitch + own;
        lower = min((m.epilogue == SILU ? group_rows : 8) + row, rows - 1) * pitch + own;
    }
};

__device__ __forceinline__ Shape chosen(bool first, Shape a, const Shape &b) {
    a.bytes = first ? a.bytes : b.bytes;
    a.upper = first ? a.upper : b.upper;
    a.lower = first ? a.lower : b.lower;
    return a;
}

// Tiles on their way from the ring to registers: the first units of the next are read while the last of this one
// are multiplied, so that a full ring is emptied much faster than memory fills it.
struct Stream {
    uint4 upper[CHUNK_UNITS], lower[CHUNK_UNITS];
    u32 upper_at, lower_at, last;             // shared addresses, and the last unit there is

    __device__ __forceinline__ void open(const Shape &shape, u32 width, Ring &ring) {
        const u32 at = ring.place(shape.bytes);
        upper_at = at + shape.upper;
        lower_at = at + shape.lower;
        last = width - 1;
        barrier_wait(ring.full_bar(), ring.parity);
    }
    __device__ __forceinline__ void load(int i) {
        const u32 column = min((u32)i, last) * UNIT * 2;  // beyond the last the input is zero
        upper[i] = shared_load(upper_at + column);
        lower[i] = shared_load(lower_at + column);
    }
    // Multiply the tile that is open, and open the next if there is one.
    __device__ __forceinline__ void multiply(float (&sum)[4], float (&other)[4], const Chunk &input, bool more, const Shape &shape, u32 width, Ring &ring) {
        const u32 emptied = ring.empty_bar();
        ring.advance();
#pragma unroll
        for (int i = 0; i < CHUNK_UNITS; i++) {
            if (i + LEAD == CHUNK_UNITS && more) open(shape, width, ring);
            load((i + LEAD) % CHUNK_UNITS);  // what is read on after the last tile is not used
            const u32(&x)[4] = input.x[i];
            mma(sum, upper[i].x, lower[i].x, upper[i].y, lower[i].y, x[0], x[1]);
            mma(other, upper[i].z, lower[i].z, upper[i].w, lower[i].w, x[2], x[3]);
        }
        __syncwarp();
        if ((threadIdx.x & 31) == 0) barrier_arrive(emptied);
    }
};

__device__ __forceinline__ float collect(const float *sums) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += sums[w * SUMS];
    return total;
}

// Add up the warps' partial sums of MAX_GROUPS row groups and give the results: half of the warps does each.
__device__ __forceinline__ void finish(const float (&sums)[MAX_GROUPS][4], const Matmul &m, u32 row, u32 count, bool fence, Block &b) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int index = threadIdx.x & 127, group = threadIdx.x >> 7, token = m.epilogue == SILU ? index >> 3 : index >> 4;
    const u32 r = m.epilogue == SILU ? index & 7 : index & 15, within = group * m.group_rows + r;
    const bool mine = token < b.num_rows && r < m.group_rows && within < count;
    const u64 to = token * m.output_stride + row + within;
    u16 before = 0;  // asked for early: its way is as long as the exchange. This block itself gave it, long ago
    if (mine && m.epilogue == ADD) before = ask16(m.before + to);
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
    if (fence) asm volatile("fence.acq_rel.gpu;" ::: "memory");
    if (!mine) return;
    const float *from = exchange + group * WARPS * SUMS + token * SUM_STRIDE + r;
    const float scale = norm_scale(m, token, b);
    const float value = single(round16(scale * collect(from)));
    if (m.epilogue == STORE) {
        give(m.output + to, round16(value));
    } else if (m.epilogue == LOGITS) {
        ((float *)m.output)[to] = value;
    } else if (m.epilogue == SILU) {
        const float up = single(round16(scale * collect(from + 8)));
        const float silu = single(round16(value / (1.f + __expf(-value))));
        give(m.output + to, round16(silu * up));
    } else {
        const u16 total = round16(single(before) + value);
        give(m.output + to, total);
        if (m.tap) give(m.tap + token * m.tap_stride + row + within, total);
    }
}

// Blank this block's share of some ranges.
__device__ __forceinline__ void blank(const Range *ranges, int count) {
    for (int r = 0; r < count; r++) {
        const Range range = ranges[r];
        for (u64 at = (blockIdx.x * CONSUMERS + threadIdx.x) * 16; at < range.bytes; at += gridDim.x * CONSUMERS * 16)
            give((char *)range.start + at, NOTHING, NOTHING, NOTHING, NOTHING);
    }
}

template <typename Forget>
__device__ __forceinline__ void multiply_phase(const Matmul m, const Phase *following, Block &b, const Forget &forget) {
    u32 first, count;
    m.rows(first, count);
    const bool one_pass = m.pass_units >= m.units;
    // The input of a pass, and of the next where registers suffice: it is on its way for a whole pass.
    constexpr int AHEAD = MAX_CHUNKS <= 2 ? 2 : 1;
    Input input[AHEAD];
    auto load = [&](Chunk &x, int c, u32 start) { x.load(m, start + c * m.chunk_units, min(start + m.pass_units, m.units), b); };
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
#pragma unroll
        for (int c = 0; c < MAX_CHUNKS; c++) load(input[a][c], c, a * m.pass_units);
    Input &x = input[0];
    const u32 base_rows = MAX_GROUPS * m.group_rows, first_width = min(m.chunk_units, m.units);
    auto shape_of = [&](u32 row) { return Shape(m, min(m.group_rows, count - min(row, count - 1))); };
    Shape shape = shape_of(0);
    Stream stream;
    stream.open(shape, first_width, b.ring);
#pragma unroll
    for (int i = 0; i < LEAD; i++) stream.load(i);
    if (m.norm) {
#pragma unroll
        for (int c = 0; c < MAX_CHUNKS; c++) x[c].settle(m, c * m.chunk_units);
        apply_norm(x, m, b);
    }
    fetch_norm(following, b);
    for (u32 base = 0; base < count; base += base_rows) {
        const bool both = base + m.group_rows < count, forgets = base == 0 && m.num_ranges;
        const Shape second = shape_of(base + m.group_rows), next = shape_of(base + base_rows);
        float sums[MAX_GROUPS][4] = {};
        for (u32 start = 0; start < m.units; start += m.pass_units) {
            const u32 pass_end = min(start + m.pass_units, m.units);
            float others[MAX_GROUPS][4] = {};
#pragma unroll
            for (int c = 0; c < MAX_CHUNKS; c++) {
                const u32 unit = start + c * m.chunk_units;
                if (unit >= pass_end) break;
                if (!m.norm) x[c].settle(m, unit);
                // The chunk after this one, in this pass, the next, or the first of the next rows.
                const bool in_pass = unit + m.chunk_units < pass_end, in_base = in_pass || pass_end < m.units;
                const u32 left = in_pass ? pass_end - unit - m.chunk_units : in_base ? m.units - pass_end : first_width;
                const u32 width = min(m.chunk_units, left);
                const bool more = in_base || base + base_rows < count;
                const Shape following_shape = chosen(in_base, shape, next);
                if (both) {
                    stream.multiply(sums[0], others[0], x[c], true, second, min(m.chunk_units, pass_end - unit), b.ring);
                    stream.multiply(sums[1], others[1], x[c], more, following_shape, width, b.ring);
                } else {
                    stream.multiply(sums[0], others[0], x[c], more, following_shape, width, b.ring);
                }
                if (one_pass) continue;
                if (AHEAD > 1) x[c] = input[AHEAD - 1][c];
                load(input[AHEAD - 1][c], c, start + AHEAD * m.pass_units);
            }
#pragma unroll
            for (int g = 0; g < MAX_GROUPS; g++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[g][e] += others[g][e];
        }
        if (forgets) forget();
        finish(sums, m, first + base, count - base, forgets, b);
        shape = next;
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
    // Where the grid's block of this head's k-th split leaves its part: of queries' sums, and of peaks and totals.
    __device__ float *part(const Rows &rows, const Scratch &scratch, int k) const {
        return scratch.parts + (u64)((seq * rows.kv_heads + kv_head) * rows.splits + k) * MAX_QUERIES * D;
    }
    __device__ float *peaks(const Rows &rows, const Scratch &scratch, int k) const {
        return scratch.peaks + (u64)((seq * rows.kv_heads + kv_head) * rows.splits + k) * MAX_QUERIES * 2;
    }
    // Blank this block's part.
    __device__ void forget(const Rows &rows, const Scratch &scratch) const {
        if (!mine) return;
        float *sums = part(rows, scratch, split), *ends = peaks(rows, scratch, split);
        for (int i = threadIdx.x; i < rows.queries * D / 4; i += CONSUMERS) give(sums + i * 4, NOTHING, NOTHING, NOTHING, NOTHING);
        if ((int)threadIdx.x < rows.queries) give(ends + threadIdx.x * 2, NOTHING, NOTHING);
    }
};

// This lane's elements of a head [D]: 2 lane, 2 lane + 1, and the same + D / 2.
struct Head {
    u32 low, high;

    __device__ __forceinline__ void load(const u16 *head, bool really) {
        low = high = 0;
        load_again(head, really);
    }
    __device__ __forceinline__ void load_again(const u16 *head, bool really) {
        const int lane = threadIdx.x & 31;
        ask(low, head + 2 * lane, really);
        ask(high, head + D / 2 + 2 * lane, really);
    }
    __device__ bool missing() const { return missing_half(low) || missing_half(high); }
    __device__ void store(u16 *head) const {
        const int lane = threadIdx.x & 31;
        *(u32 *)(head + 2 * lane) = low;
        *(u32 *)(head + D / 2 + 2 * lane) = high;
    }
    // Norm and rotation, rounded where the unfused ops round.
    __device__ void rotate(const Head &weight, const float *angles, float eps) {
        const int lane = threadIdx.x & 31;
        float square = ::low(low) * ::low(low) + ::high(low) * ::high(low) + ::low(high) * ::low(high) + ::high(high) * ::high(high);
#pragma unroll
        for (int step = 16; step; step >>= 1) square += __shfl_xor_sync(~0u, square, step);
        const float scale = 1.f / sqrtf(square / D + eps);
        const u32 w1 = weight.low, w2 = weight.high;
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
    // To the blocks of the same head; `query` is the first of the sixteen.
    __device__ void give_away(float *sums, float *peaks, int query, int queries, int half) const {
        const int lane = threadIdx.x & 31, quad = lane >> 2, j = lane & 3;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = query + quad + 8 * r;
            if (row >= queries) continue;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float *to = sums + row * D + half * (D / 2) + (2 * j + e) * 8;
#pragma unroll
                for (int t = 0; t < 8; t += 4)
                    give(to + t, something(sum[t][2 * r + e]), something(sum[t + 1][2 * r + e]), something(sum[t + 2][2 * r + e]), something(sum[t + 3][2 * r + e]));
            }
            if (half == 0 && j == 0) give(peaks + row * 2, something(peak[r]), something(total[r]));
        }
    }
};

// Sixteen keys, and half of their values. Scores are Q K^T with the head dimension dealt out in eights, as in
// the matrix products; values are dealt out so that a lane reads 16 neighbouring bytes of four keys.
struct Keys {
    uint4 k[2][4], v[4];

    __device__ __forceinline__ void load_keys(const u16 *keys, long long stride) {
        const int lane = threadIdx.x & 31, quad = lane >> 2, j = lane & 3;
#pragma unroll
        for (int u = 0; u < 2; u++)
#pragma unroll
            for (int c = 0; c < 4; c++) k[u][c] = *(const uint4 *)(keys + (quad + u * 8) * stride + j * 8 + c * 32);
    }
    __device__ __forceinline__ void load_values(const u16 *values, long long stride, int half) {
        const int lane = threadIdx.x & 31, quad = lane >> 2, j = lane & 3;
        const u16 *value = values + 2 * j * stride + half * (D / 2) + quad * 8;
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = *(const uint4 *)(value + ((i >> 1) * 8 + (i & 1)) * stride);
    }
    // Put new ones where they belong, whose place in the cache may not be written yet: `rows` of them, each key
    // beside its value in shared memory, the first after `first` of these sixteen.
    __device__ __forceinline__ void renew(u32 fresh, int rows, int first, int half) {
        const int lane = threadIdx.x & 31, quad = lane >> 2, j = lane & 3;
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const int row = quad + u * 8 - first;
            if (row < 0 || row >= rows) continue;
#pragma unroll
            for (int c = 0; c < 4; c++) k[u][c] = shared_load(fresh + row * 4 * D + c * 64 + j * 16);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = 2 * j + (i >> 1) * 8 + (i & 1) - first;
            if (row >= 0 && row < rows) v[i] = shared_load(fresh + row * 4 * D + 2 * D + half * D + quad * 16);
        }
    }
    __device__ __forceinline__ void score(float (&score)[2][4], u32 queries) const {
        const int lane = threadIdx.x & 31, quad = lane >> 2, j = lane & 3;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const u32 at = queries + quad * Q_BYTES + c * 64 + j * 16;
            const uint4 upper = shared_load(at), lower = shared_load(at + 8 * Q_BYTES);
#pragma unroll
            for (int u = 0; u < 2; u++) {
                mma(score[u], upper.x, lower.x, upper.y, lower.y, k[u][c].x, k[u][c].y);
                mma(score[u], upper.z, lower.z, upper.w, lower.w, k[u][c].z, k[u][c].w);
            }
        }
    }
    // Add the values to a part, by scores of keys kpos .. kpos + 15, of which a row sees those up to `last`.
    __device__ __forceinline__ void add(Part &part, float (&score)[2][4], int kpos, const int (&last)[2]) const {
        const int j = threadIdx.x & 3;
        const float scale = 0.08838834764831845f * 1.4426950408889634f;  // 1 / sqrt(D), and to base 2
        const u32 v0[4] = {v[0].x, v[0].y, v[0].z, v[0].w}, v1[4] = {v[1].x, v[1].y, v[1].z, v[1].w};
        const u32 v2[4] = {v[2].x, v[2].y, v[2].z, v[2].w}, v3[4] = {v[3].x, v[3].y, v[3].z, v[3].w};
        float fade[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float peak = -INFINITY;
#pragma unroll
            for (int u = 0; u < 2; u++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &s = score[u][2 * r + e];
                    s = kpos + u * 8 + 2 * j + e <= last[r] ? s * scale : -INFINITY;
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
};

// Where a key is added up does not depend on which rows are new: blocks of keys are counted from the
// sequence's start and dealt out in turn to splits, and within a split to warps. The splits of a head give each
// other their parts, and each puts its share of the sums together.
__device__ __forceinline__ void attention_phase(const Attention a, const Rows &rows, const Item &item, const Scratch &scratch, const Block &b, char *shared) {
    if (!item.mine) return;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int kv_heads = rows.kv_heads, group = (int)a.heads / kv_heads, span = rows.span, splits = rows.splits;
    const int active = min(splits, item.blocks);
    const int inverse = 1024 / group + 1;  // q / group for the few there are
    auto token_of = [&](int q) { return q * inverse >> 10; };
    const int queries = rows.queries, tiles = (queries + 15) / 16;
    const u32 width = ((u32)a.heads + 2 * kv_heads) * D;
    const u16 *qkv = a.qkv + item.seq * span * width;
    char *query_rows = shared, *fresh_rows = shared + MAX_QUERIES * Q_BYTES;
    float *parts = (float *)shared;  // in their place, once they are done with

    // Old keys do not depend on this pass: the first of each warp are on their way before the queries are known.
    const int half = warp / KEY_GROUPS, share = warp % KEY_GROUPS;
    const long long key_stride = (long long)kv_heads * D;
    const int own = (item.blocks - item.split + splits - 1) / splits;
    auto position = [&](int i) { return (item.split + i * splits) * KEYS; };
    Keys keys;
    auto load_keys = [&](int i) { keys.load_keys(a.k_cache + item.keys(rows, i), key_stride); };
    auto load_values = [&](int i) { keys.load_values(a.v_cache + item.keys(rows, i), key_stride, half); };
    if (share < own) {
        load_keys(share);
        load_values(share);
    }
    Head q_norm, k_norm;
    q_norm.load(a.q_norm, true);
    k_norm.load(a.k_norm, true);

    constexpr int PER_WARP = MAX_QUERIES / WARPS;
    Head heads[PER_WARP], key, value;
    const int t = WARPS - 1 - warp;  // a row for each warp: the split that reads a new key writes it
    const bool fresh = t < span && (item.computed + t) / KEYS % splits == item.split;
    const u16 *key_from = qkv + t * width + ((u32)a.heads + item.kv_head) * D, *value_from = key_from + kv_heads * D;
    auto query_from = [&](int i) {
        const int q = min(warp + i * WARPS, queries - 1), token = token_of(q);
        return qkv + token * width + (item.kv_head * group + q - token * group) * D;
    };
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) heads[i].load(query_from(i), warp + i * WARPS < queries);
    key.load(key_from, fresh);
    value.load(value_from, fresh);
    for (bool again = a.awaited; again;) {
        again = false;
#pragma unroll
        for (int i = 0; i < PER_WARP; i++) {
            const bool missing = heads[i].missing();
            heads[i].load_again(query_from(i), missing);
            again |= missing;
        }
        const bool no_key = key.missing(), no_value = value.missing();
        key.load_again(key_from, no_key);
        value.load_again(value_from, no_value);
        again |= no_key || no_value;
    }
    __syncwarp();
    if (queries <= WARPS) {
        heads[0].rotate(q_norm, item.angles + token_of(min(warp, queries - 1)) * D, b.eps);
    } else {
#pragma unroll
        for (int i = 0; i < PER_WARP; i++) heads[i].rotate(q_norm, item.angles + token_of(min(warp + i * WARPS, queries - 1)) * D, b.eps);
    }
#pragma unroll
    for (int i = 0; i < PER_WARP; i++)
        if (warp + i * WARPS < queries) heads[i].store((u16 *)(query_rows + (warp + i * WARPS) * Q_BYTES));
    if (fresh) {
        key.rotate(k_norm, item.angles + t * D, b.eps);
        key.store((u16 *)fresh_rows + t * 2 * D);
        value.store((u16 *)fresh_rows + (t * 2 + 1) * D);
        const u64 at = ((u64)item.kv_slots[t] * kv_heads + item.kv_head) * D;
        if (item.kv_slots[t] >= 0) {
            key.store(a.k_cache + at);
            value.store(a.v_cache + at);
        }
    }
    consumers_sync();

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
    for (int i = share; i < own; i += KEY_GROUPS) {
        const int old = item.computed - position(i);
        if (old < KEYS) keys.renew(shared_address(fresh_rows), span, old, half);
        float score[2][2][4] = {};
        keys.score(score[0], shared_address(query_rows));
        if (tiles > 1) keys.score(score[1], shared_address(query_rows) + 16 * Q_BYTES);
        const bool more = i + KEY_GROUPS < own;
        if (more) load_keys(i + KEY_GROUPS);
        keys.add(part[0], score[0], position(i), last[0]);
        if (tiles > 1) keys.add(part[1], score[1], position(i), last[1]);
        if (more) load_values(i + KEY_GROUPS);
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
    if (share == 0) {
#pragma unroll
        for (int tile = 0; tile < 2; tile++)
            part[tile].give_away(item.part(rows, scratch, item.split), item.peaks(rows, scratch, item.split), tile * 16, queries, half);
    }
    const float *sums = item.part(rows, scratch, 0), *peaks = item.peaks(rows, scratch, 0);
#pragma unroll 1
    for (int at = item.split * CONSUMERS + threadIdx.x; at < queries * (D / 4); at += active * CONSUMERS) {
        const int query = at / (D / 4), d = at % (D / 4) * 4;
        u32 end_of[MAX_SPLITS][2], sum_of[MAX_SPLITS][4];
#pragma unroll
        for (int k = 0; k < MAX_SPLITS; k++) {
            end_of[k][0] = __float_as_uint(-INFINITY);
            end_of[k][1] = sum_of[k][0] = sum_of[k][1] = sum_of[k][2] = sum_of[k][3] = 0;
            ask(end_of[k], peaks + (k * MAX_QUERIES + query) * 2, k < active);
            ask(sum_of[k], sums + (k * MAX_QUERIES + query) * D + d, k < active);
        }
        for (bool again = true; again;) {
            again = false;
#pragma unroll
            for (int k = 0; k < MAX_SPLITS; k++) {
                const bool no_end = max(end_of[k][0], end_of[k][1]) == NOTHING;
                const bool no_sum = max(max(sum_of[k][0], sum_of[k][1]), max(sum_of[k][2], sum_of[k][3])) == NOTHING;
                ask(end_of[k], peaks + (k * MAX_QUERIES + query) * 2, no_end);
                ask(sum_of[k], sums + (k * MAX_QUERIES + query) * D + d, no_sum);
                again |= no_end || no_sum;
            }
        }
        float peak = -INFINITY, total = 0.f, sum[4] = {};
#pragma unroll
        for (int k = 0; k < MAX_SPLITS; k++) peak = fmaxf(peak, __uint_as_float(end_of[k][0]));
#pragma unroll
        for (int k = 0; k < MAX_SPLITS; k++) {
            const float peak_of = __uint_as_float(end_of[k][0]);
            const float weight = peak_of == -INFINITY ? 0.f : power2(peak_of - peak);
            total += weight * __uint_as_float(end_of[k][1]);
#pragma unroll
            for (int e = 0; e < 4; e++) sum[e] += weight * __uint_as_float(sum_of[k][e]);
        }
        const int token = token_of(query);
        u16 *to = a.output + ((u64)(item.seq * span + token) * a.heads + item.kv_head * group + query - token * group) * D + d;
        give(to, pack(sum[0] / total, sum[1] / total), pack(sum[2] / total, sum[3] / total));
    }
}

// Draft K/V of context rows: one layer's keys and values of every row, normed, rotated and written.
__device__ __forceinline__ void context_phase(const Attention a, const Rows &rows, const Block &b) {
    const int kv_heads = (int)a.kv_heads;
    for (int i = blockIdx.x * WARPS + (threadIdx.x >> 5); i < rows.num_rows * kv_heads; i += gridDim.x * WARPS) {
        const int row = i / kv_heads, kv_head = i % kv_heads;
        const long long slot = rows.kv_slots[row];
        if (slot < 0) continue;
        const u16 *key_from = a.qkv + row * a.stride + kv_head * D, *value_from = key_from + kv_heads * D;
        Head norm, key, value;
        norm.load(a.k_norm, true);
        key.load(key_from, true);
        value.load(value_from, true);
        while (a.awaited && key.missing()) key.load_again(key_from, true);
        while (a.awaited && value.missing()) value.load_again(value_from, true);
        __syncwarp();
        key.rotate(norm, a.cos_sin + (u64)rows.positions[row] * D, b.eps);
        const u64 at = ((u64)slot * kv_heads + kv_head) * D;
        key.store(a.k_cache + at);
        value.store(a.v_cache + at);
    }
}

// ---------------------------------------------------------------- the kernel

// All blocks meet: what was written before is seen after. The first block's share turns the counter's highest
// bit over when it and all others have come, so that it need not be set back.
__device__ __forceinline__ void meet(u32 *counter) {
    consumers_sync();
    if (threadIdx.x == 0) {
        const u32 share = blockIdx.x ? 1 : 0x80000000u - (gridDim.x - 1);
        u32 before, now;
        asm volatile("fence.acq_rel.gpu;\natom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(share) : "memory");
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
        while (!((before ^ now) >> 31));
    }
    consumers_sync();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
run_phases(const Phase *phases, int num_phases, const Phase *matrices, int num_matrices, Rows rows, Scratch scratch, float eps) {
    extern __shared__ __align__(128) char shared[];
    __shared__ u64 barriers[2 * SLOTS];
    __shared__ u32 sizes[PRODUCERS * SLOTS];
    __shared__ float squares[WARPS * MAX_ROWS];
    __shared__ __align__(128) Phase current[4];
    __shared__ float angles[MAX_ROWS * D];
    __shared__ long long kv_slots[MAX_ROWS];
    __shared__ int block_ids[CACHED_BLOCKS];
    Ring ring;
    ring.base = shared_address(shared);
    asm volatile("mov.u32 %0, %1;" : "=r"(ring.full) : "r"(shared_address(barriers)));  // computed once
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
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (threadIdx.x < CONSUMERS + PRODUCERS * 32) produce(matrices, num_matrices, ring, sizes);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
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
        auto fetch = [&](int i) {
            if (i < num_phases && threadIdx.x < sizeof(Phase) / 16)
                copy16(shared_address(&current[i & 3]) + threadIdx.x * 16, (const char *)(phases + i) + threadIdx.x * 16);
        };
        fetch(0);
        fetch(1);
        blank(scratch.blank, (int)scratch.num_blank);
        item.forget(rows, scratch);
        copied();
        meet(scratch.barrier);
        fetch_norm(&current[0], b);
        copied();
        __syncwarp();
        for (int i = 0; i < num_phases; i++) {
            const Phase &phase = current[i & 3], *following = i + 1 < num_phases ? &current[(i + 1) & 3] : nullptr;
            fetch(i + 2);
            if (following && following->kind == ATTENTION) item.prefetch(rows, following->attention);
            if (phase.kind == MATMUL) {
                // What the phases before the last gave has been read by all blocks: this one's input is what they made
                // of it. The fence before this phase's first result puts the blanks before it, for all who see it, and
                // so before anyone's next look at them: by then he has seen all results of this phase. That look needs
                // no fence, as it is not even issued before those values have come.
                multiply_phase(phase.matmul, following, b, [&] {
                    consumers_sync();  // each warp has seen its part of the input
                    blank(phase.matmul.ranges, phase.matmul.num_ranges);
                    item.forget(rows, scratch);
                });
            } else {
                fetch_norm(following, b);
                if (phase.kind == ATTENTION) attention_phase(phase.attention, rows, item, scratch, b, rest);
                else context_phase(phase.attention, rows, b);
            }
            copied();
            consumers_sync();
        }
    }
}
