// Gradients inside KDA chunks, as chunk_gradients and gate_gradients of triton_gradients.py.
// One CTA of 4 warps per chunk and head, warp w owns tokens 16 w .. 16 w + 15; channels go by 16 at a time. What is kept
// for all channels fills the registers: scalars of a token lie in shared memory, addresses are offsets of 32 bits, and
// decays are computed again where they are needed again.

#define FLOWS (V / 32)  // parts of the scan

struct Sum { float a[4], b[4]; };  // 16 tokens x 16 channels, two n8 tiles
__device__ __forceinline__ void add(Sum &s, const uint32_t (&m)[4], const Four &x) {
  mma_bf16(s.a, m, x.r[0], x.r[1]);
  mma_bf16(s.b, m, x.r[2], x.r[3]);
}
__device__ __forceinline__ Tile tile_of(const Sum &s) { return tile_of(s.a, s.b); }
struct Pairs { uint2 up, down; };  // 16 x 16 as they come from memory
__device__ __forceinline__ Pairs load_pairs(const u16 *pairs, int lane) {
  const u16 *p = pairs + (lane >> 2) * C + neighbours_column(lane);
  return {*(const uint2 *)p, *(const uint2 *)(p + 8 * C)};
}
__device__ __forceinline__ void operand(uint32_t (&m)[4], const Pairs &pairs, int lane, bool transposed) {
  uint2 up = from_neighbours(pairs.up, lane), down = from_neighbours(pairs.down, lane);
  if (transposed) m[0] = turned(up.x), m[1] = turned(up.y), m[2] = turned(down.x), m[3] = turned(down.y);
  else m[0] = up.x, m[1] = down.x, m[2] = up.y, m[3] = down.y;
}

extern "C" __global__ void __launch_bounds__(128, 3) kda_gradients(
    const u16 *q, const u16 *k, const X *x, const u16 *gates, const float *A_log, const float *dt_bias, const float *beta,
    const u16 *d_o, const float *rstd, const float *along, const float *flows, const long long *chunk_start,
    const int *chunk_length, const u16 *signals, const u16 *writes, const u16 *states, const u16 *d_states, const u16 *d_L,
    const u16 *d_P, u16 *d_q, u16 *d_k, X *d_x, float *d_beta /* values' part in, whole out */,
    float *d_bias /* [chunks, H, K] */, float *d_rate /* [chunks, H] */, int q_token, int q_head, int k_token, int k_head,
    int x_token, int x_head, int beta_token, int beta_head, int do_token, int do_head, int H, double scale_,
    double lower_bound_, double beta_max_, int l2norm, int beta_sigmoid, int has_rate) {
  extern __shared__ __align__(16) unsigned char memory[];
  const float scale = (float)scale_, lower_bound = (float)lower_bound_, beta_max = (float)beta_max_;
  u16 *sy = (u16 *)memory, *so = sy + C * V, *sd = so + C * V, *ss = sd + C * V, *sds = ss + 16 * V;
  uint4 *exchange = (uint4 *)(sds + 16 * V);             // [4 blocks][2 levels][2 operands][32 lanes]
  float *totals = (float *)(exchange + 4 * 2 * 2 * 32);  // [4][K] sums of a block's gates, later gradients of the bias
  float *befores = totals + 4 * K, *afters = befores + 4 * K;  // [4][K] sums up to a block, from its start on
  float *ends = afters + 4 * K;                          // [2 kinds][4 blocks][16]
  float *flow = ends + 128;                              // [K]
  float4 *rows = (float4 *)(flow + K);                   // [C] reciprocal norm of k, of q times scale, strength, norm of q
  float4 *alongs = rows + C;                             // [C] what is along k and q; beta: values' part, slope
  float *biases = (float *)(alongs + C);                 // [K]
  long long record = blockIdx.x, chunk = record / H;
  int head = record % H, length = chunk_length[chunk], tid = threadIdx.x, lane = tid & 31, w = tid >> 5;
  const long long start = chunk_start[chunk];
  if (length == 0) {
    if (tid < K) d_bias[record * K + tid] = 0.0f;
    if (tid == 0) d_rate[record] = 0.0f;
    return;
  }
  const int gr = lane >> 2, t2 = (lane & 3) * 2, four = t2 * 2;
  {
    const u16 *y_at = signals + record * C * V, *d_at = writes + record * C * V;
    const u16 *o_at = d_o + start * do_token + (long long)head * do_head;
#pragma unroll
    for (int j = 0; j < V / 16; j++) {
      int row = tid / (V / 8) + j * (1024 / V), eight = tid % (V / 8), to = spot<V>(row, eight);
      bool on = row < length;
      copy16(sy + to, y_at + row * V + eight * 8, on);
      copy16(sd + to, d_at + row * V + eight * 8, on);
      copy16(so + to, o_at + (on ? row * do_token : 0) + eight * 8, on);
    }
  }
  const u16 *from_s = states + record * K * V, *from_d = d_states + record * K * V;
  auto fetch_states = [&](int c) {
#pragma unroll
    for (int j = 0; j < 16 * (V / 8) / 128; j++) {
      int i = tid + 128 * j, row = i / (V / 8), eight = i % (V / 8), from = (c + row) * V + eight * 8;
      int to = spot<V>((row >> 2) * 2 + (row & 1) + (row & 2) * 4, eight);  // in the order of `Tile`
      copy16(ss + to, from_s + from, true);
      copy16(sds + to, from_d + from, true);
    }
    commit_copies();
  };
  fetch_states(0);
  // All that comes straight to registers is asked for before any of it is used.
  const int row = 16 * w + gr;
  const bool on0 = row < length, on1 = row + 8 < length;
  // Offsets inside the chunk of a lane's channels in tensors [tokens, H, K] and in q, k and x.
  const uint32_t here = row * H * K + four, q_here = row * q_token + four, k_here = row * k_token + four;
  const u16 *q_at = q + start * q_token + (long long)head * q_head, *k_at = k + start * k_token + (long long)head * k_head;
  const X *x_at = x + start * x_token + (long long)head * x_head;
  const long long base = (start * H + head) * K;
  auto load = [&](const u16 *from, uint32_t offset, int step) -> Four {
    uint2 a = on0 ? load8(from + offset) : make_uint2(0u, 0u);
    uint2 b = on1 ? load8(from + offset + 8u * step) : make_uint2(0u, 0u);
    return {{a.x, b.x, a.y, b.y}};
  };
  const bool far_rows = w >= 2, near_rows = w & 1;
  const int far_at = far_rows ? 16 * w * C : 32 * C + 16 * w, far_step = far_rows ? 16 : 16 * C;
  const int near_at = near_rows ? 16 * w * C + 16 * (w - 1) : 16 * (w + 1) * C + 16 * w, own_at = 16 * w * C + 16 * w;
  Four all_gates[K / 16];
#pragma unroll
  for (int c = 0; c < K; c += 16) all_gates[c / 16] = load(gates + base, here + c, H * K);
  const u16 *pl = d_L + record * C * C, *pp = d_P + record * C * C;
  const Pairs raw[8] = {load_pairs(pl + far_at, lane), load_pairs(pl + far_at + far_step, lane), load_pairs(pp + far_at, lane),
                        load_pairs(pp + far_at + far_step, lane), load_pairs(pl + near_at, lane), load_pairs(pp + near_at, lane),
                        load_pairs(pl + own_at, lane), load_pairs(pp + own_at, lane)};
  for (int i = tid; i < K; i += 128) {
    float part[FLOWS], sum = 0.0f;
#pragma unroll
    for (int f = 0; f < FLOWS; f++) part[f] = flows[(record * FLOWS + f) * K + i];
    biases[i] = GATE ? dt_bias[head * K + i] : 0.0f;
    for (int f = 0; f < FLOWS; f++) sum += part[f];
    flow[i] = sum;
  }
  if (tid < C) {
    float strength = 0.0f, slope = 1.0f, values = 0.0f;
    float2 norm = make_float2(1.0f, 1.0f), part = make_float2(0.0f, 0.0f);
    if (tid < length) {
      long long place = (start + tid) * H + head;
      strength = beta[(start + tid) * beta_token + (long long)head * beta_head];
      values = d_beta[place];
      if (l2norm) norm = *(const float2 *)(rstd + place * 2), part = *(const float2 *)(along + place * 2);
      if (beta_sigmoid) {
        float open = 1.0f / (1.0f + __expf(-strength));
        strength = beta_max * open;
        slope = strength * (1.0f - open);
      }
    }
    rows[tid] = make_float4(norm.y, norm.x * scale, strength, norm.x);
    alongs[tid] = make_float4(part.y, part.x / scale, values, slope);
  }
  const float rate = GATE && has_rate ? __expf(A_log[head]) : 1.0f;
  uint32_t prefix_m[4], half_m[4], octet_m[4], later_m[4];
  mask_operand(prefix_m, lane, ONE_F16, [](int i, int t) { return t <= i; });
  mask_operand(half_m, lane, ONE_F16, [](int i, int t) { return i >= 8 ? (t >= 8 && t <= i) : (t < 8 && t > i); });
  mask_operand(octet_m, lane, ONE_F16, [](int i, int t) { return (i >> 3) == (t >> 3) && t <= i; });
  mask_operand(later_m, lane, ONE_BF16, [](int i, int t) { return t >= i; });
  const uint32_t ones = ONE_F16 | ONE_F16 << 16, ones_m[4] = {ones, ones, ones, ones};
  // Totals of the blocks' gates.
#pragma unroll
  for (int c = 0; c < K; c += 16) {
    Tile all = sums(ones_m, turned(all_gates[c / 16]));
    if (gr == 0) *(float4 *)(totals + w * K + c + four) = make_float4(all.v[0], all.v[1], all.v[2], all.v[3]);
  }
  // Gradients of the pairs, kept for all channels. Far: blocks of the other half; near: the neighbour; diag: the own block.
  uint32_t far_l[2][4], far_p[2][4], near_l[4], near_p[4], diag_l[4], diag_p[4];
  for (int j = 0; j < 2; j++) {
    operand(far_l[j], raw[j], lane, !far_rows);
    operand(far_p[j], raw[2 + j], lane, !far_rows);
  }
  operand(near_l, raw[4], lane, !near_rows);
  operand(near_p, raw[5], lane, !near_rows);
  operand(diag_l, raw[6], lane, false);
  operand(diag_p, raw[7], lane, false);
  float strength_part[2] = {0, 0}, rate_part = 0.0f;
  __syncthreads();
  add_up(totals, befores, afters, tid);
  __syncthreads();

#pragma unroll 1
  for (int c = 0; c < K; c += 16) {
    const float4 row0 = rows[row], row1 = rows[row + 8];
    const float strength[2] = {row0.z, row1.z};
    auto with_strength = [&](Tile p) {
      for (int i = 0; i < 8; i++) p.v[i] *= strength[i >> 2];
      return p;
    };
    Tile key = unpacked(load(k_at, k_here + c, k_token)), query = unpacked(load(q_at, q_here + c, q_token));
    Four gb = turned(load(gates + base, here + c, H * K));
    for (int i = 0; i < 8; i++) {
      key.v[i] *= i < 4 ? row0.x : row1.x;
      query.v[i] *= i < 4 ? row0.y : row1.y;
    }
    // Factors of the two upper levels, from the start of the rows' side or to it.
    Tile x16, x32;
    {
      Tile prefix = sums(prefix_m, gb);
      float4 own4 = *(const float4 *)(totals + w * K + c + four);
      float4 other4 = *(const float4 *)(totals + (w == 0 ? 1 : 2) * K + c + four);
      anchored(x16, x32, prefix, own4, other4, w);
    }
    uint4 *out = exchange + w * 128 + lane;
    auto put = [&](int slot, const Four &f) { out[slot * 32] = make_uint4(f.r[0], f.r[1], f.r[2], f.r[3]); };
    Tile product = times(key, x16);
    if (near_rows) {
      put(0, turned(packed(with_strength(product))));
      put(1, turned(packed(times(query, x16))));
    } else put(0, turned(packed(product)));
    product = times(key, x32);
    if (far_rows) {
      put(2, turned(packed(with_strength(product))));
      put(3, turned(packed(times(query, x32))));
    } else put(2, turned(packed(product)));
    wait_for_copies();
    __syncthreads();
    auto get = [&](int block, int slot) -> Four {
      uint4 f = exchange[block * 128 + slot * 32 + lane];
      return {{f.x, f.y, f.z, f.w}};
    };

    // The two ends of a pair must cancel in dG: it takes the rounded operands that entered the products.
    Tile d_write, d_read, d_key, d_sum;
    {
      Sum a = {}, b = {};
      if (far_rows) {
#pragma unroll
        for (int j = 0; j < 2; j++) { Four col = get(j, 2); add(a, far_l[j], col); add(b, far_p[j], col); }
        Tile ta = tile_of(a), tb = tile_of(b);
        Tile writing = unpacked(packed(with_strength(times(key, x32)))), reading = unpacked(packed(times(query, x32)));
        for (int i = 0; i < 8; i++) {
          d_write.v[i] = ta.v[i] * x32.v[i];
          d_read.v[i] = tb.v[i] * x32.v[i];
          d_key.v[i] = 0.0f;
          d_sum.v[i] = writing.v[i] * ta.v[i] + reading.v[i] * tb.v[i];
        }
      } else {
#pragma unroll
        for (int j = 0; j < 2; j++) { add(a, far_l[j], get(2 + j, 2)); add(a, far_p[j], get(2 + j, 3)); }
        Tile ta = tile_of(a), column = unpacked(packed(times(key, x32)));
        for (int i = 0; i < 8; i++) {
          d_write.v[i] = d_read.v[i] = 0.0f;
          d_key.v[i] = ta.v[i] * x32.v[i];
          d_sum.v[i] = -column.v[i] * ta.v[i];
        }
      }
    }
    {
      Sum a = {}, b = {};
      if (near_rows) {
        Four col = get(w - 1, 0);
        add(a, near_l, col);
        add(b, near_p, col);
        Tile ta = tile_of(a), tb = tile_of(b);
        Tile writing = unpacked(packed(with_strength(times(key, x16)))), reading = unpacked(packed(times(query, x16)));
        for (int i = 0; i < 8; i++) {
          d_write.v[i] += ta.v[i] * x16.v[i];
          d_read.v[i] += tb.v[i] * x16.v[i];
          d_sum.v[i] += writing.v[i] * ta.v[i] + reading.v[i] * tb.v[i];
        }
      } else {
        add(a, near_l, get(w + 1, 0));
        add(a, near_p, get(w + 1, 1));
        Tile ta = tile_of(a), column = unpacked(packed(times(key, x16)));
        for (int i = 0; i < 8; i++) {
          d_key.v[i] += ta.v[i] * x16.v[i];
          d_sum.v[i] -= column.v[i] * ta.v[i];
        }
      }
    }
    {  // Rows 8-15 against columns 0-7 of the block.
      Tile x = sums(half_m, gb);
      for (int i = 0; i < 8; i++) x.v[i] = ex2(x.v[i]);
      Tile kx = times(key, x);
      Four fc = packed(kx), fw = packed(with_strength(kx)), fr = packed(times(query, x));
      Four col = turned(fc), wr = turned(fw), rr = turned(fr);
      uint32_t ml[4] = {0, diag_l[1], 0, 0}, mp[4] = {0, diag_p[1], 0, 0};
      uint32_t tl[4] = {0, 0, turned_again(diag_l[1]), 0}, tp[4] = {0, 0, turned_again(diag_p[1]), 0};
      Sum a = {}, b = {}, t = {};
      add(a, ml, col);
      add(b, mp, col);
      add(t, tl, wr);
      add(t, tp, rr);
      Tile ta = tile_of(a), tb = tile_of(b), tt = tile_of(t), rc = unpacked(fc), rw = unpacked(fw), rr_ = unpacked(fr);
      for (int i = 0; i < 4; i++) {  // tokens 0-7 are columns, 8-15 rows
        d_key.v[i] += tt.v[i] * x.v[i];
        d_sum.v[i] -= rc.v[i] * tt.v[i];
        d_write.v[i + 4] += ta.v[i + 4] * x.v[i + 4];
        d_read.v[i + 4] += tb.v[i + 4] * x.v[i + 4];
        d_sum.v[i + 4] += rw.v[i + 4] * ta.v[i + 4] + rr_.v[i + 4] * tb.v[i + 4];
      }
    }
    Tile key_part;
    {  // Through the states.
      Sum a = {}, b = {}, t = {};
#pragma unroll 2
      for (int v = 0; v < V; v += 16) {
        uint32_t my[4], mo[4], md[4];
        Four s, d;
        const int at = spot<V>(16 * w + (lane & 15), (v >> 3) + (lane >> 4));
        const int sat = spot<V>((lane & 7) + ((lane >> 4) & 1) * 8, (v >> 3) + ((lane >> 3) & 1));
        ldmatrix(my, sy + at);
        ldmatrix(s.r, ss + sat);
        ldmatrix(mo, so + at);
        ldmatrix(md, sd + at);
        ldmatrix(d.r, sds + sat);
        add(a, my, s);
        add(b, mo, s);
        add(t, md, d);
      }
      Tile prefix = sums(prefix_m, gb), ta = tile_of(a), tb = tile_of(b), tt = tile_of(t);
      const float4 b4 = *(const float4 *)(befores + w * K + c + four), a4 = *(const float4 *)(afters + w * K + c + four);
      const float before[4] = {b4.x, b4.y, b4.z, b4.w}, after[4] = {a4.x, a4.y, a4.z, a4.w};
      for (int i = 0; i < 8; i++) {
        float rise = ex2(before[i & 3] + prefix.v[i]), fall = ex2(after[i & 3] - prefix.v[i]);
        float written = ta.v[i] * rise, read = tb.v[i] * rise, to_state = tt.v[i] * fall;
        d_write.v[i] += written;
        d_read.v[i] += read;
        d_key.v[i] += to_state;
        key_part.v[i] = key.v[i] * to_state;
        d_sum.v[i] += key.v[i] * (strength[i >> 2] * written) + query.v[i] * read - key_part.v[i];
      }
    }
    float keys[4];
    for (int i = 0; i < 4; i++) {
      keys[i] = key_part.v[i] + key_part.v[i + 4];
      for (int m = 4; m < 32; m <<= 1) keys[i] += __shfl_xor_sync(~0u, keys[i], m);
    }
    {  // Inside the eights.
      const uint32_t clamp = pack_f16(SMALLEST_OCTET_GATE, SMALLEST_OCTET_GATE);
      Four clamped;
      for (int i = 0; i < 4; i++) clamped.r[i] = max_f16x2(gb.r[i], clamp);
      Tile x = sums(octet_m, clamped), y;
      for (int i = 0; i < 8; i++) { y.v[i] = ex2(OCTET_CENTRE - x.v[i]); x.v[i] = ex2(x.v[i] - OCTET_CENTRE); }
      Four fc = packed(times(key, y)), fw = packed(with_strength(times(key, x))), fr = packed(times(query, x));
      Four col = turned(fc), wr = turned(fw), rr = turned(fr);
      uint32_t ml[4] = {diag_l[0], 0, 0, diag_l[3]}, mp[4] = {diag_p[0], 0, 0, diag_p[3]};
      uint32_t tl[4] = {turned_again(diag_l[0]), 0, 0, turned_again(diag_l[3])}, tp[4] = {turned_again(diag_p[0]), 0, 0, turned_again(diag_p[3])};
      Sum a = {}, b = {}, t = {};
      add(a, ml, col);
      add(b, mp, col);
      add(t, tl, wr);
      add(t, tp, rr);
      Tile ta = tile_of(a), tb = tile_of(b), tt = tile_of(t), rc = unpacked(fc), rw = unpacked(fw), rr_ = unpacked(fr);
      for (int i = 0; i < 8; i++) {
        d_write.v[i] += ta.v[i] * x.v[i];
        d_read.v[i] += tb.v[i] * x.v[i];
        d_key.v[i] += tt.v[i] * y.v[i];
        d_sum.v[i] += rw.v[i] * ta.v[i] + rr_.v[i] * tb.v[i] - rc.v[i] * tt.v[i];
      }
    }
    Raw<4, X> raw[2];
    if (GATE) {
      raw[0].load(x_at + (uint32_t)((on0 ? row * x_token : 0) + four + c));
      raw[1].load(x_at + (uint32_t)((on1 ? (row + 8) * x_token : 0) + four + c));
    }
    for (int i = 0; i < 8; i++) strength_part[i >> 2] += d_write.v[i] * key.v[i];
    Tile d_gate;  // dG, its sums from a token to the end of the chunk, and what reaches the gates through the state
    {
      Four hi = packed(d_sum);
      Tile hi_f = unpacked(hi), rest;
      for (int i = 0; i < 8; i++) rest.v[i] = d_sum.v[i] - hi_f.v[i];
      Sum s = {};
      add(s, later_m, turned(hi));
      add(s, later_m, turned(packed(rest)));
      d_gate = tile_of(s);
    }
    if (gr == 0) {  // row 0 of the block holds its sum
      *(float4 *)(ends + w * 16 + four) = make_float4(d_gate.v[0], d_gate.v[1], d_gate.v[2], d_gate.v[3]);
      *(float4 *)(ends + 64 + w * 16 + four) = make_float4(keys[0], keys[1], keys[2], keys[3]);
    }
    {
      const float4 along0 = alongs[row], along1 = alongs[row + 8], norm0 = rows[row], norm1 = rows[row + 8];
      Tile d_query;
      for (int i = 0; i < 8; i++) {
        float kg = d_key.v[i] + d_write.v[i] * strength[i >> 2], qg = d_read.v[i] * scale;
        if (l2norm) {
          kg = (kg - key.v[i] * (i < 4 ? along0.x : along1.x)) * (i < 4 ? norm0.x : norm1.x);
          qg = (qg - query.v[i] * (i < 4 ? along0.y : along1.y)) * (i < 4 ? norm0.w : norm1.w);
        }
        d_key.v[i] = kg;
        d_query.v[i] = qg;
      }
      auto store = [&](u16 *to, const Tile &v) {
        Four f = packed(v);
        if (on0) *(uint2 *)(to + base + (here + c)) = make_uint2(f.r[0], f.r[2]);
        if (on1) *(uint2 *)(to + base + (here + c + 8u * H * K)) = make_uint2(f.r[1], f.r[3]);
      };
      store(d_q, d_query);
      store(d_k, d_key);
    }
    __syncthreads();
    if (c + 16 < K) fetch_states(c + 16);
    {
      Tile decay;
      {
        uint32_t half_bits[4];
        for (int i = 0; i < 4; i++) half_bits[i] = turned(gb.r[i]);
        for (int i = 0; i < 8; i++) {
          uint32_t two = half_bits[(i >> 2) + (i & 2)];
          decay.v[i] = from_f16(i & 1 ? two >> 16 : two & 0xffffu);
        }
      }
      float4 last = *(const float4 *)(flow + c + four);
#pragma unroll
      for (int b = 0; b < 4; b++) {
        float4 sum = *(const float4 *)(ends + 64 + b * 16 + four);
        last.x += sum.x, last.y += sum.y, last.z += sum.z, last.w += sum.w;
        if (b > w) {
          sum = *(const float4 *)(ends + b * 16 + four);
          last.x += sum.x, last.y += sum.y, last.z += sum.z, last.w += sum.w;
        }
      }
      const float4 bias4 = *(const float4 *)(biases + c + four);
      const float lasts[4] = {last.x, last.y, last.z, last.w}, bias[4] = {bias4.x, bias4.y, bias4.z, bias4.w};
      for (int i = 0; i < 8; i++) {
        float z = GATE ? raw[i >> 2].get(i & 3) + bias[i & 3] : 0.0f;
        float d_decay = (i < 4 ? on0 : on1) ? d_gate.v[i] + lasts[i & 3] : 0.0f;
        d_gate.v[i] = gate_gradient(d_decay, z, decay.v[i], rate, lower_bound, rate_part);
      }
      if (on0) store_four(d_x + base + (here + c), d_gate.v);
      if (on1) store_four(d_x + base + (here + c + 8u * H * K), d_gate.v + 4);
      if (GATE) {
        Sum s = {};
        const uint32_t ones_b = ONE_BF16 | ONE_BF16 << 16, all_rows[4] = {ones_b, ones_b, ones_b, ones_b};
        add(s, all_rows, turned(packed(d_gate)));
        if (gr == 0) *(float4 *)(totals + w * K + c + four) = make_float4(s.a[0], s.a[1], s.b[0], s.b[1]);
      }
    }
  }
  for (int r = 0; r < 2; r++) {
    strength_part[r] += __shfl_xor_sync(~0u, strength_part[r], 1);
    strength_part[r] += __shfl_xor_sync(~0u, strength_part[r], 2);
    if (t2 == 0 && (r ? on1 : on0)) {
      const float4 part = alongs[row + 8 * r];
      d_beta[(start + row + 8 * r) * H + head] = (part.z + strength_part[r]) * part.w;
    }
  }
  if (GATE) {
    for (int m = 1; m < 32; m <<= 1) rate_part += __shfl_xor_sync(~0u, rate_part, m);
    __syncthreads();
    if (lane == 0) ends[w] = rate_part;
    for (int i = tid; i < K; i += 128)
      d_bias[record * K + i] = totals[i] + totals[K + i] + totals[2 * K + i] + totals[3 * K + i];
    __syncthreads();
    if (tid == 0) d_rate[record] = ends[0] + ends[1] + ends[2] + ends[3];
  }
}
