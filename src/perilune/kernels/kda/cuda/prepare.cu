// P, A and the scans' operands of KDA chunks, as activate_gate, chunk_products, invert_chunks and chunk_operands of
// triton_chunk.py. One CTA of 4 warps per chunk and head; warp w owns tokens 16 w .. 16 w + 15. A level's factor of a token
// times its key is at once the row operand (A) and the column operand (B) of the products: it never leaves the registers
// except to reach the warps of other blocks. KNOWN: A and the norms are inputs, and the gates are kept for `gradients`.

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
__device__ __forceinline__ Block product(const Four &x, const Four &y) {
  Block c = {};
  add_product(c, x, y);
  return c;
}
__device__ __forceinline__ Block minus(Block m) {
  for (int i = 0; i < 4; i++) { m.a[i] = -m.a[i]; m.b[i] = -m.b[i]; }
  return m;
}
template <class F> __device__ __forceinline__ Block where(const Block &m, int lane, F keep) {
  int g = lane >> 2, t = (lane & 3) * 2;
  Block o;
  for (int i = 0; i < 4; i++) {
    int row = g + (i >> 1) * 8, col = t + (i & 1);
    o.a[i] = keep(row, col) ? m.a[i] : 0.0f;
    o.b[i] = keep(row, col + 8) ? m.b[i] : 0.0f;
  }
  return o;
}
// (I + L)^-1 of a strictly lower triangular block, by doubling blocks: nothing grows and cancels.
__device__ __forceinline__ Block inverse_of(const Block &L, int lane) {
  int g = lane >> 2, t = (lane & 3) * 2;
  Block x = where(L, lane, [](int i, int j) { return (i & 1) && i == j + 1; });
  for (int i = 0; i < 4; i++) {
    int row = g + (i >> 1) * 8, col = t + (i & 1);
    x.a[i] = (row == col ? 1.0f : 0.0f) - x.a[i];
    x.b[i] = (row == col + 8 ? 1.0f : 0.0f) - x.b[i];
  }
#pragma unroll
  for (int level = 1; level < 4; level++) {
    Block part = where(L, lane, [level](int i, int j) {
      return (i >> (level + 1)) == (j >> (level + 1)) && (i >> level) > (j >> level);
    });
    Block joined = product(left(part), right(x)), change = product(left(x), right(joined));
    for (int i = 0; i < 4; i++) { x.a[i] -= change.a[i]; x.b[i] -= change.b[i]; }
  }
  return x;
}
__device__ __forceinline__ Four in_bf16(const Block &m, float2 s, float2 t) {  // as A operand, columns scaled
  return {{pack(m.a[0] * s.x, m.a[1] * s.y), pack(m.a[2] * s.x, m.a[3] * s.y), pack(m.b[0] * t.x, m.b[1] * t.y),
           pack(m.b[2] * t.x, m.b[3] * t.y)}};
}
extern "C" __global__ void __launch_bounds__(128, KNOWN ? 4 : 3) kda_prepare(
    const u16 *q, const u16 *k, const u16 *v, const X *x, const float *A_log, const float *dt_bias, const float *beta,
    const long long *chunk_start, const int *chunk_length, u16 *P, u16 *A, float *rstd, u16 *W, u16 *U, u16 *to_end,
    u16 *from_start, float *state_decay, u16 *gates, int q_token, int q_head, int k_token, int k_head, int v_token,
    int v_head, int x_token, int x_head, int beta_token, int beta_head, int H, double scale_, double lower_bound_,
    double beta_max_, int l2norm, int beta_sigmoid, int has_rate) {
  extern __shared__ __align__(16) unsigned char memory[];
  const float scale = (float)scale_, lower_bound = (float)lower_bound_, beta_max = (float)beta_max_;
  u16 *sq = (u16 *)memory, *sk = sq + C * (K > V ? K : V), *sg = sk + C * K;  // sq holds the values later
  float *totals = (float *)(sg + C * K);       // [4 blocks][K] sums of the gates
  float *befores = totals + 4 * K, *afters = befores + 4 * K;  // [4 blocks][K]
  float *norms = afters + 4 * K;               // [2][C]
  float *strengths = norms + 2 * C;            // [C]
  uint4 *exchange = (uint4 *)(strengths + C);  // unless KNOWN: [2 buffers][4 blocks][2 levels][32 lanes]
  long long record = blockIdx.x, chunk = record / H;
  int head = record % H, length = chunk_length[chunk];
  long long start = chunk_start[chunk];
  if (length == 0) return;
  int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, gr = lane >> 2, t2 = (lane & 3) * 2;
  {
    const u16 *q_at = q + start * q_token + (long long)head * q_head, *k_at = k + start * k_token + (long long)head * k_head;
#pragma unroll
    for (int j = 0; j < K / 16; j++) {
      int row = tid / (K / 8) + j * (1024 / K), eight = tid % (K / 8);
      bool on = row < length;
      copy16(sq + spot<K>(row, eight), q_at + (on ? row * (long long)q_token : 0) + eight * 8, on);
      copy16(sk + spot<K>(row, eight), k_at + (on ? row * (long long)k_token : 0) + eight * 8, on);
    }
    commit_copies();
  }
  {  // The gates in float16. A thread has eight channels of K / 16 tokens.
    int eight = tid % (K / 8), first = tid / (K / 8);
    const X *x_at = x + start * x_token + (long long)head * x_head + eight * 8;
    Raw<8, X> raw[K / 16];
#pragma unroll
    for (int j = 0; j < K / 16; j++) {
      int row = first + j * (1024 / K);
      raw[j].load(x_at + (row < length ? row * (long long)x_token : 0));
    }
    if (tid < C) {
      float strength = 0.0f;
      float2 pair = make_float2(1.0f, 1.0f);
      if (tid < length) {
        strength = beta[(start + tid) * beta_token + (long long)head * beta_head];
        if (beta_sigmoid) strength = beta_max / (1.0f + __expf(-strength));
        if (KNOWN && l2norm) pair = *(const float2 *)(rstd + ((start + tid) * H + head) * 2);
      }
      strengths[tid] = strength;
      norms[tid] = pair.x;
      norms[C + tid] = pair.y;
    }
    float bias[8] = {}, rate = 1.0f;
    if (GATE) {
      for (int i = 0; i < 8; i++) bias[i] = dt_bias[head * K + eight * 8 + i];
      if (has_rate) rate = __expf(A_log[head]);
    }
#pragma unroll
    for (int j = 0; j < K / 16; j++) {
      int row = first + j * (1024 / K);
      uint32_t two[4];
      for (int i = 0; i < 4; i++) {
        float a = log2_decay(raw[j].get(2 * i) + bias[2 * i], rate, lower_bound);
        float b = log2_decay(raw[j].get(2 * i + 1) + bias[2 * i + 1], rate, lower_bound);
        two[i] = row < length ? pack_f16(a, b) : 0u;
      }
      if (KNOWN && row < length)
        *(uint4 *)(gates + ((start + row) * H + head) * K + eight * 8) = make_uint4(two[0], two[1], two[2], two[3]);
      int side = (eight & 1) * 4;  // in the order of `Tile`: channels 0, 1, 4, 5, 8, 9, 12, 13, then the others
      *(uint2 *)(sg + spot<K>(row, eight & ~1) + side) = make_uint2(two[0], two[2]);
      *(uint2 *)(sg + spot<K>(row, eight | 1) + side) = make_uint2(two[1], two[3]);
    }
  }
  wait_for_copies();
  __syncthreads();

  const int row = 16 * w + gr, four = t2 * 2;  // a lane has channels `four` .. `four` + 3 of a tile, of tokens row and row + 8
  auto at = [&](int c) { return spot<K>(row, (c >> 3) + (t2 >> 2)) + (t2 & 2) * 2; };
  auto load = [&](const u16 *from, int c) -> Four {
    uint2 a = *(const uint2 *)(from + at(c)), b = *(const uint2 *)(from + at(c) + 8 * K);
    return {{a.x, b.x, a.y, b.y}};
  };
  auto column = [&](uint32_t (&r)[4], const u16 *from, int block, int c) {  // B operand over the tokens of a block
    ldmatrix_trans(r, from + spot<K>(16 * block + (lane & 15), (c >> 3) + (lane >> 4)));
  };
  uint32_t prefix_m[4];
  mask_operand(prefix_m, lane, ONE_F16, [](int i, int t) { return t <= i; });
  const uint32_t ones = ONE_F16 | ONE_F16 << 16, ones_m[4] = {ones, ones, ones, ones};
  // Totals of the blocks, which the other blocks' anchors need.
#pragma unroll 2
  for (int c = 0; c < K; c += 16) {
    Four gb;
    column(gb.r, sg, w, c);
    Tile all = sums(ones_m, gb);
    if (gr == 0) *(float4 *)(totals + w * K + c + four) = make_float4(all.v[0], all.v[1], all.v[2], all.v[3]);
  }
  __syncthreads();
  add_up(totals, befores, afters, tid);
  __syncthreads();
  Four A_op[4];
#if !KNOWN
  {
    // Products of 16 rows with columns as n8 tiles: blocks 0 and 1 (level 32), the block before (level 16), the own one.
    float far_r[4][4] = {}, far_w[4][4] = {}, near_r[2][4] = {}, near_w[2][4] = {}, diag_r[2][4] = {}, diag_w[2][4] = {};
    float half_r[4] = {}, half_w[4] = {};
    float sum_q[2] = {0, 0}, sum_k[2] = {0, 0};
    uint32_t half_m[4], octet_m[4];
    mask_operand(half_m, lane, ONE_F16, [](int i, int t) { return i >= 8 ? (t >= 8 && t <= i) : (t < 8 && t > i); });
    mask_operand(octet_m, lane, ONE_F16, [](int i, int t) { return (i >> 3) == (t >> 3) && t <= i; });
    const uint32_t clamp = pack_f16(SMALLEST_OCTET_GATE, SMALLEST_OCTET_GATE);
#pragma unroll 1
    for (int c = 0; c < K; c += 16) {
      Four gb;
      column(gb.r, sg, w, c);
      Tile key = unpacked(load(sk, c)), query = unpacked(load(sq, c)), x, y;
      for (int i = 0; i < 8; i++) { sum_k[i >> 2] += key.v[i] * key.v[i]; sum_q[i >> 2] += query.v[i] * query.v[i]; }
      Tile prefix = sums(prefix_m, gb);
      float4 own4 = *(const float4 *)(totals + w * K + c + four);
      float4 other4 = *(const float4 *)(totals + (w == 0 ? 1 : 2) * K + c + four);
      Four a_k, a_q, b_k, b_q;
      uint4 *out = exchange + (((c >> 4) & 1) * 4 + w) * 2 * 32 + lane;
      Tile x16, x32;
      anchored(x16, x32, prefix, own4, other4, w);
      a_k = packed(times(key, x16));
      if (!(w & 1)) out[0] = make_uint4(a_k.r[0], a_k.r[1], a_k.r[2], a_k.r[3]);
      b_k = packed(times(key, x32));
      if (w < 2) out[32] = make_uint4(b_k.r[0], b_k.r[1], b_k.r[2], b_k.r[3]);
      if (w & 1) a_q = packed(times(query, x16));
      if (w >= 2) b_q = packed(times(query, x32));
      {  // Inside the block: its halves, then its eights. Both keep to the first column tile, or to the diagonal.
        x = sums(half_m, gb);
        for (int i = 0; i < 8; i++) x.v[i] = ex2(x.v[i]);
        Four ck = packed(times(key, x)), cq = packed(times(query, x));
        mma_bf16(half_w, ck.r, ck.r[0], ck.r[2]);
        mma_bf16(half_r, cq.r, ck.r[0], ck.r[2]);
        for (int i = 0; i < 4; i++) gb.r[i] = max_f16x2(gb.r[i], clamp);
        x = sums(octet_m, gb);
        for (int i = 0; i < 8; i++) { y.v[i] = ex2(OCTET_CENTRE - x.v[i]); x.v[i] = ex2(x.v[i] - OCTET_CENTRE); }
        ck = packed(times(key, x));
        cq = packed(times(query, x));
        Four cols = packed(times(key, y));
        mma_bf16(diag_w[0], ck.r, cols.r[0], cols.r[2]);
        mma_bf16(diag_w[1], ck.r, cols.r[1], cols.r[3]);
        mma_bf16(diag_r[0], cq.r, cols.r[0], cols.r[2]);
        mma_bf16(diag_r[1], cq.r, cols.r[1], cols.r[3]);
      }
      __syncthreads();
      const uint4 *in = exchange + ((c >> 4) & 1) * 4 * 2 * 32 + lane;
      if (w & 1) {
        uint4 col = in[(w - 1) * 64];
        mma_bf16(near_w[0], a_k.r, col.x, col.z);
        mma_bf16(near_w[1], a_k.r, col.y, col.w);
        mma_bf16(near_r[0], a_q.r, col.x, col.z);
        mma_bf16(near_r[1], a_q.r, col.y, col.w);
      }
      if (w >= 2) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          uint4 col = in[j * 64 + 32];
          mma_bf16(far_w[2 * j], b_k.r, col.x, col.z);
          mma_bf16(far_w[2 * j + 1], b_k.r, col.y, col.w);
          mma_bf16(far_r[2 * j], b_q.r, col.x, col.z);
          mma_bf16(far_r[2 * j + 1], b_q.r, col.y, col.w);
        }
      }
    }
    if (l2norm) {
      for (int i = 0; i < 2; i++)
        for (int m = 1; m < 4; m <<= 1) {
          sum_k[i] += __shfl_xor_sync(~0u, sum_k[i], m);
          sum_q[i] += __shfl_xor_sync(~0u, sum_q[i], m);
        }
      if (t2 == 0)
        for (int i = 0; i < 2; i++) {
          float2 pair = make_float2(rsqrtf(sum_q[i] + 1e-6f), rsqrtf(sum_k[i] + 1e-6f));
          norms[row + 8 * i] = pair.x;
          norms[C + row + 8 * i] = pair.y;
          if (row + 8 * i < length) *(float2 *)(rstd + ((start + row + 8 * i) * H + head) * 2) = pair;
        }
    }
    __syncthreads();
    // P, and L as blocks of 16 x 16.
    Block L_far[2] = {}, L_near = {}, L_diag = {};
#pragma unroll
    for (int block = 0; block < 4; block++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        int here = row + 8 * i;
        float rf = norms[here] * scale, wf = norms[C + here] * strengths[here];
        uint32_t two[2];
#pragma unroll
        for (int side = 0; side < 2; side++) {
          const int n = block * 2 + side, column = 8 * n + t2;
          float2 rk = *(float2 *)(norms + C + column);
          float r0 = 0, r1 = 0, w0 = 0, w1 = 0;
          if (block == w) {
            r0 = diag_r[side][2 * i], r1 = diag_r[side][2 * i + 1], w0 = diag_w[side][2 * i], w1 = diag_w[side][2 * i + 1];
            if (side == 0 && i == 1) r0 = half_r[2], r1 = half_r[3], w0 = half_w[2], w1 = half_w[3];
          } else if (w >= 2 && block < 2) {
            r0 = far_r[n & 3][2 * i], r1 = far_r[n & 3][2 * i + 1], w0 = far_w[n & 3][2 * i], w1 = far_w[n & 3][2 * i + 1];
          } else if (block < w) {
            r0 = near_r[side][2 * i], r1 = near_r[side][2 * i + 1], w0 = near_w[side][2 * i], w1 = near_w[side][2 * i + 1];
          }
          two[side] = pack(column <= here ? r0 * rf * rk.x : 0.0f, column + 1 <= here ? r1 * rf * rk.y : 0.0f);
          w0 = column < here ? w0 * wf * rk.x : 0.0f;
          w1 = column + 1 < here ? w1 * wf * rk.y : 0.0f;
          auto keep = [&](Block &m) {
            float *half = side ? m.b : m.a;
            half[2 * i] = w0;
            half[2 * i + 1] = w1;
          };
          if (block == w) keep(L_diag);
          else if (w >= 2 && block < 2) keep(L_far[block & 1]);
          else if (block < w) keep(L_near);
        }
        *(uint2 *)(P + (record * C + here) * C + 16 * block + neighbours_column(lane)) = with_neighbours(two[0], two[1], lane);
      }
    }
    // Inverse: own block, then pairs of blocks, then the lower left quarter. Operands of other warps go through shared memory.
    uint4 *slots = exchange + lane;  // [16 slots][32 lanes]
    auto put = [&](int slot, const Four &f) { slots[slot * 32] = make_uint4(f.r[0], f.r[1], f.r[2], f.r[3]); };
    auto get = [&](int slot) -> Four { uint4 f = slots[slot * 32]; return {{f.x, f.y, f.z, f.w}}; };
    Block corner = {}, lower[2] = {}, inverse = inverse_of(L_diag, lane);
    put(w, right(inverse));
    __syncthreads();
    if (w & 1) {
      Block joined = product(left(L_near), get(w - 1));
      corner = minus(product(left(inverse), right(joined)));
      put(4 + (w >> 1), right(corner));  // A10, A32
    }
    __syncthreads();
    if (w >= 2) {
      Four l0 = left(L_far[0]), l1 = left(L_far[1]), own = left(inverse);
      Block t0 = product(l0, get(0)), t1 = product(l1, get(1));
      add_product(t0, l1, get(4));
      if (w == 2) { put(8, right(t0)); put(9, right(t1)); }
      lower[0] = product(own, right(t0));
      lower[1] = product(own, right(t1));
    }
    __syncthreads();
    if (w == 3) {
      Four a32 = left(corner);
      add_product(lower[0], a32, get(8));
      add_product(lower[1], a32, get(9));
    }
    // A to memory, and with beta on its columns as operand.
#pragma unroll
    for (int block = 0; block < 4; block++) {
      Block m = {};
      if (block == w) m = inverse;
      else if (w >= 2 && block < 2) m = minus(lower[block & 1]);
      else if (block < w) m = corner;
      const float2 one = make_float2(1.0f, 1.0f), *s = (const float2 *)(strengths + 16 * block + t2);
      Four plain = in_bf16(m, one, one);
      A_op[block] = in_bf16(m, s[0], s[4]);
      u16 *to = A + (record * C + row) * C + 16 * block + neighbours_column(lane);
      *(uint2 *)to = with_neighbours(plain.r[0], plain.r[2], lane);
      *(uint2 *)(to + 8 * C) = with_neighbours(plain.r[1], plain.r[3], lane);
    }
  }
#else
  uint2 stored[4][2];
#pragma unroll
  for (int block = 0; block < 4; block++)
    if (block <= w) {
      const u16 *from = A + (record * C + row) * C + 16 * block + neighbours_column(lane);
      stored[block][0] = *(const uint2 *)from;
      stored[block][1] = *(const uint2 *)(from + 8 * C);
    }
#endif
  // What the scans read of q and k: written to memory, and beta-free writing rows over the gates.
  float rkk[2] = {norms[C + row], norms[C + row + 8]}, rqs[2] = {norms[row] * scale, norms[row + 8] * scale};
  u16 *const from_start_at = from_start + (record * C + row) * K + four, *const to_end_at = to_end + (record * C + row) * K + four;
  auto store = [&](u16 *to, int width, const Four &f) {
    *(uint2 *)to = make_uint2(f.r[0], f.r[2]);
    *(uint2 *)(to + 8 * width) = make_uint2(f.r[1], f.r[3]);
  };
#pragma unroll 2
  for (int c = 0; c < K; c += 16) {
    Four gb;
    column(gb.r, sg, w, c);
    Tile key = unpacked(load(sk, c)), query = unpacked(load(sq, c)), prefix = sums(prefix_m, gb), rise, fall;
    const float4 b4 = *(const float4 *)(befores + w * K + c + four), a4 = *(const float4 *)(afters + w * K + c + four);
    const float before[4] = {b4.x, b4.y, b4.z, b4.w}, after[4] = {a4.x, a4.y, a4.z, a4.w};
    for (int i = 0; i < 8; i++) {
      key.v[i] *= rkk[i >> 2];
      query.v[i] *= rqs[i >> 2];
      rise.v[i] = ex2(before[i & 3] + prefix.v[i]);
      fall.v[i] = ex2(after[i & 3] - prefix.v[i]);
    }
    store(from_start_at + c, K, packed(times(query, rise)));
    store(to_end_at + c, K, packed(times(key, fall)));
    if (w == 0 && gr == 0)
      *(float4 *)(state_decay + record * K + c + four) = make_float4(ex2(after[0]), ex2(after[1]), ex2(after[2]), ex2(after[3]));
    Four write = packed(times(key, rise));
    u16 *lo = sg + spot<K>(row, c >> 3) + t2, *hi = sg + spot<K>(row, (c >> 3) + 1) + t2;
    __syncwarp();
    *(uint32_t *)lo = write.r[0];
    *(uint32_t *)(lo + 8 * K) = write.r[1];
    *(uint32_t *)hi = write.r[2];
    *(uint32_t *)(hi + 8 * K) = write.r[3];
  }
  __syncthreads();
  const u16 *v_at = v + start * v_token + (long long)head * v_head;
#pragma unroll
  for (int j = 0; j < V / 16; j++) {
    int token = tid / (V / 8) + j * (1024 / V), eight = tid % (V / 8);
    bool on = token < length;
    copy16(sq + spot<V>(token, eight), v_at + (on ? token * (long long)v_token : 0) + eight * 8, on);
  }
  commit_copies();
#if KNOWN
#pragma unroll
  for (int block = 0; block < 4; block++)
    if (block <= w) {
      const float2 *s = (const float2 *)(strengths + 16 * block + t2);
      uint2 up = from_neighbours(stored[block][0], lane), down = from_neighbours(stored[block][1], lane);
      Block m = {{low(up.x), high(up.x), low(down.x), high(down.x)}, {low(up.y), high(up.y), low(down.y), high(down.y)}};
      A_op[block] = in_bf16(m, s[0], s[4]);
    }
#endif
  u16 *const W_at = W + (record * C + row) * K + four;
#pragma unroll 2
  for (int c = 0; c < K; c += 16) {
    float lo[4] = {}, hi[4] = {};
#pragma unroll
    for (int block = 0; block < 4; block++)
      if (block <= w) {
        uint32_t x[4];
        column(x, sg, block, c);
        mma_bf16(lo, A_op[block].r, x[0], x[1]);
        mma_bf16(hi, A_op[block].r, x[2], x[3]);
      }
    store(W_at + c, K, packed(tile_of(lo, hi)));
  }
  wait_for_copies();
  __syncthreads();
  u16 *const U_at = U + (record * C + row) * V + neighbours_column(lane);
#pragma unroll 2
  for (int c = 0; c < V; c += 16) {
    float lo[4] = {}, hi[4] = {};
#pragma unroll
    for (int block = 0; block < 4; block++)
      if (block <= w) {
        uint32_t x[4];
        ldmatrix_trans(x, sq + spot<V>(16 * block + (lane & 15), (c >> 3) + (lane >> 4)));
        mma_bf16(lo, A_op[block].r, x[0], x[1]);
        mma_bf16(hi, A_op[block].r, x[2], x[3]);
      }
    Four f = packed(tile_of(lo, hi));
    *(uint2 *)(U_at + c) = with_neighbours(f.r[0], f.r[2], lane);
    *(uint2 *)(U_at + c + 8 * V) = with_neighbours(f.r[1], f.r[3], lane);
  }
}
