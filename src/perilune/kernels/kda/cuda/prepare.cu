// P, A and the scans' operands of KDA chunks, as chunk_products, invert_chunks and chunk_operands of triton_chunk.py.
// One CTA of 4 warps per chunk and head; warp w owns tokens 16 w .. 16 w + 15. A level's factor of a token times its key is
// at once the row operand (A) and the column operand (B) of the products: it never leaves the registers except to reach
// the warps of other blocks.
#define PITCH (K + 8)  // 16 bytes more than a row: no bank conflicts

// Matrices of 16 x 16 in float32; products in float16 (11 bits, as tf32) with float32 sums.
struct Block { float a[4], b[4]; };
__device__ __forceinline__ Four left(const Block &m) {   // as A operand
  return {{pack_f16(m.a[0], m.a[1]), pack_f16(m.a[2], m.a[3]), pack_f16(m.b[0], m.b[1]), pack_f16(m.b[2], m.b[3])}};
}
__device__ __forceinline__ Four right(const Block &m) {  // as B operand: k = row
  return turned(left(m));
}
__device__ __forceinline__ void add_product(Block &c, const Four &x, const Four &y) {
  mma_f16(c.a, x.r, y.r[0], y.r[1]);
  mma_f16(c.b, x.r, y.r[2], y.r[3]);
}
__device__ __forceinline__ Block product(const Four &x, const Four &y) { Block c = {}; add_product(c, x, y); return c; }
__device__ __forceinline__ Block minus(Block m) { for (int i = 0; i < 4; i++) { m.a[i] = -m.a[i]; m.b[i] = -m.b[i]; } return m; }
template <class F> __device__ __forceinline__ Block where(const Block &m, int lane, F keep) {
  int g = lane >> 2, t = (lane & 3) * 2;
  Block o;
  for (int i = 0; i < 4; i++) {
    int row = g + (i >> 1) * 8, col = t + (i & 1);
    o.a[i] = keep(row, col) ? m.a[i] : 0.0f; o.b[i] = keep(row, col + 8) ? m.b[i] : 0.0f;
  }
  return o;
}
// (I + L)^-1 of a strictly lower triangular block, by doubling blocks: nothing grows and cancels.
__device__ __forceinline__ Block inverse_of(const Block &L, int lane) {
  int g = lane >> 2, t = (lane & 3) * 2;
  Block x = where(L, lane, [](int i, int j) { return (i & 1) && i == j + 1; });
  for (int i = 0; i < 4; i++) {
    int row = g + (i >> 1) * 8, col = t + (i & 1);
    x.a[i] = (row == col ? 1.0f : 0.0f) - x.a[i]; x.b[i] = (row == col + 8 ? 1.0f : 0.0f) - x.b[i];
  }
#pragma unroll
  for (int level = 1; level < 4; level++) {
    Block part = where(L, lane, [level](int i, int j) { return (i >> (level + 1)) == (j >> (level + 1)) && (i >> level) > (j >> level); });
    Block joined = product(left(part), right(x));
    Block change = product(left(x), right(joined));
    for (int i = 0; i < 4; i++) { x.a[i] -= change.a[i]; x.b[i] -= change.b[i]; }
  }
  return x;
}
__device__ __forceinline__ Four bf16_left(const Block &m, const float (&s0)[2], const float (&s1)[2]) {  // columns scaled
  return {{pack(m.a[0] * s0[0], m.a[1] * s0[1]), pack(m.a[2] * s0[0], m.a[3] * s0[1]), pack(m.b[0] * s1[0], m.b[1] * s1[1]), pack(m.b[2] * s1[0], m.b[3] * s1[1])}};
}

extern "C" __global__ void __launch_bounds__(128, 3) kda_prepare(
    const u16 *q, const u16 *k, const u16 *v, const u16 *g /* fp16 log2 decays [rows, H, K] */, const float *beta, const long long *chunk_start,
    const int *chunk_length, u16 *P, u16 *A, float *rstd, u16 *W, u16 *U,
    u16 *to_end, u16 *from_start, float *state_decay, int q_token, int q_head, int k_token, int k_head, int v_token, int v_head,
    int beta_token, int beta_head, int H, double scale_, double beta_max_, int l2norm, int beta_sigmoid, int known /* A and rstd are inputs */) {
  extern __shared__ __align__(16) unsigned char memory[];
  const float scale = (float)scale_, beta_max = (float)beta_max_;
  u16 *sq = (u16 *)memory, *sk = sq + C * PITCH, *sg = sk + C * PITCH;
  uint4 *exchange = (uint4 *)(sg + C * PITCH);     // [2 buffers][4 blocks][2 levels][32 lanes]
  float *totals = (float *)(exchange + 2 * 4 * 2 * 32);  // [4 blocks][K]
  float *norms = totals + 4 * K;                   // [2][C]
  float *strengths = norms + 2 * C;                // [C]
  long long record = blockIdx.x, chunk = record / H;
  int head = record % H, length = chunk_length[chunk];
  if (length == 0) return;
  long long start = chunk_start[chunk];
  int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, gr = lane >> 2, t2 = (lane & 3) * 2;
  for (int i = tid; i < C * (K / 8); i += 128) {
    int row = i / (K / 8), col = (i % (K / 8)) * 8;
    bool on = row < length;
    long long token = start + (on ? row : 0);
    copy16(sq + row * PITCH + col, q + token * q_token + (long long)head * q_head + col, on);
    copy16(sk + row * PITCH + col, k + token * k_token + (long long)head * k_head + col, on);
    copy16(sg + row * PITCH + col, g + (token * H + head) * K + col, on);
  }
  commit_copies();
  wait_for_copies();
  __syncthreads();

  uint32_t prefix_m[4], half_m[4], octet_m[4];
  mask_operand(prefix_m, lane, ONE_F16, [](int i, int t) { return t <= i; });
  mask_operand(half_m, lane, ONE_F16, [](int i, int t) { return i >= 8 ? (t >= 8 && t <= i) : (t < 8 && t > i); });
  mask_operand(octet_m, lane, ONE_F16, [](int i, int t) { return (i >> 3) == (t >> 3) && t <= i; });
  const uint32_t ones = ONE_F16 | ONE_F16 << 16, ones_m[4] = {ones, ones, ones, ones};
  // Totals of the blocks, which the other blocks' anchors need.
  for (int c = 0; c < K; c += 16) {
    Four gb;
    ldmatrix_trans(gb.r, sg + (16 * w + (lane & 15)) * PITCH + c + (lane >> 4) * 8);
    Tile all = sums(ones_m, gb);
    if (gr == 0) {
      totals[w * K + c + t2] = all.v[0]; totals[w * K + c + t2 + 1] = all.v[1];
      totals[w * K + c + t2 + 8] = all.v[2]; totals[w * K + c + t2 + 9] = all.v[3];
    }
  }
  // Products of 16 rows with columns as n8 tiles: blocks 0 and 1 (level 32), the block before (level 16), the own one.
  float far_r[4][4] = {}, far_w[4][4] = {}, near_r[2][4] = {}, near_w[2][4] = {}, diag_r[2][4] = {}, diag_w[2][4] = {};
  float half_r[4] = {}, half_w[4] = {};
  float sum_q[2] = {0, 0}, sum_k[2] = {0, 0};
  const uint32_t clamp = pack_f16(SMALLEST_OCTET_GATE, SMALLEST_OCTET_GATE);
  __syncthreads();
  int row = 16 * w + gr;
  if (!known) {
#pragma unroll 1
  for (int c = 0; c < K; c += 16) {
    Four kr, qr, gb;
    const u16 *kp = sk + (16 * w + gr) * PITCH + c + t2, *qp = sq + (16 * w + gr) * PITCH + c + t2;
    kr.r[0] = *(const uint32_t *)kp; kr.r[1] = *(const uint32_t *)(kp + 8 * PITCH); kr.r[2] = *(const uint32_t *)(kp + 8); kr.r[3] = *(const uint32_t *)(kp + 8 * PITCH + 8);
    qr.r[0] = *(const uint32_t *)qp; qr.r[1] = *(const uint32_t *)(qp + 8 * PITCH); qr.r[2] = *(const uint32_t *)(qp + 8); qr.r[3] = *(const uint32_t *)(qp + 8 * PITCH + 8);
    ldmatrix_trans(gb.r, sg + (16 * w + (lane & 15)) * PITCH + c + (lane >> 4) * 8);
    Tile key = unpacked(kr), query = unpacked(qr), x, all;
    for (int i = 0; i < 8; i++) { sum_k[i >> 2] += key.v[i] * key.v[i]; sum_q[i >> 2] += query.v[i] * query.v[i]; }
    Tile prefix = sums(prefix_m, gb);
    float own[4] = {totals[w * K + c + t2], totals[w * K + c + t2 + 1], totals[w * K + c + t2 + 8], totals[w * K + c + t2 + 9]};
    int neighbour = w == 0 ? 1 : 2;
    float other[4] = {totals[neighbour * K + c + t2], totals[neighbour * K + c + t2 + 1], totals[neighbour * K + c + t2 + 8], totals[neighbour * K + c + t2 + 9]};
    Four a_k, a_q, b_k, b_q;
    uint4 *out = exchange + (((c >> 4) & 1) * 4 + w) * 2 * 32 + lane;
    // Level 16: odd blocks are rows, even ones columns. Level 32: the last two are rows.
    Tile x16, x32;
    for (int i = 0; i < 8; i++) {
      float to_end = own[i & 3] - prefix.v[i];
      x16.v[i] = (w & 1) ? prefix.v[i] : to_end;
      x32.v[i] = (w == 3 || w == 0) ? (w == 3 ? prefix.v[i] : to_end) + other[i & 3] : (w == 2 ? prefix.v[i] : to_end);
      x16.v[i] = ex2(x16.v[i]); x32.v[i] = ex2(x32.v[i]);
    }
    a_k = packed(times(key, x16));
    if (!(w & 1)) out[0] = make_uint4(a_k.r[0], a_k.r[1], a_k.r[2], a_k.r[3]);
    b_k = packed(times(key, x32));
    if (w < 2) out[32] = make_uint4(b_k.r[0], b_k.r[1], b_k.r[2], b_k.r[3]);
    __syncthreads();
    const uint4 *in = exchange + ((c >> 4) & 1) * 4 * 2 * 32 + lane;
    if (w & 1) {
      a_q = packed(times(query, x16));
      uint4 col = in[(w - 1) * 64];
      mma_bf16(near_w[0], a_k.r, col.x, col.z); mma_bf16(near_w[1], a_k.r, col.y, col.w);
      mma_bf16(near_r[0], a_q.r, col.x, col.z); mma_bf16(near_r[1], a_q.r, col.y, col.w);
    }
    if (w >= 2) {
      b_q = packed(times(query, x32));
#pragma unroll
      for (int j = 0; j < 2; j++) {
        uint4 col = in[j * 64 + 32];
        mma_bf16(far_w[2 * j], b_k.r, col.x, col.z); mma_bf16(far_w[2 * j + 1], b_k.r, col.y, col.w);
        mma_bf16(far_r[2 * j], b_q.r, col.x, col.z); mma_bf16(far_r[2 * j + 1], b_q.r, col.y, col.w);
      }
    }
    // Inside the block: its halves, then its eights. Both keep to the first column tile, or to the diagonal.
    x = sums(half_m, gb);
    for (int i = 0; i < 8; i++) x.v[i] = ex2(x.v[i]);
    a_k = packed(times(key, x)); a_q = packed(times(query, x));
    mma_bf16(half_w, a_k.r, a_k.r[0], a_k.r[2]); mma_bf16(half_r, a_q.r, a_k.r[0], a_k.r[2]);
    for (int i = 0; i < 4; i++) gb.r[i] = max_f16x2(gb.r[i], clamp);
    x = sums(octet_m, gb);
    for (int i = 0; i < 8; i++) { all.v[i] = ex2(OCTET_CENTRE - x.v[i]); x.v[i] = ex2(x.v[i] - OCTET_CENTRE); }
    a_k = packed(times(key, x)); a_q = packed(times(query, x)); b_k = packed(times(key, all));
    mma_bf16(diag_w[0], a_k.r, b_k.r[0], b_k.r[2]); mma_bf16(diag_w[1], a_k.r, b_k.r[1], b_k.r[3]);
    mma_bf16(diag_r[0], a_q.r, b_k.r[0], b_k.r[2]); mma_bf16(diag_r[1], a_q.r, b_k.r[1], b_k.r[3]);
  }
  for (int i = 0; i < 2; i++)
    for (int m = 1; m < 4; m <<= 1) { sum_k[i] += __shfl_xor_sync(~0u, sum_k[i], m); sum_q[i] += __shfl_xor_sync(~0u, sum_q[i], m); }
  if (t2 == 0)
    for (int i = 0; i < 2; i++) {
      float rq = l2norm ? rsqrtf(sum_q[i] + 1e-6f) : 1.0f, rk = l2norm ? rsqrtf(sum_k[i] + 1e-6f) : 1.0f;
      norms[row + 8 * i] = rq; norms[C + row + 8 * i] = rk;
      if (l2norm && row + 8 * i < length) *(float2 *)(rstd + ((start + row + 8 * i) * H + head) * 2) = make_float2(rq, rk);
    }
  __syncthreads();
  } else if (tid < C) {
    float2 pair = make_float2(1.0f, 1.0f);
    if (l2norm && tid < length) pair = *(const float2 *)(rstd + ((start + tid) * H + head) * 2);
    norms[tid] = pair.x;
    norms[C + tid] = pair.y;
  }
  if (tid < C) {
    float strength = 0.0f;
    if (tid < length) {
      strength = beta[(start + tid) * beta_token + (long long)head * beta_head];
      if (beta_sigmoid) strength = beta_max / (1.0f + __expf(-strength));
    }
    strengths[tid] = strength;
  }
  __syncthreads();
  uint4 *slots = exchange + lane;  // [16 slots][32 lanes]
  auto put = [&](int slot, const Four &f) { slots[slot * 32] = make_uint4(f.r[0], f.r[1], f.r[2], f.r[3]); };
  auto get = [&](int slot) -> Four { uint4 f = slots[slot * 32]; return {{f.x, f.y, f.z, f.w}}; };
  Block inverse = {}, corner = {}, lower[2] = {};
  if (!known) {
  Block L_far[2] = {}, L_near = {}, L_diag = {};
  // P, and L as blocks of 16 x 16.
#pragma unroll
  for (int n = 0; n < 8; n++) {
    const int block = n >> 1, side = n & 1, column = 8 * n + t2;
    float2 rk = *(float2 *)(norms + C + column);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int here = row + 8 * i;
      float rf = norms[here] * scale, wf = norms[C + here] * strengths[here];
      float r0 = 0, r1 = 0, w0 = 0, w1 = 0;
      if (block == w) {
        r0 = diag_r[side][2 * i]; r1 = diag_r[side][2 * i + 1]; w0 = diag_w[side][2 * i]; w1 = diag_w[side][2 * i + 1];
        if (side == 0 && i == 1) { r0 = half_r[2]; r1 = half_r[3]; w0 = half_w[2]; w1 = half_w[3]; }
      } else if (w >= 2 && block < 2) {
        r0 = far_r[n & 3][2 * i]; r1 = far_r[n & 3][2 * i + 1]; w0 = far_w[n & 3][2 * i]; w1 = far_w[n & 3][2 * i + 1];
      } else if (block < w) {
        r0 = near_r[side][2 * i]; r1 = near_r[side][2 * i + 1]; w0 = near_w[side][2 * i]; w1 = near_w[side][2 * i + 1];
      }
      r0 = column <= here ? r0 * rf * rk.x : 0.0f; r1 = column + 1 <= here ? r1 * rf * rk.y : 0.0f;
      w0 = column < here ? w0 * wf * rk.x : 0.0f; w1 = column + 1 < here ? w1 * wf * rk.y : 0.0f;
      *(uint32_t *)(P + (record * C + here) * C + column) = pack(r0, r1);
      auto keep = [&](Block &m) {
        float *half = side ? m.b : m.a;
        half[2 * i] = w0;
        half[2 * i + 1] = w1;
      };
      if (block == w) keep(L_diag);
      else if (w >= 2 && block < 2) keep(L_far[block & 1]);
      else if (block < w) keep(L_near);
    }
  }
  // Inverse: own block, then pairs of blocks, then the lower left quarter. Operands of other warps go through shared memory.
  inverse = inverse_of(L_diag, lane);
  put(w, right(inverse));
  __syncthreads();
  if (w & 1) {
    Block joined = product(left(L_near), get(w - 1));
    corner = minus(product(left(inverse), right(joined)));
    put(4 + (w >> 1), right(corner));       // A10, A32
  }
  __syncthreads();
  Four own = left(inverse);
  if (w >= 2) {
    Four l0 = left(L_far[0]), l1 = left(L_far[1]);
    Block t0 = product(l0, get(0)), t1 = product(l1, get(1));
    add_product(t0, l1, get(4));
    if (w == 2) { put(8, right(t0)); put(9, right(t1)); }
    lower[0] = product(own, right(t0)); lower[1] = product(own, right(t1));
  }
  __syncthreads();
  if (w == 3) { Four a32 = left(corner); add_product(lower[0], a32, get(8)); add_product(lower[1], a32, get(9)); }
  lower[0] = minus(lower[0]); lower[1] = minus(lower[1]);
  }
  // A to memory, and with beta on its columns as operand.
  Four A_op[4];
#pragma unroll
  for (int block = 0; block < 4; block++) {
    u16 *at = A + (record * C + row) * C + 16 * block + t2;
    Block m = {};
    if (known) {
      uint32_t x0 = *(const uint32_t *)at, x1 = *(const uint32_t *)(at + 8 * C);
      uint32_t x2 = *(const uint32_t *)(at + 8), x3 = *(const uint32_t *)(at + 8 * C + 8);
      m = {{low(x0), high(x0), low(x1), high(x1)}, {low(x2), high(x2), low(x3), high(x3)}};
    } else if (block == w) m = inverse;
    else if (w >= 2 && block < 2) m = lower[block & 1];
    else if (block < w) m = corner;
    float s0[2] = {strengths[16 * block + t2], strengths[16 * block + t2 + 1]}, s1[2] = {strengths[16 * block + t2 + 8], strengths[16 * block + t2 + 9]};
    const float one2[2] = {1.0f, 1.0f};
    Four plain = bf16_left(m, one2, one2);
    A_op[block] = bf16_left(m, s0, s1);
    if (!known) {
      *(uint32_t *)at = plain.r[0];
      *(uint32_t *)(at + 8 * C) = plain.r[1];
      *(uint32_t *)(at + 8) = plain.r[2];
      *(uint32_t *)(at + 8 * C + 8) = plain.r[3];
    }
  }
  __syncthreads();
  float before4[4];
  float rkk[2] = {norms[C + row], norms[C + row + 8]}, rqs[2] = {norms[row] * scale, norms[row + 8] * scale};
  bool on[2] = {row < length, row + 8 < length};
#pragma unroll 1
  for (int c = 0; c < K; c += 16) {
    Four kr, qr, gb;
    const u16 *kp = sk + (16 * w + gr) * PITCH + c + t2, *qp = sq + (16 * w + gr) * PITCH + c + t2;
    kr.r[0] = *(const uint32_t *)kp; kr.r[1] = *(const uint32_t *)(kp + 8 * PITCH); kr.r[2] = *(const uint32_t *)(kp + 8); kr.r[3] = *(const uint32_t *)(kp + 8 * PITCH + 8);
    qr.r[0] = *(const uint32_t *)qp; qr.r[1] = *(const uint32_t *)(qp + 8 * PITCH); qr.r[2] = *(const uint32_t *)(qp + 8); qr.r[3] = *(const uint32_t *)(qp + 8 * PITCH + 8);
    ldmatrix_trans(gb.r, sg + (16 * w + (lane & 15)) * PITCH + c + (lane >> 4) * 8);
    Tile key = unpacked(kr), query = unpacked(qr), prefix = sums(prefix_m, gb), rise, fall;
    float all[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int at = c + t2 + (j & 1) + (j >> 1) * 8;
      float a = totals[at], b = totals[K + at], d = totals[2 * K + at], e = totals[3 * K + at];
      before4[j] = w == 0 ? 0.0f : w == 1 ? a : w == 2 ? a + b : a + b + d;
      all[j] = a + b + d + e;
    }
    for (int i = 0; i < 8; i++) {
      float G = prefix.v[i] + before4[i & 3];
      key.v[i] *= rkk[i >> 2]; query.v[i] *= rqs[i >> 2];
      rise.v[i] = ex2(G); fall.v[i] = ex2(all[i & 3] - G);
    }
    Four write, other;
    write = packed(times(key, rise));
    int buffer = (c >> 4) & 1;
    put(buffer * 4 + w, turned(write));
    long long at = (record * C + row) * K + c + t2;
    auto store = [&](u16 *to, const Four &f) {
      *(uint32_t *)(to + at) = f.r[0];
      *(uint32_t *)(to + at + 8 * K) = f.r[1];
      *(uint32_t *)(to + at + 8) = f.r[2];
      *(uint32_t *)(to + at + 8 * K + 8) = f.r[3];
    };
    other = packed(times(query, rise)); store(from_start, other);
    other = packed(times(key, fall)); store(to_end, other);
    if (w == 0 && gr == 0) { float *to = state_decay + record * K + c + t2; to[0] = ex2(all[0]); to[1] = ex2(all[1]); to[8] = ex2(all[2]); to[9] = ex2(all[3]); }
    __syncthreads();
    float lo[4] = {}, hi[4] = {};
#pragma unroll
    for (int block = 0; block < 4; block++)
      if (block <= w) {
        Four x = get(buffer * 4 + block);
        mma_bf16(lo, A_op[block].r, x.r[0], x.r[1]); mma_bf16(hi, A_op[block].r, x.r[2], x.r[3]);
      }
    store(W, packed(tile_of(lo, hi)));
  }
  __syncthreads();
#pragma unroll 1
  for (int c = 0; c < V; c += 16) {
    Four vr = {};
    const u16 *vp = v + (start + (on[0] ? row : 0)) * (long long)v_token + (long long)head * v_head + c + t2;
    if (on[0]) { vr.r[0] = *(const uint32_t *)vp; vr.r[2] = *(const uint32_t *)(vp + 8); }
    if (on[1]) { vr.r[1] = *(const uint32_t *)(vp + 8 * (long long)v_token); vr.r[3] = *(const uint32_t *)(vp + 8 * (long long)v_token + 8); }
    int buffer = (c >> 4) & 1;
    put(buffer * 4 + w, turned(vr));
    __syncthreads();
    float lo[4] = {}, hi[4] = {};
#pragma unroll
    for (int block = 0; block < 4; block++)
      if (block <= w) {
        Four x = get(buffer * 4 + block);
        mma_bf16(lo, A_op[block].r, x.r[0], x.r[1]); mma_bf16(hi, A_op[block].r, x.r[2], x.r[3]);
      }
    u16 *at = U + (record * C + row) * V + c + t2;
    *(uint32_t *)at = pack(lo[0], lo[1]); *(uint32_t *)(at + 8 * V) = pack(lo[2], lo[3]); *(uint32_t *)(at + 8) = pack(hi[0], hi[1]); *(uint32_t *)(at + 8 * V + 8) = pack(hi[2], hi[3]);
  }
}
