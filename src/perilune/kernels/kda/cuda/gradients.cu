// Gradients inside KDA chunks, as chunk_gradients of triton_gradients.py.
// One CTA of 4 warps per chunk and head, warp w owns tokens 16 w .. 16 w + 15; channels go by 16 at a time.
#define PITCH (V + 8)

struct Sum { float a[4], b[4]; };  // 16 tokens x 16 channels, two n8 tiles
__device__ __forceinline__ void add(Sum &s, const uint32_t (&m)[4], const Four &x) {
  mma_bf16(s.a, m, x.r[0], x.r[1]);
  mma_bf16(s.b, m, x.r[2], x.r[3]);
}
__device__ __forceinline__ void load_pairs(uint32_t (&m)[4], const u16 *pairs, int lane, bool transposed) {
  const u16 *p = pairs + (lane >> 2) * C + (lane & 3) * 2;
  uint32_t x0 = *(const uint32_t *)p, x1 = *(const uint32_t *)(p + 8 * C), x2 = *(const uint32_t *)(p + 8), x3 = *(const uint32_t *)(p + 8 * C + 8);
  if (transposed) { m[0] = turned(x0); m[1] = turned(x2); m[2] = turned(x1); m[3] = turned(x3); }
  else { m[0] = x0; m[1] = x1; m[2] = x2; m[3] = x3; }
}

extern "C" __global__ void __launch_bounds__(128, 3) kda_gradients(
    const u16 *q, const u16 *k, const u16 *g, const float *beta, const u16 *d_o, const float *rstd, const float *along,
    const float *flows, const long long *chunk_start, const int *chunk_length, const u16 *signals, const u16 *writes,
    const u16 *states, const u16 *d_states, const u16 *d_L, const u16 *d_P, u16 *d_q, u16 *d_k, u16 *d_g /* bf16 */,
    float *d_beta /* values' part in, whole out; of the strength */, int q_token, int q_head, int k_token, int k_head,
    int beta_token, int beta_head, int do_token, int do_head, int H, double scale_, double beta_max_, int num_flows,
    int l2norm, int beta_sigmoid) {
  extern __shared__ __align__(16) unsigned char memory[];
  const float scale = (float)scale_, beta_max = (float)beta_max_;
  u16 *sy = (u16 *)memory, *so = sy + C * PITCH, *sd = so + C * PITCH, *ss = sd + C * PITCH, *sds = ss + 16 * PITCH;
  uint4 *exchange = (uint4 *)(sds + 16 * PITCH);           // [4 blocks][2 levels][2 operands][32 lanes]
  float *totals = (float *)(exchange + 4 * 2 * 2 * 32);    // [4][K] sums of a block's gates
  float *ends = totals + 4 * K;                            // [2 kinds][4 blocks][16]
  float *flow = ends + 128;                                // [K]
  long long record = blockIdx.x, chunk = record / H;
  int head = record % H, length = chunk_length[chunk];
  if (length == 0) return;
  long long start = chunk_start[chunk];
  int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, gr = lane >> 2, t2 = (lane & 3) * 2;
  for (int i = tid; i < C * (V / 8); i += 128) {
    int row = i / (V / 8), col = (i % (V / 8)) * 8;
    bool on = row < length;
    long long at = (record * C + row) * V + col;
    copy16(sy + row * PITCH + col, signals + at, on);
    copy16(sd + row * PITCH + col, writes + at, on);
    copy16(so + row * PITCH + col, d_o + (start + (on ? row : 0)) * do_token + (long long)head * do_head + col, on);
  }
  const u16 *from_s = states + record * K * V, *from_d = d_states + record * K * V;
  auto fetch_states = [&](int c) {
#pragma unroll
    for (int j = 0; j < 16 * (V / 8) / 128; j++) {
      int i = tid + 128 * j, row = i / (V / 8), col = (i % (V / 8)) * 8, at = (c + row) * V + col;
      copy16(ss + row * PITCH + col, from_s + at, true);
      copy16(sds + row * PITCH + col, from_d + at, true);
    }
    commit_copies();
  };
  fetch_states(0);
  uint32_t prefix_m[4], half_m[4], octet_m[4], later_m[4];
  mask_operand(prefix_m, lane, ONE_F16, [](int i, int t) { return t <= i; });
  mask_operand(half_m, lane, ONE_F16, [](int i, int t) { return i >= 8 ? (t >= 8 && t <= i) : (t < 8 && t > i); });
  mask_operand(octet_m, lane, ONE_F16, [](int i, int t) { return (i >> 3) == (t >> 3) && t <= i; });
  mask_operand(later_m, lane, ONE_BF16, [](int i, int t) { return t >= i; });
  const uint32_t ones = ONE_F16 | ONE_F16 << 16, ones_m[4] = {ones, ones, ones, ones};

  int row = 16 * w + gr;
  bool on0 = row < length, on1 = row + 8 < length;
  long long token0 = start + (on0 ? row : 0), token1 = start + (on1 ? row + 8 : 0);
  long long place0 = token0 * H + head, place1 = token1 * H + head;
  float rq[2] = {1, 1}, rk[2] = {1, 1}, aq[2] = {0, 0}, ak[2] = {0, 0}, strength[2];
  strength[0] = on0 ? beta[token0 * beta_token + (long long)head * beta_head] : 0.0f;
  strength[1] = on1 ? beta[token1 * beta_token + (long long)head * beta_head] : 0.0f;
  float logit[2] = {strength[0], strength[1]};
  if (beta_sigmoid) {
    strength[0] = on0 ? beta_max / (1.0f + __expf(-logit[0])) : 0.0f;
    strength[1] = on1 ? beta_max / (1.0f + __expf(-logit[1])) : 0.0f;
  }
  if (l2norm) {
    float2 a = *(const float2 *)(rstd + place0 * 2), b = *(const float2 *)(rstd + place1 * 2);
    rq[0] = a.x; rk[0] = a.y; rq[1] = b.x; rk[1] = b.y;
    a = *(const float2 *)(along + place0 * 2); b = *(const float2 *)(along + place1 * 2);
    aq[0] = a.x; ak[0] = a.y; aq[1] = b.x; ak[1] = b.y;
  }
  auto load_tile = [&](const u16 *base, long long t_stride, long long h_offset, int c) -> Four {
    const u16 *p0 = base + token0 * (long long)t_stride + h_offset + c + t2, *p1 = base + token1 * t_stride + h_offset + c + t2;
    return {{on0 ? *(const uint32_t *)p0 : 0u, on1 ? *(const uint32_t *)p1 : 0u, on0 ? *(const uint32_t *)(p0 + 8) : 0u, on1 ? *(const uint32_t *)(p1 + 8) : 0u}};
  };
  // Totals of the blocks' gates.
  for (int c = 0; c < K; c += 16) {
    Four gf = load_tile(g, (long long)H * K, (long long)head * K, c);
    Four gb = turned(gf);
    Tile all = sums(ones_m, gb);
    if (gr == 0) {
      totals[w * K + c + t2] = all.v[0]; totals[w * K + c + t2 + 1] = all.v[1];
      totals[w * K + c + t2 + 8] = all.v[2]; totals[w * K + c + t2 + 9] = all.v[3];
    }
  }
  for (int i = tid; i < K; i += 128) {
    float sum = 0;
#pragma unroll 1
    for (int f = 0; f < num_flows; f++) sum += flows[(record * num_flows + f) * K + i];
    flow[i] = sum;
  }
  __syncthreads();
  // Which blocks lie before and after this one, and between it and the anchor of level 32.
  const float is_0 = w == 0, is_3 = w == 3, after_0 = w > 0, after_1 = w > 1, before_2 = w < 2, before_3 = w < 3;
  // Gradients of the pairs, kept for all channels. Far: blocks of the other half; near: the neighbour; diag: the own block.
  const u16 *pl = d_L + record * C * C, *pp = d_P + record * C * C;
  bool far_rows = w >= 2, near_rows = w & 1;
  uint32_t far_l[2][4], far_p[2][4], near_l[4], near_p[4], diag_l[4], diag_p[4], diag_lt[4], diag_pt[4];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    int at = far_rows ? 16 * w * C + 16 * j : 16 * (2 + j) * C + 16 * w;
    load_pairs(far_l[j], pl + at, lane, !far_rows); load_pairs(far_p[j], pp + at, lane, !far_rows);
  }
  {
    int at = near_rows ? 16 * w * C + 16 * (w - 1) : 16 * (w + 1) * C + 16 * w;
    load_pairs(near_l, pl + at, lane, !near_rows); load_pairs(near_p, pp + at, lane, !near_rows);
    at = 16 * w * C + 16 * w;
    load_pairs(diag_l, pl + at, lane, false); load_pairs(diag_p, pp + at, lane, false);
    load_pairs(diag_lt, pl + at, lane, true); load_pairs(diag_pt, pp + at, lane, true);
  }
  const uint32_t clamp = pack_f16(SMALLEST_OCTET_GATE, SMALLEST_OCTET_GATE);
  float strength_part[2] = {0, 0};
  __syncthreads();

#pragma unroll 1
  for (int c = 0; c < K; c += 16) {
    Four kf = load_tile(k, k_token, (long long)head * k_head, c), qf = load_tile(q, q_token, (long long)head * q_head, c);
    Four gf = load_tile(g, (long long)H * K, (long long)head * K, c);
    Tile key = unpacked(kf), query = unpacked(qf);
    for (int i = 0; i < 8; i++) { key.v[i] *= rk[i >> 2]; query.v[i] *= rq[i >> 2] * scale; }
    Four gb = turned(gf);
    Tile prefix = sums(prefix_m, gb), x, y, product;
    // Factors of the two upper levels, from the start of the rows' side or to it, and from and to the ends of the chunk.
    Tile x16, x32, rise, fall;
    for (int j = 0; j < 4; j++) {
      const float *at = totals + c + t2 + (j & 1) + (j >> 1) * 8;
      float t0 = at[0], t1 = at[K], t2_ = at[2 * K], t3 = at[3 * K], own = at[w * K];
      float before = t0 * after_0 + t1 * after_1 + t2_ * is_3, after = t1 * is_0 + t2_ * before_2 + t3 * before_3;
      float beyond = t1 * is_0 + t2_ * is_3;
      for (int i = j; i < 8; i += 4) {
        float to_end = own - prefix.v[i];
        x16.v[i] = ex2(near_rows ? prefix.v[i] : to_end);
        x32.v[i] = ex2((far_rows ? prefix.v[i] : to_end) + beyond);
        rise.v[i] = ex2(prefix.v[i] + before);
        fall.v[i] = ex2(to_end + after);
      }
    }
    auto with_strength = [&](Tile p) { for (int i = 0; i < 8; i++) p.v[i] *= strength[i >> 2]; return p; };
    uint4 *out = exchange + w * 128 + lane;
    auto put = [&](int slot, const Four &f) { out[slot * 32] = make_uint4(f.r[0], f.r[1], f.r[2], f.r[3]); };
    product = times(key, x16);
    if (near_rows) { put(0, turned(packed(with_strength(product)))); put(1, turned(packed(times(query, x16)))); } else put(0, turned(packed(product)));
    product = times(key, x32);
    if (far_rows) { put(2, turned(packed(with_strength(product)))); put(3, turned(packed(times(query, x32)))); } else put(2, turned(packed(product)));
    wait_for_copies();
    __syncthreads();
    auto get = [&](int block, int slot) -> Four { uint4 f = exchange[block * 128 + slot * 32 + lane]; return {{f.x, f.y, f.z, f.w}}; };

    Tile d_write, d_read, d_key;
    {
      Sum a = {}, b = {};
      if (far_rows) {
#pragma unroll
        for (int j = 0; j < 2; j++) { Four col = get(j, 2); add(a, far_l[j], col); add(b, far_p[j], col); }
      } else {
#pragma unroll
        for (int j = 0; j < 2; j++) { add(a, far_l[j], get(2 + j, 2)); add(a, far_p[j], get(2 + j, 3)); }
      }
      Tile ta = tile_of(a.a, a.b), tb = tile_of(b.a, b.b);
      for (int i = 0; i < 8; i++) {
        d_write.v[i] = far_rows ? ta.v[i] * x32.v[i] : 0.0f; d_read.v[i] = far_rows ? tb.v[i] * x32.v[i] : 0.0f;
        d_key.v[i] = far_rows ? 0.0f : ta.v[i] * x32.v[i];
      }
      Sum e = {}, f = {};
      if (near_rows) { Four col = get(w - 1, 0); add(e, near_l, col); add(f, near_p, col); }
      else { add(e, near_l, get(w + 1, 0)); add(e, near_p, get(w + 1, 1)); }
      ta = tile_of(e.a, e.b); tb = tile_of(f.a, f.b);
      for (int i = 0; i < 8; i++) {
        if (near_rows) { d_write.v[i] += ta.v[i] * x16.v[i]; d_read.v[i] += tb.v[i] * x16.v[i]; } else d_key.v[i] += ta.v[i] * x16.v[i];
      }
    }
    {  // Rows 8-15 against columns 0-7 of the block.
      x = sums(half_m, gb);
      for (int i = 0; i < 8; i++) x.v[i] = ex2(x.v[i]);
      Tile kx = times(key, x);
      Four col = turned(packed(kx)), wr = turned(packed(with_strength(kx))), rr = turned(packed(times(query, x)));
      uint32_t ml[4] = {0, diag_l[1], 0, 0}, mp[4] = {0, diag_p[1], 0, 0}, tl[4] = {0, 0, diag_lt[2], 0}, tp[4] = {0, 0, diag_pt[2], 0};
      Sum a = {}, b = {}, t = {};
      add(a, ml, col); add(b, mp, col); add(t, tl, wr); add(t, tp, rr);
      Tile ta = tile_of(a.a, a.b), tb = tile_of(b.a, b.b), tt = tile_of(t.a, t.b);
      for (int i = 0; i < 8; i++) { d_write.v[i] += ta.v[i] * x.v[i]; d_read.v[i] += tb.v[i] * x.v[i]; d_key.v[i] += tt.v[i] * x.v[i]; }
    }
    Tile key_part;
    {  // Through the states.
      Sum a = {}, b = {}, t = {};
#pragma unroll 2
      for (int v = 0; v < V; v += 16) {
        uint32_t my[4], mo[4], md[4], bs[4], bd[4];
        const int at = (16 * w + (lane & 15)) * PITCH + v + (lane >> 4) * 8;
        ldmatrix(my, sy + at); ldmatrix(mo, so + at); ldmatrix(md, sd + at);
        const int sat = ((lane & 7) + ((lane >> 4) & 1) * 8) * PITCH + v + ((lane >> 3) & 1) * 8;
        ldmatrix(bs, ss + sat); ldmatrix(bd, sds + sat);
        Four s = {{bs[0], bs[1], bs[2], bs[3]}}, d = {{bd[0], bd[1], bd[2], bd[3]}};
        add(a, my, s); add(b, mo, s); add(t, md, d);
      }
      Tile ta = tile_of(a.a, a.b), tb = tile_of(b.a, b.b), tt = tile_of(t.a, t.b);
      for (int i = 0; i < 8; i++) {
        d_write.v[i] += ta.v[i] * rise.v[i]; d_read.v[i] += tb.v[i] * rise.v[i];
        float to_state = tt.v[i] * fall.v[i];
        d_key.v[i] += to_state; key_part.v[i] = key.v[i] * to_state;
      }
    }
    // dG, its sums from a token to the end of the chunk, and what reaches the gates through the state.
    Tile d_sum, rest;
    for (int i = 0; i < 8; i++) d_sum.v[i] = key.v[i] * (strength[i >> 2] * d_write.v[i] - d_key.v[i]) + query.v[i] * d_read.v[i];
    {  // Inside the eights. A token's pair with itself must cancel in dG: there the factors are the rounded ones of the products.
      for (int i = 0; i < 4; i++) gb.r[i] = max_f16x2(gb.r[i], clamp);
      x = sums(octet_m, gb);
      for (int i = 0; i < 8; i++) { y.v[i] = ex2(OCTET_CENTRE - x.v[i]); x.v[i] = ex2(x.v[i] - OCTET_CENTRE); }
      Four fc = packed(times(key, y)), fw = packed(with_strength(times(key, x))), fr = packed(times(query, x));
      Four col = turned(fc), wr = turned(fw), rr = turned(fr);
      uint32_t ml[4] = {diag_l[0], 0, 0, diag_l[3]}, mp[4] = {diag_p[0], 0, 0, diag_p[3]};
      uint32_t tl[4] = {diag_lt[0], 0, 0, diag_lt[3]}, tp[4] = {diag_pt[0], 0, 0, diag_pt[3]};
      Sum a = {}, b = {}, t = {};
      add(a, ml, col); add(b, mp, col); add(t, tl, wr); add(t, tp, rr);
      Tile ta = tile_of(a.a, a.b), tb = tile_of(b.a, b.b), tt = tile_of(t.a, t.b), rc = unpacked(fc), rw = unpacked(fw), rr_ = unpacked(fr);
      for (int i = 0; i < 8; i++) {
        d_write.v[i] += ta.v[i] * x.v[i]; d_read.v[i] += tb.v[i] * x.v[i]; d_key.v[i] += tt.v[i] * y.v[i];
        d_sum.v[i] += rw.v[i] * ta.v[i] + rr_.v[i] * tb.v[i] - rc.v[i] * tt.v[i];
      }
    }
    for (int i = 0; i < 8; i++) strength_part[i >> 2] += d_write.v[i] * key.v[i];
    Four hi = packed(d_sum);
    Tile hi_f = unpacked(hi);
    for (int i = 0; i < 8; i++) rest.v[i] = d_sum.v[i] - hi_f.v[i];
    Four hi_t = turned(hi), lo_t = turned(packed(rest));
    Sum s = {};
    add(s, later_m, hi_t); add(s, later_m, lo_t);
    Tile d_gate = tile_of(s.a, s.b);
    float keys[4];
    for (int i = 0; i < 4; i++) {
      keys[i] = key_part.v[i] + key_part.v[i + 4];
      for (int m = 4; m < 32; m <<= 1) keys[i] += __shfl_xor_sync(~0u, keys[i], m);
    }
    if (gr == 0)
      for (int i = 0; i < 4; i++) {
        int at = w * 16 + t2 + (i & 1) + (i >> 1) * 8;
        ends[at] = d_gate.v[i];  // row 0 of the block holds its sum
        ends[64 + at] = keys[i];
      }
    __syncthreads();
    if (c + 16 < K) fetch_states(c + 16);
    float last[4];
    for (int i = 0; i < 4; i++) {
      int at = t2 + (i & 1) + (i >> 1) * 8;
      last[i] = ends[64 + at] + ends[80 + at] + ends[96 + at] + ends[112 + at];
      for (int b = 0; b < 4; b++) last[i] += b > w ? ends[b * 16 + at] : 0.0f;
      last[i] += flow[c + at];
    }
    Tile d_query;
    for (int i = 0; i < 8; i++) {
      int r = i >> 2;
      d_gate.v[i] += last[i & 3];
      float kg = d_key.v[i] + d_write.v[i] * strength[r], qg = d_read.v[i] * scale;
      if (l2norm) { kg = (kg - key.v[i] * ak[r]) * rk[r]; qg = (qg - query.v[i] * (aq[r] / scale)) * rq[r]; }
      d_key.v[i] = kg; d_query.v[i] = qg;
    }
    auto store = [&](u16 *base, const Tile &v) {
      Four f = packed(v);
      u16 *p0 = base + place0 * K + c + t2, *p1 = base + place1 * K + c + t2;
      if (on0) { *(uint32_t *)p0 = f.r[0]; *(uint32_t *)(p0 + 8) = f.r[2]; }
      if (on1) { *(uint32_t *)p1 = f.r[1]; *(uint32_t *)(p1 + 8) = f.r[3]; }
    };
    store(d_q, d_query); store(d_k, d_key); store(d_g, d_gate);
  }
  for (int r = 0; r < 2; r++) {
    strength_part[r] += __shfl_xor_sync(~0u, strength_part[r], 1);
    strength_part[r] += __shfl_xor_sync(~0u, strength_part[r], 2);
    if (t2 == 0 && (r ? on1 : on0)) {
      float *at = d_beta + (r ? place1 : place0);
      float value = *at + strength_part[r];
      if (beta_sigmoid) { float open = 1.0f / (1.0f + __expf(-logit[r])); value *= beta_max * open * (1.0f - open); }
      *at = value;
    }
  }
}
